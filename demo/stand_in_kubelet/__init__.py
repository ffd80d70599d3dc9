"""A stand-in for the kubelet's device manager, strict about every rule of its contract with device plugins.

It serves Registration on kubelet.sock, dials plugins back, keeps their lists, admits pods through GetPreferredAllocation,
Allocate and PreStartContainer, tells through PodResources who holds what, restarts, drops streams, panics where a real one
may, and writes down every breach. Tests and the demo run the real plugin under it.
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
