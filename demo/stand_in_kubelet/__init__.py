"""A stand-in for the kubelet's device manager. It checks every rule of the contract between the kubelet and device plugins.

It serves Registration on kubelet.sock, connects to plugins, stores their lists, admits pods through GetPreferredAllocation,
Allocate and PreStartContainer, and reports through PodResources which pods hold which devices. It also restarts, drops
streams, panics where a real kubelet may panic, and records every breach of the contract. Tests and the demo run the real
plugin under it.
"""

from demo.stand_in_kubelet.admission import AdmissionError
from demo.stand_in_kubelet.device_table import KubeletPanicError
from demo.stand_in_kubelet.journal import Event, EventKind
from demo.stand_in_kubelet.kubelet import StandInKubelet
from demo.stand_in_kubelet.pods import Admission, Allocation, Container, Pod

__all__ = [
    "Admission",
    "AdmissionError",
    "Allocation",
    "Container",
    "Event",
    "EventKind",
    "KubeletPanicError",
    "Pod",
    "StandInKubelet",
]
