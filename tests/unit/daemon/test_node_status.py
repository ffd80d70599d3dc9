"""The parts of the node's status, and its complaints."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpu_plugin.daemon import node_status
from gpu_plugin.daemon.node_view import Cached, NodeView
from gpu_plugin.daemon.now import Now
from gpu_plugin.devices.device import Device
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.health.latch import NOTHING, AnyLatch, Latch, LatchKey, Proof, Verdict
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.telemetry import readings

GPU = Gpu("GPU-0", 0, pci_bus_id="00000000:1B:00.0", model="NVIDIA H100")
HEALTH = {"index": 0, "uuid": "GPU-0", "state": "healthy", "verdict": "OK", "reasons": []}
SICK = {**HEALTH, "state": "unhealthy", "verdict": "FATAL", "reasons": ["Xid 79"]}
DEVICES = (
    Device("GPU-0::0", "GPU-0", "GPU-0", "0"),
    Device("GPU-0::1", "GPU-0", "GPU-0", "0", reason="its MPS daemon is down"),
    Device("GPU-1::0", "GPU-1", "GPU-1", "1", reason="lost"),
)
HOLDERS = node_status.pods_by_id(
    {("r", "GPU-0::0"): frozenset({"default/b", "default/a"}), ("r", "GPU-1::0"): frozenset({"default/c"})}
)


def standing(*entries):
    return [(LatchKey("xid"), Latch(NOTHING, v, "Xid", since, Proof.RESET), v) for v, since in entries]


def test_a_gpu_at_a_glance():
    told = node_status.gpu(GPU, HEALTH, (), [each for each in DEVICES if each.gpu == "GPU-0"], HOLDERS)
    assert told == {
        **HEALTH,
        "bus_id": "0000:1b:00.0",
        "model": "NVIDIA H100",
        "health": "Healthy",
        "since": None,
        "withheld": ["its MPS daemon is down"],
        "holders": ["default/a", "default/b"],
        "signals": {},
        "held_back": [],
        "notices": [],
        "readings": readings.told(GPU, None),
    }


def test_since_is_that_of_the_oldest_of_what_is_worst():
    entries = standing((Verdict.DEGRADED, 10.0), (Verdict.FATAL, 30.0), (Verdict.FATAL, 20.0))
    told = node_status.gpu(GPU, SICK, entries, DEVICES, None)
    assert (told["since"], told["health"], told["withheld"], told["holders"]) == (20.0, "Unhealthy", [], None)
    assert told["signals"] == {"xid": "FATAL"}


async def test_links_that_no_resource_goes_by_are_told_as_they_are_now():
    store = SimpleNamespace(current=SimpleNamespace(resources={}))  # every GPU is excluded
    inventory = SimpleNamespace(store=store)
    parts: dict[str, Any] = dict.fromkeys(NodeView.__struct_fields__) | {
        "now": Now(),
        "inventory": inventory,
        "cached": Cached(),
    }
    view = NodeView(**parts)
    for uuid in ("GPU-0", "GPU-1"):
        view.now.node = Node((Gpu(uuid, 0),))
        told = await view.topology({})
        assert [gpu["uuid"] for gpu in cast("Sequence[dict[str, object]]", told["gpus"])] == [uuid]
        assert await view.topology({}) is told


def test_a_resource_names_what_is_unhealthy():
    told = node_status.resource({"devices": 3, "healthy": 1}, DEVICES)
    assert told == {
        "devices": 3,
        "healthy": 1,
        "unhealthy_ids": ["GPU-0::1", "GPU-1::0"],
        "retired_ids": [],
        "reasons": ["its MPS daemon is down", "lost"],
    }


def test_only_so_many_are_named_and_what_is_gone_is_named_apart():
    unhealthy = [Device(f"sick-{at}", "GPU-0", "GPU-0", "0", reason=f"reason {at}") for at in range(9)]
    gone = [Device(f"gone-{at}", "GPU-0", "GPU-0", "0", reason="repartitioned", retired=True) for at in range(9)]
    told = node_status.resource({}, [*gone, *unhealthy])
    assert told == {
        "unhealthy_ids": [f"sick-{at}" for at in range(8)],
        "retired_ids": [f"gone-{at}" for at in range(8)],
        "reasons": [f"reason {at}" for at in range(8)],
    }


def test_what_is_withheld_is_told_once_and_what_is_gone_is_not_withheld():
    down = [Device(f"GPU-0::{at}", "GPU-0", "GPU-0", "0", reason="its MPS daemon is down") for at in range(3)]
    gone = Device("GPU-0::9", "GPU-0", "GPU-0", "0", reason="gone", retired=True)
    assert node_status.gpu(GPU, HEALTH, (), [*down, gone], None)["withheld"] == ["its MPS daemon is down"]


def test_times_of_a_registration_are_on_the_wall_clock(tmp_path):
    clock = [5.0]
    registrations = Registrations(lambda: clock[0])
    assert node_status.registration(registrations.of("r"), 9.0, 1000.0)["since"] is None
    registrations.served("r", tmp_path)
    registrations.taken("r")
    told = {"registered": True, "since": 996.0, "why": "", "endpoint": str(tmp_path)}
    assert node_status.registration(registrations.of("r"), 9.0, 1000.0) == told
    clock[0] = 7.0
    registrations.away("r", "gone")
    told = {"registered": False, "since": 998.0, "why": "gone", "endpoint": str(tmp_path)}
    assert node_status.registration(registrations.of("r"), 9.0, 1000.0) == told


WELL = {
    "waiting": "",
    "configuration": {"refused": "", "unheard": ""},
    "kubelet": {"socket": "/k", "resources": {"r": {"registered": True, "why": ""}}},
    "cdi": None,
    "driver": {"trouble": ""},
    "health": {"gpus": [HEALTH]},
}
AWAY = {"r": {"registered": False, "why": "no kubelet"}}


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, []),
        ({"waiting": "another daemon"}, ["waiting: another daemon"]),
        ({"configuration": {"refused": "line 3"}}, ["configuration: line 3"]),
        ({"configuration": {"refused": "", "unheard": "403"}}, ["configuration: 403"]),
        ({"kubelet": {"socket": "/k", "resources": AWAY}}, ["r: no kubelet"]),
        ({"kubelet": {"socket": "", "resources": AWAY}}, []),  # it does not register
        ({"cdi": {"trouble": "no space"}}, ["CDI: no space"]),
        ({"cdi": {"trouble": ""}}, []),
        ({"cdi": {"trouble": "", "complaints": ["/tmp/nvidia-mps is left out"]}}, []),
        ({"labels": {"way": "file", "trouble": "/f: no such directory"}}, ["labels: /f: no such directory"]),
        ({"labels": {"way": "none", "trouble": ""}}, []),
        ({"driver": {"trouble": "not loaded"}}, ["driver: not loaded"]),
        ({"state": {"directory": "/state", "trouble": "no space"}}, ["/state: no space"]),
        (
            {"state": {"directory": "/state", "trouble": "the state directory /state does not answer"}},
            ["the state directory /state does not answer"],
        ),
        ({"state": {"directory": "/state", "trouble": ""}}, []),
        (
            {"driver": {"trouble": "", "answered": False}},
            ["driver: it has not answered yet, so no GPU is known to be usable"],
        ),
        ({"driver": {"trouble": "", "answered": True}}, []),
        ({"driver": {"trouble": "", "restart": "restart it"}}, ["driver: restart it"]),
        ({"missing": [{"name": "GPU 0000:1b:00.0", "why": "it is away"}]}, ["GPU 0000:1b:00.0 is missing: it is away"]),
        ({"missing": []}, []),
        ({"unoffered": ["GPU 0 has MIG devices"]}, ["not served as asked: GPU 0 has MIG devices"]),
        (
            {"resources": {"r": {"devices": 3, "healthy": 0, "retired": 1, "reasons": ["its MPS daemon is down"]}}},
            ["r: none of its devices is Healthy: its MPS daemon is down"],
        ),
        ({"resources": {"r": {"devices": 3, "healthy": 1, "retired": 0, "reasons": ["lost"]}}}, []),
        ({"resources": {"r": {"devices": 1, "healthy": 0, "retired": 1, "reasons": []}}}, []),
        ({"health": {"gpus": [HEALTH, SICK]}}, ["GPU 0 is Unhealthy"]),
        ({"health": {"gpus": [{**HEALTH, "state": "degraded"}]}}, []),
    ],
)
def test_what_is_wrong_is_a_sentence_each(changed, wrong):
    assert node_status.complaints({**WELL, **changed}) == wrong


def test_orders_alone_hold_a_gpu_back_only_where_no_fault_does():
    def held(*signals: str, device: str = "") -> list[str]:
        return list(
            node_status.held_back(
                [
                    (LatchKey(each, "", device), Latch(NOTHING, Verdict.FATAL, "", 1.0), Verdict.FATAL)
                    for each in signals
                ]
            )
        )

    assert held() == []
    assert held("cordon") == ["cordon"]
    assert held("node-cordon", "cordon") == ["cordon", "node-cordon"]
    assert held("cordon", "lost") == held("lost") == []
    assert held("cordon", "first-look") == []
    assert held("maintenance", "first-look") == ["maintenance"], "who is released is not looked at"
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
            of(
                "C",
                "MIG-3",
                visible_id="MIG-3",
                reason="a pod may hold its former id",
                withheld="a pod may hold its former id",
            ),
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
    for down, left in (("", 2), ("its MPS daemon is down", 1)):  # which is no fault where the GPU is released

        def unreachable(name: str, _: Device, why: str = down) -> str:
            return why if name == "mps" else ""

        unhealthy = node_status.listed(devices, {name: {} for name in devices}, unreachable).unhealthy
        counted = {name: node_status.devices_held_back(each, standings) for name, each in unhealthy.items()}
        assert counted == {"whole": 2, "slices": 1, "well": 0, "mps": left}
        faulty = {name: node_status.devices_faulty(each, standings) for name, each in unhealthy.items()}
        assert faulty == {"whole": 1, "slices": 1, "well": 0, "mps": 0}
