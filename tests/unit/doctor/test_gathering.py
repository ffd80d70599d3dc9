"""All facts of a node at once: what hangs is left behind, what fails takes nothing with it, and nothing is changed."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gpu_plugin.cli.options import settings_from
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.daemon.hardware import Hardware
from gpu_plugin.daemon.health_watch import EVERY_GPU
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.doctor import gathering
from gpu_plugin.doctor.checks import examined
from gpu_plugin.doctor.edges import host
from gpu_plugin.doctor.edges.driver import described, opened
from gpu_plugin.doctor.facts import DeviceNode, Unknown
from gpu_plugin.doctor.gathering import Places, gather
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.latch import Latch, LatchKey, Verdict
from gpu_plugin.health.observation import Fabric
from gpu_plugin.health.signals.orders import MAINTENANCE, Release
from gpu_plugin.nvml.platforms.driver import TegraDriver
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.runtime import control
from gpu_plugin.runtime.control import server
from gpu_plugin.simulation import profile
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost
from gpu_plugin.simulation.profile import load
from gpu_plugin.state.directory import StateDirectory
from gpu_plugin.state.log import FILES, HEALTH
from gpu_plugin.state.memory import Memory
from tests.state_log import store
from tests.unit.doctor.made_up import GPU, status

QUICK = "0.2s"


def settings(directory: Path, **options: object):
    """Settings for which every directory is below this one."""
    given = {
        "state_dir": str(directory / "state"),
        "device_plugin_dir": str(directory / "k/device-plugins"),
        "cdi_dir": str(directory / "cdi"),
        "driver_root_ctr_path": str(directory / "driver-root"),
        "driver_root": str(directory / "driver-root"),
        "nvml_timeout": QUICK,
    }
    return settings_from(given | options, {})


@pytest.fixture
def real(monkeypatch, node):
    """A node that is taken for a real one, whose driver and host are the simulated ones."""
    hardware = Hardware(
        SimulatedDriver(node), SimulatedHost(node), "", library=lambda: "/lib/libnvidia-ml.so.580.95.05"
    )
    monkeypatch.setattr(gathering, "hardware_for", lambda _: hardware)
    return hardware


def everything(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in directory.rglob("*")}


async def test_an_empty_machine(short_path):
    facts: Any = await gather(
        settings(short_path), 2.0, places=Places(short_path / "proc", short_path / "sys", str(short_path))
    )
    assert not isinstance(facts.driver, Unknown)
    assert facts.driver.trouble
    assert isinstance(facts.process, Unknown)  # there is no /proc here
    assert isinstance(facts.pci, Unknown)
    assert facts.daemon.status is None
    assert not facts.kubelet_directory.directory.there
    assert facts.pod_resources.absent
    found = {name: each.status for name, each in examined(facts)}
    assert found["driver-library"] == found["kubelet-directory"] == found["kubelet-socket"] == "failed"
    assert not everything(short_path)


async def test_every_gpu_is_described(short_path, real, node):
    facts: Any = await gather(settings(short_path), 2.0, places=Places(root=str(short_path)))
    assert [gpu.index for gpu in facts.driver.gpus] == list(range(8))
    first, profile = facts.driver.gpus[0], node.profile.gpus[0]
    assert (first.uuid, first.minor, first.bus_id, first.model) == (
        profile.uuid,
        profile.minor,
        profile.pci_bus_id,
        profile.name,
    )
    assert (first.persistence, first.nvswitch, first.fabric.state, first.compute_mode) == (True, True, 3, 0)
    assert set(facts.nodes.nodes) == {*host.CONTROL, *(f"/dev/nvidia{gpu.minor}" for gpu in facts.driver.gpus)}


async def test_a_gpu_that_hangs_costs_the_others_nothing(short_path, real, node, monkeypatch):
    monkeypatch.setattr(gathering, "GPU_SECONDS", 0.2)
    node.hang(3, 60)
    began = time.monotonic()
    facts: Any = await gather(settings(short_path, nvml_timeout="200ms"), 0.2, places=Places(root=str(short_path)))
    assert time.monotonic() - began < 10
    assert [gpu.index for gpu in facts.driver.gpus if gpu.trouble] == [3]
    assert "no answer within" in facts.driver.gpus[3].trouble
    assert "/dev/nvidia3" not in facts.nodes.nodes  # whose number nobody knows, and which would hang as well
    [found] = [each for name, each in examined(facts) if name == "gpus" and each.status == "failed"]
    assert "GPU 3 does not answer" in found.found
    node.heal(3)


async def test_a_driver_that_hangs(short_path, monkeypatch, real):
    over = threading.Event()
    monkeypatch.setattr(real.driver, "open", over.wait)
    facts: Any = await gather(settings(short_path), 0.2, places=Places(root=str(short_path)))
    over.set()
    assert facts.driver == Unknown("no answer within 0.2 s", hung=True)
    found = {name: each.status for name, each in examined(facts)}
    assert found["driver-library"] == "failed"
    assert found["kubelet-directory"] == "failed"  # the rest is looked at


async def test_a_device_node_that_hangs(short_path, monkeypatch, real):
    over = threading.Event()

    def opening(path, root=""):
        if path == "/dev/nvidia1":
            over.wait()
        return DeviceNode(path, True, 195, 0, 0o666, 0)

    monkeypatch.setattr(host, "device_node", opening)
    facts: Any = await gather(settings(short_path), 0.3, places=Places(root=str(short_path)))
    over.set()
    assert {path for path, node in facts.nodes.nodes.items() if node.why} == {"/dev/nvidia1"}


async def test_a_mount_that_hangs(short_path, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(gathering, "directory", lambda _: over.wait())
    facts: Any = await gather(settings(short_path), 0.2, places=Places(root=str(short_path)))
    over.set()
    assert facts.state == Unknown("no answer within 0.2 s", hung=True)
    [found] = [each for name, each in examined(facts) if name == "state-directory"]
    assert (found.status, "state D" in found.remedy) == ("failed", True)


async def test_a_simulated_node_whose_files_hang(short_path, monkeypatch):
    pipe = short_path / "node.yaml"
    os.mkfifo(pipe)
    monkeypatch.setattr(profile, "load", lambda name: os.close(os.open(name, os.O_RDONLY)))
    facts: Any = await gather(settings(short_path, simulate=str(pipe)), 0.2, places=Places(root=str(short_path)))
    os.close(os.open(pipe, os.O_RDWR))  # lets the thread go
    assert facts.driver == facts.nodes == facts.released
    assert (facts.driver.hung, facts.driver.why) == (True, f"the simulated node {pipe}: no answer within 0.2 s")
    found = {name: each.status for name, each in examined(facts)}
    assert found["driver-library"] == "failed"
    assert found["kubelet-directory"] == "failed"  # the rest is looked at


async def test_a_look_that_fails_is_a_fact_that_is_not_known(short_path, monkeypatch):
    def fail(_):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(gathering, "directory", fail)
    facts: Any = await gather(settings(short_path), 2.0, places=Places(root=str(short_path)))
    assert facts.state == Unknown("RuntimeError: a fault of ours")


async def test_released_gpus_are_left_alone(short_path, monkeypatch, real):
    """Whoever opens a GPU that is to be reset is in the way of that."""
    gpus = [
        {"index": i, "uuid": f"GPU-{i}", "state": "unhealthy", "reasons": [], "signals": s}
        for i, s in ((0, {}), (1, {"maintenance": "FATAL"}))
    ]

    async def said(_):
        return status(health={"gpus": gpus})

    (short_path / "state").mkdir()
    async with server.serve(short_path / "state", {"status": said}):
        facts: Any = await gather(settings(short_path), 2.0, places=Places(root=str(short_path)))
    assert facts.daemon.status["resources"][GPU]["healthy"] == 2
    assert facts.driver == Unknown("GPU 1 is released for maintenance, so the driver is left alone")
    assert facts.nodes.nodes == {}
    assert not real.driver.calls


@pytest.mark.parametrize("health", [None, [], {"gpus": None}, {"gpus": [{"signals": {"maintenance": "FATAL"}}]}])
async def test_where_the_daemon_says_otherwise_what_is_released_the_driver_is_left_alone(
    short_path, monkeypatch, real, health
):
    monkeypatch.setattr(control, "request", lambda *_: status(health=health))
    facts: Any = await gather(settings(short_path), 2.0, places=Places(root=str(short_path)))
    assert "whether GPUs are released for maintenance is not known (the daemon's status has no such" in facts.driver.why
    assert not real.driver.calls


def write_down(state: Path, host, *, resumed: bool = False, gpu: int | None = 1, boot: str = "") -> None:
    """As a daemon that has a GPU released (None: all) writes it down."""
    profile = host._node.profile
    latch = Latch(Release(resumed=resumed), Verdict.FATAL, "maintenance", 1.0)
    uuid = EVERY_GPU if gpu is None else profile.gpus[gpu].uuid
    entry = Evidence.of(boot or host.boot_id(), uuid, LatchKey(MAINTENANCE), latch)
    memory = Memory(StateDirectory(state), host.boot_id())
    node = Node(tuple(Gpu(each.uuid, index) for index, each in enumerate(profile.gpus)), {})
    assert memory.write_evidence((entry,))
    assert memory.write_hardware(node, ())


@pytest.mark.parametrize("daemon", ["killed", "hung", "waits"])
async def test_what_a_daemon_that_does_not_answer_has_released_is_left_alone(short_path, monkeypatch, real, daemon):
    state = short_path / "state"
    state.mkdir()
    write_down(state, real.host)
    errors = {
        "killed": control.NoDaemonError("no daemon answers."),
        "hung": control.SilentDaemonError("no answer within 10 s"),
        "waits": control.ControlError("this daemon waits for another one"),
    }

    def asked(*_):
        raise errors[daemon]

    monkeypatch.setattr(control, "request", asked)
    before = everything(state)
    facts: Any = await gather(settings(short_path), 2.0, places=Places(root=str(short_path)))
    assert facts.driver == Unknown("GPU 1 is released for maintenance, so the driver is left alone")
    assert (facts.released, facts.nodes.nodes) == (("1",), {})
    assert not real.driver.calls
    assert everything(state) == before


async def test_all_gpus_may_be_released(short_path, real):
    (short_path / "state").mkdir()
    write_down(short_path / "state", real.host, gpu=None)
    facts: Any = await gather(settings(short_path), 2.0, places=Places(root=str(short_path)))
    assert facts.driver == Unknown("all GPUs are released for maintenance, so the driver is left alone")


@pytest.mark.parametrize("was", [{"resumed": True}, {"boot": "another boot"}], ids=["resumed", "before the boot"])
async def test_what_was_released_and_is_not_any_more(short_path, real, was):
    (short_path / "state").mkdir()
    write_down(short_path / "state", real.host, **was)
    facts: Any = await gather(settings(short_path), 2.0, places=Places(root=str(short_path)))
    assert (facts.released, len(facts.driver.gpus)) == ((), 8)


@pytest.mark.parametrize("spoilt", ["refused", "a pipe", "damaged"])
async def test_where_nobody_knows_what_is_released_the_driver_is_left_alone(short_path, monkeypatch, real, spoilt):
    state = short_path / "state"
    state.mkdir()
    if spoilt == "refused":  # root may read everything

        def refuse(path):
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr("gpu_plugin.state.log.bounded", refuse)
    elif spoilt == "a pipe":
        os.mkfifo(state / FILES[0])
    else:
        store(state, HEALTH, {"boot_id": 7})
    facts: Any = await gather(settings(short_path), 2.0, places=Places(root=str(short_path)))
    assert "whether GPUs are released for maintenance is not known" in facts.driver.why
    assert not real.driver.calls
    found = dict(examined(facts))
    assert found["driver-library"].status == found["device-nodes"].status == "skipped"
    assert "root" in found["driver-library"].remedy


@pytest.mark.parametrize("profile", ["t4-4", "hgx-h100"])
async def test_a_simulated_node_as_its_daemon_keeps_it(short_path, profile, monkeypatch):
    monkeypatch.setattr(gathering, "GPU_SECONDS", 0.2)
    state = short_path / "state"
    kept = SimulatedNode(load(profile), state)
    kept.lose(2)
    kept.hang(3, 3)
    if profile == "hgx-h100":
        kept.partition(1, ["3g.40gb"])
    before = everything(short_path)
    facts: Any = await gather(settings(short_path, simulate=profile, nvml_timeout="200ms"), 0.2)
    assert {gpu.index: gpu.trouble.partition(" ")[0] for gpu in facts.driver.gpus if gpu.trouble} == {
        2: "nvmlDeviceGetHandleByIndex_v2:",
        3: "no",
    }
    assert [gpu.index for gpu in facts.driver.gpus if gpu.mig] == ([1] if profile == "hgx-h100" else [])
    assert "/dev/nvidia3" in facts.nodes.nodes
    assert everything(short_path) == before


async def test_no_such_simulated_node(short_path):
    with pytest.raises(ConfigError, match="hgx-h100"):
        await gather(settings(short_path, simulate="hgx-h10"), 2.0, places=Places(root=str(short_path)))


def test_a_driver_of_another_version_than_its_module(node, short_path):
    """Its library does not say its version then; the name of its file does, behind the link."""
    file = short_path / "libnvidia-ml.so.580.95.05"
    file.touch()
    (short_path / "libnvidia-ml.so.1").symlink_to(file.name)

    class Mismatched(SimulatedDriver):
        def open(self):
            raise NvmlError(18, "nvmlInit_v2")

    hardware = Hardware(
        Mismatched(node), SimulatedHost(node), "", library=lambda: str(short_path / "libnvidia-ml.so.1")
    )
    found = opened(hardware)
    assert (found.code, found.version) == (18, "580.95.05")


def test_the_platform_that_was_found(node):
    driver: Any = SimulatedDriver(node)
    driver.chosen = TegraDriver()
    assert opened(Hardware(driver, SimulatedHost(node), "")).platform == "tegra"


def test_a_driver_that_does_not_count(node):
    class Uncountable(SimulatedDriver):
        def device_count(self):
            raise NvmlError(999, "nvmlDeviceGetCount_v2")

    found = opened(Hardware(Uncountable(node), SimulatedHost(node), ""))
    assert (found.count, "nvmlDeviceGetCount_v2" in found.count_trouble) == (-1, True)


@pytest.mark.parametrize(
    ("links", "to_switch", "state", "leads", "waits"),
    [
        ((True, True), True, 3, True, True),
        ((False, False), None, 1, True, True),
        ((False, True), False, 0, False, True),
        ((), None, 1, False, False),
    ],
    ids=["switched", "no link up yet", "to another GPU", "passed through alone"],
)
def test_where_nvlinks_lead(node, links, to_switch, state, leads, waits):
    class Linked(SimulatedDriver):
        def nvlink_states(self, handle):
            return links

        def nvlink_to_switch(self, handle, link):
            assert links[link]
            return to_switch

        def fabric(self, handle):
            return Fabric(state)

    driver = Linked(node)
    driver.open()
    gpu = described(driver, 0)
    assert (gpu.nvswitch, gpu.fabric is not None) == (leads, waits)
