"""A substitute for the kubelet's device manager, strict about all rules of its contract with device plugins.

It serves Registration on kubelet.sock, connects to plugins, stores their lists, admits pods through GetPreferredAllocation,
Allocate and PreStartContainer, and reports devices of pods through PodResources. It can restart, drop streams, and panic where
a real kubelet may. It records each breach of the contract. Tests and the demo run the real plugin with it.
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
