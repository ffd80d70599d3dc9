"""The Events for changes of health: their reasons, messages and pods."""

from typing import Any

import pytest

from gpu_plugin.cluster.correlation import Object
from gpu_plugin.cluster.health_news import concerns_pods, news, pods_on, reason
from gpu_plugin.containers.edits import Access
from gpu_plugin.devices.device import Device, Resource
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.latch import Transition, Verdict
from gpu_plugin.kubelet.pod_listing import Holder
from gpu_plugin.kubelet.snapshot import ResourceView, Snapshot
from gpu_plugin.placement.subsets import Placement

OK, APP, DEGRADED, FATAL = Verdict.OK, Verdict.APP, Verdict.DEGRADED, Verdict.FATAL
NODE, POD = Object("Node", "node-a", uid="node-a"), Object("Pod", "p", "ns", "uid")
GPUS = (Gpu("GPU-a", 3, pci_bus_id="00000000:1B:00.0"),)


def change(signal, before, verdict, others=OK, **more):
    return Transition("GPU-a", signal, verdict, before, more.pop("detail", ""), 0.0, others=others, **more)


@pytest.mark.parametrize(("happened", "told"), [
    (change("xid", OK, FATAL), "GPUUnhealthy"),
    (change("xid", DEGRADED, FATAL), "GPUUnhealthy"),
    (change("xid", OK, APP), "ApplicationError"),
    (change("margin", OK, DEGRADED), "GPUDegraded"),
    (change("margin", OK, DEGRADED, FATAL), ""),
    (change("margin", OK, DEGRADED, DEGRADED), "GPUDegraded"),
    (change("xid", OK, FATAL, FATAL), "GPUUnhealthy"),
    (change("xid", FATAL, OK), "GPUHealthy"),
    (change("xid", FATAL, OK, APP), "GPUHealthy"),
    (change("xid", FATAL, OK, DEGRADED), "GPUDegraded"),
    (change("xid", FATAL, OK, FATAL), ""),
    (change("margin", DEGRADED, OK), "GPUHealthy"),
    (change("margin", DEGRADED, OK, DEGRADED), ""),
    (change("xid", APP, OK), ""),
    (change("cordon", OK, FATAL), "GPUCordoned"),
    (change("node-cordon", OK, FATAL), "GPUCordoned"),
    (change("cordon", FATAL, OK), "GPUUncordoned"),
    (change("maintenance", OK, FATAL), "GPUReleased"),
    (change("maintenance", FATAL, OK), "GPUResumed"),
])  # fmt: skip
def test_each_change_that_matters_has_one_of_few_reasons(happened, told):
    assert reason(happened) == told
    assert (news(happened, GPUS, NODE, 1.0) is None) == (told == "")
    assert concerns_pods(happened) == (told in {"GPUUnhealthy", "GPUDegraded", "GPUHealthy", "ApplicationError"})


def test_operators_are_told_what_to_do_and_owners_of_pods_are_not():
    happened = change("xid", OK, FATAL, detail="Xid 48 (double-bit ECC error)", xid=48, action="reset it\x1b[2J")
    told: Any = news(happened, GPUS, NODE, 1.0)
    expected = "GPU 3 (0000:1b:00.0, GPU-a) is Unhealthy: Xid 48 (double-bit ECC error)"
    assert told.message == expected + r". What to do: reset it\x1b[2J"
    assert told.warning
    of_pod: Any = news(happened, GPUS, POD, 1.0)
    assert of_pod.message == expected
    over: Any = news(change("xid", FATAL, OK, detail="Xid 48"), (), NODE, 1.0)
    assert ("GPU (GPU-a)" in over.message, "Xid 48" in over.message, over.warning) == (True, True, False)


SNAPSHOT = Snapshot(
    1,
    {
        name: ResourceView.of(Resource(name, devices), Access(), Placement())
        for name, devices in {
            "nvidia.com/gpu": (Device("GPU-a::0", "GPU-a", "GPU-a", "0"), Device("GPU-b", "GPU-b", "GPU-b", "1")),
            "nvidia.com/mig-1g.10gb": (
                Device("MIG-1", "GPU-a", "MIG-1", "0:0"),
                Device("MIG-2", "GPU-a", "MIG-2", "0:1"),
            ),
        }.items()
    },
)
HELD = {
    ("nvidia.com/gpu", "GPU-a::0"): frozenset({Holder("ns", "one", "c"), Holder("ns", "one", "d")}),
    ("nvidia.com/gpu", "GPU-b"): frozenset({Holder("ns", "two", "c")}),
    ("nvidia.com/mig-1g.10gb", "MIG-1"): frozenset({Holder("ns", "three", "c")}),
    ("nvidia.com/mig-1g.10gb", "MIG-2"): frozenset({Holder("ns", "four", "c")}),
    ("nvidia.com/gpu", "GPU-gone"): frozenset({Holder("ns", "five", "c")}),
    ("example.com/nic", "GPU-a::0"): frozenset({Holder("ns", "six", "c")}),
}


@pytest.mark.parametrize(("device", "pods"), [("", {"one", "three", "four"}), ("MIG-2", {"four"}), ("MIG-9", set())])
def test_pods_are_told_that_hold_what_is_hit(device, pods):
    assert pods_on(change("xid", OK, FATAL, device=device), HELD, SNAPSHOT) == {("ns", pod) for pod in pods}
