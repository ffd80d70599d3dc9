"""A node that is well, as facts; tests say what differs."""

import time
from typing import Any

from msgspec.structs import replace

from gpu_plugin.cli.options import settings_from
from gpu_plugin.containers.strategy_choice import CONTAINERD, ContainerdEvidence, KubeletEvidence, NodeEvidence
from gpu_plugin.doctor.check import Status
from gpu_plugin.doctor.checks import examine
from gpu_plugin.doctor.facts import (
    Api,
    Clock,
    Daemon,
    DeviceNode,
    DeviceNodes,
    Directory,
    Driver,
    Facts,
    Gpu,
    KernelModule,
    KubeletDirectory,
    Mps,
    Pci,
    PodResources,
    Process,
    Socket,
    Unknown,
)
from gpu_plugin.health.observation import Fabric

OK, NOTE, WARNING, FAILED, SKIPPED = Status.OK, Status.NOTE, Status.WARNING, Status.FAILED, Status.SKIPPED

HUNG = Unknown("no answer within 10 s", hung=True)
USER = Process(1000, 0, 2, True, False, False, "", "", True)
POD = Process(0, 0, 2, True, True, True, "", "", False)

Row = tuple[str, dict[str, Any], Status, tuple[str, ...]]
"""A check, what differs on a node that is well, how it stands, and words of the finding or its remedy."""

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


def node(path: str, major: int = 195, minor: int = 255, **more: Any) -> DeviceNode:
    known: dict[str, Any] = {"there": True, "major": major, "minor": minor, "mode": 0o666, "error": 0}
    return DeviceNode(path, **known | more)


def nodes(*changed: DeviceNode, channels: tuple[str, ...] = ()) -> DeviceNodes:
    known = [
        node("/dev/nvidiactl"),
        node("/dev/nvidia-uvm", 238, 0),
        node("/dev/nvidia-uvm-tools", 238, 1),
        node("/dev/nvidia0", minor=0),
        node("/dev/nvidia1", minor=1),
    ]
    majors = {"nvidia-frontend": 195, "nvidia-uvm": 238}
    return DeviceNodes({each.path: each for each in (*known, *changed)}, majors, channels)


def status(**more: Any) -> dict[str, Any]:
    """What a daemon says that complains of nothing."""
    return {
        "daemon": {"version": "1.2.3", "pid": 7},
        "waiting": "",
        "state": {"directory": "/var/lib/gpu-plugin", "trouble": ""},
        "driver": {"version": "580.95.05", "trouble": "", "answered": True},
        "unoffered": [],
        "kubelet": {
            "socket": f"{DIR}/kubelet.sock",
            "directory": DIR,
            "resources": {GPU: {"registered": True, "since": 1.0, "why": "", "endpoint": ""}},
        },
        "configuration": {"file": "", "refused": "", "unheard": ""},
        "cdi": None,
        "resources": {GPU: {"devices": 2, "healthy": 2, "retired": 0, "reasons": []}},
        "health": {"gpus": [{"index": 0, "uuid": "GPU-0", "state": "healthy", "reasons": [], "signals": {}}]},
    } | more


def facts(**changed: Any) -> Facts:
    """The facts of a node where every check is ok or skipped; `options` change its settings, all else the facts by name."""
    options = {"state_dir": "/var/lib/gpu-plugin", **changed.pop("options", {})}
    known: dict[str, Any] = {
        "settings": settings_from(options, {}),
        "process": Process(0, (1 << 41) - 1, 0, False, False, False, "", "unconfined", True),
        "daemon": Daemon(status()),
        "module": KernelModule(True, "580.95.05"),
        "driver": driver(gpu(0), gpu(1)),
        "pci": Pci({"0000:10:00.0": "nvidia", "0000:11:00.0": "nvidia"}),
        "nodes": nodes(),
        "kubelet_directory": KubeletDirectory(Directory(DIR, filesystem="ext4"), checkpoint=True),
        "kubelet_socket": Socket(f"{DIR}/kubelet.sock", pid=900, program="kubelet"),
        "pod_resources": PodResources("/pr/kubelet.sock", 0.004, 3, {GPU: 2}),
        "evidence": NodeEvidence(
            kubelet=KubeletEvidence(package="1.33.1"),
            sockets=("/run/containerd/containerd.sock",),
            containerd={CONTAINERD: ContainerdEvidence(file="/etc/containerd/config.toml", version=3)},
        ),
        "cdi_directory": Directory("/var/run/cdi", filesystem="tmpfs"),
        "state": Directory(
            "/var/lib/gpu-plugin", mode=0o700, filesystem="ext4", free_bytes=10 * 2**30, free_inodes=10_000
        ),
        "features": Directory("/etc/kubernetes/node-feature-discovery/features.d"),
        "clock": Clock(time.mktime((2026, 5, 1, 0, 0, 0, 0, 0, 0)), True, 0.02),
        "fabric_manager": "",
        "mps": Mps(),
        "api": Api(),
    }
    return Facts(**known | changed)


def absent(directory: Directory) -> Directory:
    return replace(directory, there=False, is_directory=False)


def judge(row: Row) -> None:
    """Holds a check to its row of a table."""
    check, differs, stands, words = row
    [found] = examine(check, facts(**dict(differs)))
    assert found.status is stands, found
    said = f"{found.found} {found.remedy}"
    assert not [word for word in words if word not in said], said
    assert found.remedy or stands in (OK, SKIPPED, NOTE)
