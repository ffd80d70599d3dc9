"""The facts of a healthy node; tests name the differences."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from gpu_plugin.cli.options import settings_from
from gpu_plugin.containers.strategy_choice import CONTAINERD, ContainerdEvidence, KubeletEvidence, NodeEvidence
from gpu_plugin.doctor.checks import examine
from gpu_plugin.doctor.checks.mps import Mps
from gpu_plugin.doctor.daemon import Daemon
from gpu_plugin.doctor.directory import Directory
from gpu_plugin.doctor.driver import Driver, Gpu, KernelModule
from gpu_plugin.doctor.finding import Status, Unknown, ok
from gpu_plugin.doctor.node import Node
from gpu_plugin.doctor.pod_resources import PodResources
from gpu_plugin.doctor.process import Process
from gpu_plugin.health.observation import Fabric
from gpu_plugin.status import model
from gpu_plugin.status.problems import problems
from gpu_plugin.status.remedies import Shell

OK, NOTE, WARNING, FAILED, SKIPPED = Status.OK, Status.NOTE, Status.WARNING, Status.FAILED, Status.SKIPPED

HUNG = Unknown("no answer within 10 s", hung=True)
USER = Process(1000, 0, 2, True, False, False, "", "", True)
POD = Process(0, 0, 2, True, True, True, "", "", False)

Row = tuple[str, dict[str, Any], Status, tuple[str, ...]]
"""A check, the facts that differ from a healthy node, the status, and words of the finding or its remedy."""

GPU = "nvidia.com/gpu"
DIR = "/var/lib/kubelet/device-plugins"


def gpu(index: int, **more: Any) -> Gpu:
    known: dict[str, Any] = {
        "uuid": f"GPU-{index}",
        "bus_id": f"00000000:1{index}:00.0",
        "minor": index,
        "model": "NVIDIA H100",
        "persistence": True,
        "fabric": Fabric(0),
        "compute_mode": 0,
    }
    return Gpu(index, **known | more)


def driver(*gpus: Gpu, **more: Any) -> Driver:
    known: dict[str, Any] = {"library": "/usr/lib64/libnvidia-ml.so.1", "version": "580.95.05"}
    return Driver(**known | {"count": len(gpus), "gpus": gpus} | more)


REGISTERED = model.Resource(devices=2, healthy=2, registration=model.Registration(registered=True, since=1.0))


def status(**more: Any) -> model.Status:
    """The status of a daemon without problems, with these changes and the problems that follow from them."""
    found = model.Status(
        daemon=model.Process(version="1.2.3", pid=7),
        state=model.State(directory="/var/lib/gpu-plugin"),
        driver=model.Driver(version="580.95.05"),
        kubelet=model.Kubelet(socket=f"{DIR}/kubelet.sock", directory=DIR),
        resources={GPU: REGISTERED},
        gpus=(model.Gpu(index=0, uuid="GPU-0"),),
    )
    found = msgspec.structs.replace(found, **more)
    return msgspec.structs.replace(found, problems=problems(found, Shell()))


FACTS: dict[str, Any] = {
    "configuration": "",
    "file": "",
    "process": Process(0, (1 << 41) - 1, 0, False, False, False, "", "unconfined", True),
    "daemon": Daemon(status()),
    "module": KernelModule(True, "580.95.05"),
    "driver": driver(gpu(0), gpu(1)),
    "released": (),
    "pci_gpus": {"0000:10:00.0": "nvidia", "0000:11:00.0": "nvidia"},
    "device_roots": {"/dev/nvidiactl": "", "/dev/nvidia0": ""},
    "majors": {"nvidia-frontend": 195, "nvidia-uvm": 238},
    "switches": 0,
    "fabric_manager": "",
    "imex_channels": frozenset(),
    "mps": Mps(),
    "state": Directory("/s", mode=0o700, filesystem="ext4", free_bytes=10 * 2**30, free_inodes=10_000),
    "kubelet_directory": (Directory(DIR, filesystem="ext4"), True),
    "kubelet_socket": ok("it is answered"),
    "other_plugins": [],
    "pod_resources": PodResources("/pr/kubelet.sock", 0.004, 3, {GPU: 2}),
    "evidence": NodeEvidence(
        kubelet=KubeletEvidence(package="1.33.1"),
        sockets=("/run/containerd/containerd.sock",),
        containerd={CONTAINERD: ContainerdEvidence(file="/etc/containerd/config.toml", version=3)},
    ),
    "cdi_directory": Directory("/var/run/cdi", filesystem="tmpfs"),
    "cdi_conflicts": (),
    "features": Directory("/etc/kubernetes/node-feature-discovery/features.d"),
    "api": [ok("it answers")],
}
"""The facts of a node on which every check is ok or skipped. A path under /dev is the finding of its device node."""


class Known:
    """A finished read."""

    def __init__(self, fact: Any) -> None:
        self.fact = fact

    def found(self) -> Any:
        return self.fact


class MadeUp(Node):
    """A node with these facts. Nothing is read but the checks themselves."""

    def __init__(self, options: dict[str, Any], facts: dict[str, Any]) -> None:
        self.settings = settings_from({"state_dir": "/s", **options}, {})
        self.configuration, self.file = facts["configuration"], facts["file"]
        self.patience = self.driver_patience = 10.0
        self.root, self.roots = Path("/nonexistent"), ("/nonexistent",) * 3
        self.facts = facts

    def begin(self, name: str, read: Any, *args: Any, seconds: float = 0.0) -> Any:  # type: ignore[override]
        if name.startswith("check-"):
            return Known(read(*args))
        return Known(self.facts.get(name, ok("can be opened")) if name.startswith("/dev/") else self.facts[name])

    def driver(self) -> Any:
        return self.facts["driver"]

    def released(self) -> Any:
        return self.facts["released"]

    def pci_gpus(self) -> Any:
        return self.facts["pci_gpus"]

    def device_roots(self) -> Any:
        return self.facts["device_roots"]


def made_up(**changed: Any) -> MadeUp:
    """A healthy node; `options` change its settings, all else the facts by name."""
    options = changed.pop("options", {})
    return MadeUp(options, FACTS | changed)


def absent(directory: Directory) -> Directory:
    return replace(directory, there=False, is_directory=False)


def judge(row: Row) -> None:
    """Holds a check to its row of a table."""
    check, differs, stands, words = row
    [found] = examine(check, made_up(**differs))
    assert found.status is stands, found
    said = f"{found.found} {found.remedy}"
    assert not [word for word in words if word not in said], said
    assert found.remedy or stands in (OK, SKIPPED, NOTE)
