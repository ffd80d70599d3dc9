"""A node as the checks read it: a read that hangs or fails affects no other, and nothing is changed."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gpu_plugin.cli.options import settings_from
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.containers.host_view import LinuxHost
from gpu_plugin.daemon.hardware import Hardware
from gpu_plugin.daemon.health_watch import EVERY_GPU
from gpu_plugin.devices.node import Gpu
from gpu_plugin.devices.node import Node as FoundNode
from gpu_plugin.doctor import check
from gpu_plugin.doctor.checks import device_nodes, examined, state_directory
from gpu_plugin.doctor.finding import Unknown, ok
from gpu_plugin.doctor.node import Node
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.explain import Explanation
from gpu_plugin.health.latch import Latch, LatchKey, Verdict
from gpu_plugin.health.signals.orders import MAINTENANCE, Release
from gpu_plugin.runtime import control
from gpu_plugin.simulation import profile
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost
from gpu_plugin.simulation.profile import load
from gpu_plugin.state.directory import StateDirectory
from gpu_plugin.state.log import FILES, HEALTH
from gpu_plugin.state.memory import Memory
from gpu_plugin.status import model
from tests.state_log import store
from tests.unit.doctor.made_up import status


def looked_at(directory: Path, patience: float = 2.0, **options: object) -> Any:
    """A node whose directories are all below this one."""
    given = {
        "state_dir": str(directory / "state"),
        "device_plugin_dir": str(directory / "k/device-plugins"),
        "cdi_dir": str(directory / "cdi"),
        "driver_root_ctr_path": str(directory / "driver-root"),
        "driver_root": str(directory / "driver-root"),
        "nvml_timeout": "0.2s",
    }
    return Node(settings_from(given | options, {}), patience, root=directory)


def stands(seen: Any) -> dict[str, str]:
    return {name: each.status.value for name, each in examined(seen)}


@pytest.fixture
def real(monkeypatch, node):
    """A node with a simulated driver and host, which Node treats as real."""
    hardware = Hardware(
        SimulatedDriver(node), SimulatedHost(node), "", library=lambda: "/lib/libnvidia-ml.so.580.95.05"
    )
    monkeypatch.setattr("gpu_plugin.doctor.node.hardware_for", lambda _: hardware)
    return hardware


def everything(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in directory.rglob("*")}


def test_an_empty_machine(short_path):
    seen = looked_at(short_path)
    seen.hardware = replace(seen.hardware, host=LinuxHost((), str(short_path / "sys"), own=False))
    found = stands(seen)
    assert found["driver-library"] == found["kubelet-directory"] == found["kubelet-socket"] == "failed"
    assert found["permissions"] == "skipped"  # there is no /proc here
    assert (seen.daemon().status, seen.pod_resources().absent) == (None, True)
    assert not everything(short_path)


def test_every_gpu_is_described(short_path, real, node):
    seen = looked_at(short_path)
    gpus = seen.driver().gpus
    assert [gpu.index for gpu in gpus] == list(range(8))
    first, described = gpus[0], node.profile.gpus[0]
    assert (first.uuid, first.minor, first.bus_id, first.model) == (
        described.uuid,
        described.minor,
        described.pci_bus_id,
        described.name,
    )
    assert (first.persistence, first.nvswitch, first.fabric.state, first.compute_mode) == (True, True, 3, 0)
    [missing] = [each.found for name, each in examined(seen) if name == "device-nodes" and each.status == "failed"]
    assert missing.partition(": ")[0].split(", ") == ["/dev/nvidiactl", *(f"/dev/nvidia{gpu.minor}" for gpu in gpus)]


def test_a_gpu_that_hangs_costs_the_others_nothing(short_path, real, node, monkeypatch):
    monkeypatch.setattr("gpu_plugin.doctor.node.GPU_SECONDS", 0.2)
    node.hang(3, 60)
    began = time.monotonic()
    seen = looked_at(short_path, 0.2)
    found = examined(seen)
    assert time.monotonic() - began < 10
    assert [gpu.index for gpu in seen.driver().gpus if gpu.trouble] == [3]
    [failed] = [each for name, each in found if name == "gpus" and each.status == "failed"]
    assert "GPU 3 does not answer: no answer within" in failed.found
    # The number of its device node is not known, and to open it would hang, too
    assert not [each for name, each in found if name == "device-nodes" and "/dev/nvidia3" in each.found]
    node.heal(3)


@pytest.fixture
def hang():
    """Blocks until the test has ended."""
    over = threading.Event()
    yield lambda *_: over.wait()
    over.set()


@pytest.mark.parametrize(
    ("options", "place", "check", "found"),
    [
        ({}, SimulatedDriver, "driver-library", "the driver does not open: no answer within 0.2 s"),
        ({}, device_nodes, "device-nodes", "/dev/nvidia1: opening it: no answer within 0.2 s"),
        ({}, state_directory, "state-directory", "no answer within 0.2 s"),
        ({"simulate": "node.yaml"}, profile, "device-nodes", "the simulated node node.yaml: no answer within 0.2 s"),
    ],
    ids=["driver", "device node", "mount", "files of a simulated node"],
)
def test_a_read_that_hangs_fails_its_check(short_path, monkeypatch, real, hang, options, place, check, found):
    name = {SimulatedDriver: "open", device_nodes: "look", state_directory: "read_directory", profile: "load"}[place]
    well = ok("can be opened")
    stuck = (lambda path, *_: hang() if path == "/dev/nvidia1" else well) if place is device_nodes else hang
    monkeypatch.setattr(place, name, stuck)
    seen: dict[str, Any] = {}
    for each, finding in examined(looked_at(short_path, 0.2, **options)):
        seen.setdefault(each, finding)
    assert (seen[check].status, found in seen[check].found, bool(seen[check].remedy)) == ("failed", True, True)
    assert seen["kubelet-directory"].status == "failed"  # the other checks run


def test_a_check_that_hangs(short_path, monkeypatch, hang):
    """A limit holds for the whole check, too, in case it blocks outside of its reads."""
    monkeypatch.setattr("gpu_plugin.doctor.checks.longest", lambda *_: 0.3)
    monkeypatch.setattr(
        "gpu_plugin.doctor.checks.CHECKS", dict.fromkeys(check.NAMES, lambda _: ok("x")) | {"clock": hang}
    )
    found = dict(examined(looked_at(short_path)))
    assert {name: each.status.value for name, each in found.items() if each.status != "ok"} == {"clock": "warning"}
    assert "no answer within 0.3 s" in found["clock"].found


@pytest.mark.parametrize(
    ("error", "why"),
    [(RuntimeError("ours"), "RuntimeError: ours"), (PermissionError(13, "denied", "/x"), "/x: denied")],
)
def test_a_read_that_fails_is_a_fact_that_is_not_known(short_path, error, why):
    def fail() -> str:
        raise error

    assert looked_at(short_path).known("it", fail) == Unknown(why)


def test_a_process_that_may_have_no_more_threads(short_path, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    seen = looked_at(short_path)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert seen.known("it", str) == Unknown("RuntimeError: can't start new thread")


def test_a_fact_is_read_once(short_path):
    seen = looked_at(short_path)
    numbers = iter(range(9))
    assert [seen.known("it", numbers.__next__) for _ in range(3)] == [0, 0, 0]


def test_released_gpus_are_left_alone(short_path, monkeypatch, real):
    """To open a GPU that an operator is about to reset prevents the reset."""
    release = Explanation(name=MAINTENANCE, detail="maintenance", verdict="FATAL")
    gpus = (model.Gpu(index=0, uuid="A"), model.Gpu(index=1, uuid="B", signals=(release,)))
    monkeypatch.setattr(control, "request", lambda *_: msgspec.to_builtins(status(gpus=gpus)))
    seen = looked_at(short_path)
    assert seen.driver() == Unknown("GPU 1 is released for maintenance, so the driver is left alone")
    assert stands(seen)["device-nodes"] == "skipped"
    assert not real.driver.calls


@pytest.mark.parametrize("changed", [{"gpus": None}, {"gpus": [{"signals": "maintenance"}]}, {"daemon": None}])
def test_a_status_of_another_form_leaves_the_driver_alone(short_path, monkeypatch, real, changed):
    monkeypatch.setattr(control, "request", lambda *_: {**msgspec.to_builtins(status()), **changed})
    why = looked_at(short_path).driver().why
    assert "whether GPUs are released for maintenance is not known (the daemon is of another version" in why
    assert not real.driver.calls


def write_down(state: Path, host, *, resumed: bool = False, gpu: int | None = 1, boot: str = "") -> None:
    """Store the release of a GPU (None: of all GPUs) as a daemon does."""
    state.mkdir()
    profile = host._node.profile
    latch = Latch(Release(resumed=resumed), Verdict.FATAL, "maintenance", 1.0)
    uuid = EVERY_GPU if gpu is None else profile.gpus[gpu].uuid
    entry = Evidence.of(boot or host.boot_id(), uuid, LatchKey(MAINTENANCE), latch)
    memory = Memory(StateDirectory(state), host.boot_id())
    found = FoundNode(tuple(Gpu(each.uuid, index) for index, each in enumerate(profile.gpus)), {})
    assert memory.write_evidence((entry,))
    assert memory.write_hardware(found, ())


@pytest.mark.parametrize(
    "error",
    [
        control.NoDaemonError("no daemon answers."),
        control.SilentDaemonError("no answer within 10 s"),
        control.ControlError("this daemon waits for another one"),
    ],
    ids=["killed", "hung", "waits"],
)
def test_the_stored_releases_of_a_daemon_that_does_not_answer(short_path, monkeypatch, real, error):
    state = short_path / "state"
    write_down(state, real.host)

    def refuse(*_):
        raise error

    monkeypatch.setattr(control, "request", refuse)
    before = everything(state)
    seen = looked_at(short_path)
    assert seen.driver() == Unknown("GPU 1 is released for maintenance, so the driver is left alone")
    assert (seen.released(), stands(seen)["device-nodes"]) == (("1",), "skipped")
    assert not real.driver.calls
    assert everything(state) == before


def test_all_gpus_may_be_released(short_path, real):
    write_down(short_path / "state", real.host, gpu=None)
    why = looked_at(short_path).driver().why
    assert why == "all GPUs are released for maintenance, so the driver is left alone"


@pytest.mark.parametrize("was", [{"resumed": True}, {"boot": "another boot"}], ids=["resumed", "before the boot"])
def test_a_release_that_is_over(short_path, real, was):
    write_down(short_path / "state", real.host, **was)
    seen = looked_at(short_path)
    assert (seen.released(), len(seen.driver().gpus)) == ((), 8)


@pytest.mark.parametrize("spoilt", ["refused", "a pipe", "damaged", "no record"])
def test_releases_that_cannot_be_read_leave_the_driver_alone(short_path, monkeypatch, real, spoilt):
    state = short_path / "state"
    state.mkdir()
    if spoilt == "refused":  # root may read everything

        def refuse(path):
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr("gpu_plugin.state.log.bounded", refuse)
    elif spoilt == "a pipe":
        os.mkfifo(state / FILES[0])
    elif spoilt == "no record":
        (state / FILES[1]).write_bytes(b"1 00000000 health {}\n")
    else:
        store(state, HEALTH, {"boot_id": 7})
    found = dict(examined(looked_at(short_path)))
    assert not real.driver.calls
    assert found["driver-library"].status == found["device-nodes"].status == "skipped"
    assert "whether GPUs are released for maintenance is not known" in found["driver-library"].found
    assert "root" in found["driver-library"].remedy


@pytest.mark.parametrize("simulated", ["t4-4", "hgx-h100"])
def test_a_simulated_node_as_its_daemon_keeps_it(short_path, simulated, monkeypatch):
    monkeypatch.setattr("gpu_plugin.doctor.node.GPU_SECONDS", 0.2)
    kept = SimulatedNode(load(simulated), short_path / "state")
    kept.lose(2)
    kept.hang(3, 3)
    if simulated == "hgx-h100":
        kept.partition(1, ["3g.40gb"])
    before = everything(short_path)
    seen = looked_at(short_path, 0.2, simulate=simulated)
    gpus = seen.driver().gpus
    assert {gpu.index: gpu.trouble.partition(" ")[0] for gpu in gpus if gpu.trouble} == {
        2: "nvmlDeviceGetHandleByIndex_v2:",
        3: "no",
    }
    assert [gpu.index for gpu in gpus if gpu.mig] == ([1] if simulated == "hgx-h100" else [])
    assert stands(seen)["device-nodes"] == "ok"
    assert everything(short_path) == before


def test_no_such_simulated_node(short_path):
    with pytest.raises(ConfigError, match="hgx-h100"):
        looked_at(short_path, simulate="hgx-h10")


def test_gpus_on_the_bus_in_the_form_of_sysfs(short_path, monkeypatch, real):
    device = short_path / "sys/bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    for sysfs, gpus in (("sys", {"0000:1b:00.0": ""}), ("none", Unknown("sysfs does not list the PCI bus"))):
        seen = looked_at(short_path)
        seen.hardware = replace(real, host=LinuxHost((), str(short_path / sysfs), own=False))
        assert seen.pci_gpus() == gpus
