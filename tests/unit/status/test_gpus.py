"""The entries of GPUs and resources in the status."""

from typing import Any, cast

import pytest

from gpu_plugin.devices.device import Device, Resource
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.explain import Explained, Explanation
from gpu_plugin.health.latch import NOTHING, AnyLatch, Latch, LatchKey, Proof, Verdict
from gpu_plugin.kubelet.pod_listing import Holder
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.kubelet.snapshot import ResourceView
from gpu_plugin.placement.views.report import Offered
from gpu_plugin.status import gpus, model

GPU = Gpu("GPU-0", 0, pci_bus_id="00000000:1B:00.0", model="NVIDIA H100")
WELL = Explained(True, Verdict.OK)
SICK = Explained(False, Verdict.FATAL, (Explanation(name="xid", detail="Xid 79", verdict="FATAL"),))
DEVICES = (
    Device("GPU-0::0", "GPU-0", "GPU-0", "0"),
    Device("GPU-0::1", "GPU-0", "GPU-0", "0", reason="its MPS daemon is down"),
    Device("GPU-1::0", "GPU-1", "GPU-1", "1", reason="lost"),
)
A, B = Holder("default", "a", "main"), Holder("default", "b", "main")


def standing(*entries: tuple[Verdict, float]) -> gpus.Standings:
    return [(LatchKey("xid"), Latch(NOTHING, v, "Xid", since, Proof.RESET), v) for v, since in entries]


def ordered(signal: str) -> gpus.Standings:
    return [(LatchKey(signal), Latch(NOTHING, Verdict.FATAL, "", 1.0), Verdict.FATAL)]


def view(*devices: Device, unreachable: str = "") -> ResourceView:
    class View:
        resource = Resource("r", devices)

        def unreachable(self, _: Device) -> str:
            return unreachable

    return cast("ResourceView", View())


def test_a_gpu_has_its_devices_and_the_pods_that_hold_them():
    held = gpus.holdings(
        {("r", "GPU-0::0"): frozenset({A, B}), ("r", "GPU-0::1"): frozenset({A}), ("r", "GPU-1"): frozenset({B})}
    )
    offered = [("r", Offered("GPU-0", "GPU-0", "0", listed=4, healthy=4, shared="timeSlicing"))]
    found = gpus.gpu(GPU, WELL, (), (), offered, held)
    assert (found.index, found.bus_id, found.model, found.state) == (0, "0000:1b:00.0", "NVIDIA H100", "healthy")
    assert found.holders == ("default/a", "default/b")
    (devices,) = found.devices
    assert (devices.resource, devices.listed, devices.held, devices.left_out) == ("r", 4, 3, 0)
    assert [(each.pod, each.devices) for each in devices.holders] == [("a", 2), ("b", 1)]


def test_pods_that_are_not_known_are_not_an_empty_list():
    found = gpus.gpu(GPU, WELL, (), (), [("r", Offered("GPU-0", "GPU-0", "0"))])
    assert (found.holders, found.devices[0].held) == (None, None)


def test_many_holders_are_counted_and_the_first_are_named():
    some = {Holder("default", f"pod-{at:03}", "main") for at in range(100)}
    held = gpus.holdings({("r", "GPU-0::0"): frozenset(some)})
    (devices,) = gpus.gpu(GPU, WELL, (), (), [("r", Offered("GPU-0", "GPU-0", "0", listed=200))], held).devices
    assert (len(devices.holders), devices.left_out, devices.held) == (gpus.MAX_HOLDERS, 36, 100)


def test_since_is_the_time_of_the_oldest_signal_with_the_worst_verdict():
    entries = standing((Verdict.DEGRADED, 10.0), (Verdict.FATAL, 30.0), (Verdict.FATAL, 20.0))
    assert gpus.gpu(GPU, SICK, entries).since == 20.0
    assert gpus.gpu(GPU, WELL, ()).since is None


@pytest.mark.parametrize(
    ("explained", "latches", "withheld", "state"),
    [
        (WELL, (), (), "healthy"),
        (Explained(True, Verdict.APP), standing((Verdict.APP, 1.0)), (), "healthy"),
        (Explained(True, Verdict.DEGRADED), standing((Verdict.DEGRADED, 1.0)), (), "degraded"),
        (WELL, (), ("its MPS daemon is down",), "withheld"),
        (Explained(True, Verdict.DEGRADED), standing((Verdict.DEGRADED, 1.0)), ("down",), "withheld"),
        (SICK, standing((Verdict.FATAL, 1.0)), ("down",), "unhealthy"),
        (SICK, ordered("cordon"), (), "held-back"),
        (SICK, [*ordered("cordon"), *standing((Verdict.FATAL, 1.0))], (), "unhealthy"),
    ],
)
def test_the_state_is_that_of_the_worst_cause(explained, latches, withheld, state):
    assert gpus.gpu(GPU, explained, latches, withheld).state == state


def test_a_resource_has_the_reasons_of_its_unhealthy_devices():
    found = gpus.listed({"r": view(*DEVICES)}, {}).resources["r"]
    assert found == model.Resource(devices=3, healthy=1, reasons=("its MPS daemon is down", "lost"))


def test_only_the_first_reasons_are_named_and_retired_devices_are_counted_apart():
    unhealthy = [Device(f"sick-{at}", "GPU-0", "GPU-0", "0", reason=f"reason {at}") for at in range(9)]
    gone = [Device(f"gone-{at}", "GPU-0", "GPU-0", "0", reason="repartitioned", retired=True) for at in range(9)]
    found = gpus.listed({"r": view(*gone, *unhealthy)}, {}).resources["r"]
    assert found == model.Resource(devices=18, healthy=0, retired=9, reasons=tuple(f"reason {at}" for at in range(8)))


def test_times_of_a_registration_are_on_the_wall_clock(tmp_path):
    clock = [5.0]
    registrations = Registrations(lambda: clock[0])
    assert gpus.registration(registrations.of("r"), 9.0, 1000.0).since is None
    registrations.served("r", tmp_path)
    registrations.taken("r")
    told = model.Registration(registered=True, since=996.0, endpoint=str(tmp_path))
    assert gpus.registration(registrations.of("r"), 9.0, 1000.0) == told
    clock[0] = 7.0
    registrations.away("r", "gone")
    told = model.Registration(registered=False, since=998.0, why="gone", endpoint=str(tmp_path))
    assert gpus.registration(registrations.of("r"), 9.0, 1000.0) == told


def test_orders_alone_hold_a_gpu_back_only_where_no_fault_does():
    def held(*signals: str, device: str = "") -> list[str]:
        latches = [
            (LatchKey(each, "", device), Latch(NOTHING, Verdict.FATAL, "", 1.0), Verdict.FATAL) for each in signals
        ]
        return list(gpus.held_back(latches))

    assert held() == []
    assert held("cordon") == ["cordon"]
    assert held("node-cordon", "cordon") == ["cordon", "node-cordon"]
    assert held("cordon", "lost") == held("lost") == []
    assert held("cordon", "first-look") == []
    assert held("maintenance", "first-look") == ["maintenance"], "a released GPU is not read"
    assert held("xid", device="MIG-1") == []


def test_devices_with_a_fault_and_devices_that_orders_alone_hold_back_are_counted_by_resource():
    def stands(signal: str, device: str = "") -> tuple[LatchKey, AnyLatch, Verdict]:
        return LatchKey(signal, "", device), Latch(NOTHING, Verdict.FATAL, "", 1.0), Verdict.FATAL

    def of(gpu: str, name: str, **more: Any) -> Device:
        return Device(name, gpu, more.pop("visible_id", gpu), "0", **more)

    devices = {
        "whole": [of("A", "A::0", reason="cordoned"), of("A", "A::1", reason="cordoned"), of("B", "B", reason="lost")],
        "slices": [
            of("C", "MIG-1", visible_id="MIG-1", reason="cordoned"),
            of("C", "MIG-2", visible_id="MIG-2", reason="Xid 31"),
            of("C", "MIG-3", visible_id="MIG-3", reason="its former id is held", withheld="its former id is held"),
            of("C", "MIG-4", visible_id="MIG-4", reason="gone", retired=True),
        ],
        "well": [of("D", "D")],
        "mps": [of("A", "A::0", reason="cordoned"), of("E", "E::0", reason="released")],
    }
    standings = {
        "A": [stands("cordon")],
        "B": [stands("cordon"), stands("lost")],
        "C": [stands("node-cordon"), stands("xid", "MIG-2")],
        "D": [],
        "E": [stands("maintenance")],
    }
    for down, left in (("", 2), ("its MPS daemon is down", 1)):  # no fault if the GPU is released
        views = {name: view(*some, unreachable=down if name == "mps" else "") for name, some in devices.items()}
        unhealthy = gpus.listed(views, {}).unhealthy
        counted = {name: gpus.devices_held_back(each, standings) for name, each in unhealthy.items()}
        assert counted == {"whole": 2, "slices": 1, "well": 0, "mps": left}
        faulty = {name: gpus.devices_faulty(each, standings) for name, each in unhealthy.items()}
        assert faulty == {"whole": 1, "slices": 1, "well": 0, "mps": 0}
