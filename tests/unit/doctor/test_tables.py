"""Checks as tables: the facts that differ from a healthy node, and the verdict."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpu_plugin.containers.strategy_choice import KubeletEvidence, NodeEvidence
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.doctor.checks.device_nodes import UNNEEDED
from gpu_plugin.doctor.checks.mps import Mps
from gpu_plugin.doctor.daemon import Daemon
from gpu_plugin.doctor.directory import Directory
from gpu_plugin.doctor.driver import Driver, KernelModule
from gpu_plugin.doctor.finding import Unknown, failed
from gpu_plugin.doctor.pod_resources import PodResources
from gpu_plugin.health.explain import Explanation, Remedy
from gpu_plugin.health.observation import Fabric
from gpu_plugin.mps import readiness
from gpu_plugin.mps.foreign import Answer, Signs, why_down
from gpu_plugin.nvml.platforms.choice import Platform
from gpu_plugin.status import model
from tests.unit.doctor.made_up import (
    DIR,
    FAILED,
    GPU,
    HUNG,
    NOTE,
    OK,
    POD,
    REGISTERED,
    SKIPPED,
    USER,
    WARNING,
    Row,
    absent,
    driver,
    gpu,
    judge,
    status,
)

NO_DRIVER = Driver(int(Return.LIBRARY_NOT_FOUND), "dlopen: no libnvidia-ml.so.1", count=0)
JOINED: dict[str, Any] = {"nvswitch": True, "fabric": Fabric(3, 0, summary=1)}
STARTING: dict[str, Any] = {"nvswitch": True, "fabric": Fabric(2)}
OLD_SWITCHED = driver(gpu(0, nvswitch=True, fabric=None))
CDI = {"device_list_strategy": "cdi-cri"}
IMEX = {"imex_channel_ids": "0"}
LABELS = {"node_labels": "file"}
UNWRITABLE = (Directory(DIR, writable=False), False)
STATE = Directory("/s", mode=0o700, filesystem="ext4", free_bytes=2**40, free_inodes=2**20)
NOT_CDI = NodeEvidence(kubelet=KubeletEvidence(package="1.27.1"), sockets=("/run/containerd/containerd.sock",))
XID = Explanation(name="xid", detail="Xid 79 (fell off the bus)", verdict="FATAL", remedy=Remedy.REBOOT)
SICK = model.Gpu(index=3, uuid="GPU-3", state="unhealthy", healthy=False, verdict="FATAL", signals=(XID,))
CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"
LOST = {GPU: replace(REGISTERED, registration=model.Registration(why="waiting for the kubelet"))}


def unwell(**more: Any) -> dict[str, Any]:
    return {"daemon": Daemon(status(**more))}


def withheld(why: str) -> dict[str, Any]:
    return unwell(gpus=(model.Gpu(index=0, uuid="GPU-0", state="withheld", withheld=(why,)),))


TABLE: list[Row] = [
    ("configuration", {}, OK, ("no file",)),
    ("configuration", {"configuration": "c.yaml:2: unknown key"}, FAILED, ("c.yaml:2", "validate")),
    ("configuration", {"configuration": Unknown("c.yaml: no answer within 1 s", hung=True)}, FAILED, ("state D",)),
    ("configuration", {"options": {"config_file_srcdir": "/configs", "node_name": "n"}}, NOTE, ("label", "/configs")),
    ("configuration", {"file": "/configs/a.yaml"}, OK, ("/configs/a.yaml can be used",)),
    ("configuration", {"options": {"default_config": "a"}}, WARNING, ("--default-config", "no effect")),
    ("permissions", {}, OK, ("uid 0", "all capabilities", "on the host")),
    ("permissions", {"process": replace(POD, capabilities=1 << 21)}, OK, ("the capability SYS_ADMIN",)),
    ("permissions", {"process": replace(POD, capabilities=0xA80425FB)}, OK, ("MKNOD, AUDIT_WRITE, SETFCAP",)),
    ("permissions", {"process": replace(POD, capabilities=(1 << 41) - 1 & ~(1 << 25))}, OK, ("but SYS_TIME",)),
    ("permissions", {"process": USER}, NOTE, ("uid 1000", "as root")),
    ("permissions", {"process": POD}, OK, ("no capability", "a seccomp filter", "read-only root", "in a container")),
    ("permissions", {"process": POD, "options": {"mig_strategy": "single"}}, WARNING, ("SYS_ADMIN", "MIG monitoring")),
    ("security-modules", {}, OK, ("neither SELinux nor AppArmor",)),
    (
        "security-modules",
        {"process": replace(POD, selinux="enforcing", label="u:r:container_t:s0")},
        NOTE,
        ("ausearch",),
    ),
    ("security-modules", {"process": replace(POD, selinux="enforcing", label="u:r:spc_t:s0")}, OK, ("spc_t",)),
    ("security-modules", {"process": replace(POD, label="cri-containerd.apparmor.d (enforce)")}, OK, ("AppArmor",)),
    ("driver-library", {}, OK, ("/usr/lib64/libnvidia-ml.so.1", "580.95.05")),
    ("driver-library", {"driver": NO_DRIVER}, FAILED, ("install the NVIDIA",)),
    ("driver-library", {"driver": Driver(9, "not loaded (9)", "/l")}, FAILED, ("not loaded", "privileged")),
    ("driver-library", {"driver": Driver(18, "nvmlInit: mismatch (18)", "/l")}, FAILED, ("mismatch",)),
    ("driver-library", {"driver": Driver(4, "nvmlInit: no permission (4)", "/l")}, FAILED, ("as root",)),
    ("driver-library", {"driver": Driver(999, "nvmlInit: unknown (999)", "/l")}, FAILED, ("kernel log",)),
    ("driver-library", {"driver": HUNG}, FAILED, ("does not open", "reboot")),
    ("driver-library", {"driver": Unknown("GPU 1 is released")}, SKIPPED, ("released", "")),
    ("driver-library", {"driver": driver(platform=Platform.WSL)}, NOTE, ("WSL",)),
    ("driver-library", {"driver": driver(count=-1, count_trouble="unknown (999)")}, FAILED, ("how many GPUs",)),
    ("driver-versions", {}, OK, ("both of version 580.95.05",)),
    ("driver-versions", {"module": KernelModule(True, "575.57")}, FAILED, ("module of 575.57", "reboot")),
    ("driver-versions", {"module": KernelModule(False)}, FAILED, ("not loaded", "modprobe")),
    ("driver-versions", {"module": KernelModule(False, nouveau=True)}, FAILED, ("nouveau", "blacklist")),
    ("driver-versions", {"module": KernelModule(True)}, SKIPPED, ("/proc/driver/nvidia/version",)),
    ("driver-versions", {"driver": NO_DRIVER}, OK, ("kernel module 580.95.05",)),
    ("driver-versions", {"driver": driver(platform=Platform.TEGRA)}, SKIPPED, ("tegra",)),
    ("driver-versions", {"options": {"simulate": "hgx-h100"}}, SKIPPED, ("simulated",)),
    ("gpus", {}, OK, ("all 2 answer", "NVIDIA H100")),
    ("gpus", {"driver": driver(gpu(0), gpu(1, trouble="GPU is lost (15)"))}, FAILED, ("GPU 1 does not answer", "lost")),
    ("gpus", {"driver": driver(), "pci_gpus": {}}, FAILED, ("finds no GPU", "lspci")),
    ("gpus", {"driver": driver(gpu(0)), "pci_gpus": {"0000:1b:00.0": "nouveau"}}, WARNING, ("0000:1b:00.0", "nouveau")),
    ("gpus", {"driver": driver(gpu(0)), "pci_gpus": {"0000:1b:00.0": "vfio-pci"}}, OK, ("answers",)),
    ("gpus", {"driver": NO_DRIVER}, SKIPPED, ("0000:10:00.0 (nvidia)",)),
    ("gpus", {"driver": NO_DRIVER, "pci_gpus": Unknown("no bus")}, SKIPPED, ("not open",)),
    ("device-nodes", {}, OK, ("/dev/nvidia-uvm-tools and the device nodes of 2 GPUs",)),
    ("device-nodes", {"driver": driver(platform=Platform.WSL)}, SKIPPED, ("platform",)),
    ("device-nodes", {"options": {"simulate": "t4-4"}, "device_roots": HUNG}, FAILED, ("state D",)),
    ("device-nodes", {"/dev/nvidia-uvm-tools": UNNEEDED}, OK, ("/dev/nvidiactl, /dev/nvidia-uvm and the device",)),
    ("device-nodes", {"/dev/nvidia1": HUNG}, FAILED, ("/dev/nvidia1: opening it: no answer", "hangs")),
    ("device-nodes", {f"/dev/nvidia{i}": failed("x", "y") for i in (0, 1)}, FAILED, ("/dev/nvidia0, /dev/nvidia1: x",)),
    ("device-nodes", {"released": ("1",), "driver": Unknown("GPU 1 is released")}, SKIPPED, ("maintenance",)),
    ("device-nodes", {"released": HUNG, "driver": HUNG}, SKIPPED, ("not known",)),
    ("persistence-mode", {}, OK, ("on",)),
    (
        "persistence-mode",
        {"driver": driver(gpu(0), gpu(1, persistence=False), gpu(2, persistence=False))},
        WARNING,
        ("GPUs 1, 2", "nvidia-persistenced"),
    ),
    ("persistence-mode", {"driver": driver(gpu(0, persistence=None))}, SKIPPED, ("no GPU reports",)),
    ("persistence-mode", {"driver": NO_DRIVER}, SKIPPED, ("not open",)),
    ("fabric-manager", {}, OK, ("not needed",)),
    ("fabric-manager", {"driver": NO_DRIVER}, SKIPPED, ("not open",)),
    ("fabric-manager", {"driver": driver(gpu(0, **JOINED), gpu(1, **JOINED))}, OK, ("joined",)),
    ("fabric-manager", {"driver": driver(*(gpu(i, **STARTING) for i in range(3)))}, FAILED, ("GPU 0, 1, 2",)),
    (
        "fabric-manager",
        {"driver": driver(gpu(0, **JOINED), gpu(1, **JOINED), gpu(2, fabric=Fabric(0)))},
        WARNING,
        ("GPU 2", "2 other"),
    ),
    (
        "fabric-manager",
        {"driver": driver(gpu(0, **JOINED), gpu(1, fabric=None), gpu(2, fabric=None))},
        WARNING,
        ("GPU 1, 2",),
    ),
    ("fabric-manager", {"driver": driver(gpu(0, **JOINED), gpu(1, fabric=None, model="NVIDIA L4"))}, OK, ("joined",)),
    ("fabric-manager", {"driver": driver(gpu(0, **JOINED), gpu(1, fabric=None, mig=True))}, OK, ("joined",)),
    ("fabric-manager", {"driver": driver(gpu(0, **STARTING))}, FAILED, ("NVreg_NvLinkDisable=1",)),
    ("fabric-manager", {"driver": driver(gpu(0, **STARTING, mig=True))}, FAILED, ("does not run",)),
    ("fabric-manager", {"driver": OLD_SWITCHED, "switches": 2}, FAILED, ("2 NVSwitches", "does not run")),
    ("fabric-manager", {"driver": OLD_SWITCHED, "fabric_manager": "process 77"}, OK, ("process 77",)),
    ("fabric-manager", {"driver": OLD_SWITCHED, "fabric_manager": "/run/s"}, OK, ("/run/s",)),
    ("fabric-manager", {"driver": OLD_SWITCHED, "process": POD}, NOTE, ("cannot be seen", "systemctl status")),
    ("fabric-manager", {"driver": NO_DRIVER, "switches": 2}, FAILED, ("2 NVSwitches",)),
    ("imex-channels", {}, SKIPPED, ("--imex-channel-ids",)),
    ("imex-channels", {"options": IMEX}, WARNING, ("channel0", "do not get", "nvidia-imex")),
    ("imex-channels", {"options": {"imex_channel_ids": "0", "imex_required": True}}, FAILED, ("does not start",)),
    ("imex-channels", {"options": {"imex_channel_ids": "auto"}}, OK, ("pods get no channel",)),
    ("imex-channels", {"options": {**IMEX, "imex_required": True}, "imex_channels": {CHANNEL}}, OK, ("exists",)),
    ("imex-channels", {"options": IMEX, "imex_channels": HUNG}, WARNING, ("no answer within 10 s",)),
    ("mps", {}, SKIPPED, ("no trace",)),
    ("mps", {"mps": Mps(((8, "nvidia-cuda-mps-"),))}, WARNING, ("process 8", "no resource is shared", "quit")),
    ("mps", {"mps": Mps((), {"/m/nvidia.com/gpu": True}, "/m")}, WARNING, ("/m/nvidia.com/gpu",)),
    ("mps", {"mps": Mps((), {"/m/nvidia.com/gpu": False}, "/m")}, NOTE, ("cleanup --mps --mps-root /m",)),
    ("mps", {"driver": driver(gpu(0), gpu(1, compute_mode=3))}, WARNING, ("GPU 1", "-c DEFAULT")),
    ("mps", {"mps": HUNG}, WARNING, ("no answer within 10 s",)),
    ("state-directory", {}, OK, ("ext4", "10240 MiB free")),
    ("state-directory", {"state": replace(absent(STATE), writable=True)}, OK, ("once it is made",)),
    ("state-directory", {"state": replace(STATE, filesystem="tmpfs", mount="/run")}, WARNING, ("next boot",)),
    ("state-directory", {"state": replace(STATE, filesystem="overlay"), "process": POD}, WARNING, ("hostPath",)),
    ("state-directory", {"state": replace(STATE, filesystem="overlay")}, OK, ()),
    ("state-directory", {"state": replace(STATE, free_bytes=2**20)}, WARNING, ("1 MiB", "make room")),
    ("state-directory", {"state": replace(STATE, free_bytes=0)}, FAILED, ("0 MiB",)),
    ("state-directory", {"state": replace(STATE, free_inodes=0)}, FAILED, ("0 files",)),
    ("state-directory", {"state": replace(STATE, mode=0o777)}, WARNING, ("0777", "chmod go-w /s")),
    ("state-directory", {"state": replace(STATE, read_only=True, writable=False)}, FAILED, ("read-only", "cordons")),
    ("state-directory", {"state": replace(STATE, writable=False)}, FAILED, ("even by root",)),
    ("state-directory", {"state": replace(STATE, writable=False), "process": USER}, NOTE, ("uid 1000",)),
    ("state-directory", {"state": replace(STATE, error="Permission denied"), "process": USER}, NOTE, ("as root",)),
    ("state-directory", {"state": replace(STATE, error="Input/output error")}, FAILED, ("kernel log",)),
    ("state-directory", {"state": replace(STATE, is_directory=False)}, FAILED, ("not a directory",)),
    ("state-directory", {"state": HUNG}, FAILED, ("no answer within 10 s", "state D")),
    ("kubelet-directory", {}, OK, (DIR,)),
    ("kubelet-directory", {"kubelet_directory": (absent(Directory(DIR)), False)}, FAILED, ("no directory", "mount")),
    ("kubelet-directory", {"kubelet_directory": (Directory(DIR), False)}, NOTE, ("kubelet_internal_checkpoint",)),
    ("kubelet-directory", {"kubelet_directory": (Directory(DIR, removed=True), False)}, FAILED, ("delete this pod",)),
    ("kubelet-directory", {"kubelet_directory": UNWRITABLE}, FAILED, ("even by root",)),
    ("kubelet-directory", {"kubelet_directory": UNWRITABLE, "process": USER}, NOTE, ("uid 1000",)),
    ("kubelet-directory", {"kubelet_directory": (Directory(DIR, read_only=True), False)}, FAILED, ("read-only",)),
    ("kubelet-directory", {"kubelet_directory": (Directory(DIR, error="Stale"), False)}, FAILED, ("Stale",)),
    ("kubelet-directory", {"kubelet_directory": HUNG}, FAILED, (DIR, "state D")),
    ("kubelet-socket", {"options": {"kubelet_socket": ""}}, NOTE, ("--kubelet-socket",)),
    ("kubelet-socket", {"kubelet_socket": HUNG}, FAILED, ("kubelet.sock", "restart the kubelet")),
    ("other-plugins", {}, OK, ("no other plugin",)),
    ("other-plugins", {"other_plugins": ["nvidia-gpu.sock", "x.sock"]}, WARNING, ("nvidia-gpu.sock", "remove one")),
    ("other-plugins", {"other_plugins": ["kvm.sock"]}, NOTE, ("kvm.sock",)),
    ("other-plugins", {"other_plugins": Unknown("it is a file")}, SKIPPED, ("cannot be listed",)),
    ("pod-resources", {}, OK, ("4 ms", "3 devices")),
    ("pod-resources", {"pod_resources": PodResources("/p", absent=True, trouble="no")}, WARNING, ("mount",)),
    ("pod-resources", {"pod_resources": PodResources("/p", trouble="/p: UNAVAILABLE")}, WARNING, ("UNAVAILABLE",)),
    ("pod-resources", {"pod_resources": PodResources("/p", 2.5)}, WARNING, ("2500 ms", "slow")),
    ("pod-resources", {"pod_resources": HUNG}, WARNING, ("no answer within 10 s",)),
    ("container-runtime", {}, OK, ("envvar", "cdi-cri would work, too")),
    ("container-runtime", {"evidence": NOT_CDI}, OK, ("NVIDIA's container runtime", "1.27.1")),
    ("container-runtime", {"options": CDI}, OK, ("cdi-cri", "containerd 2")),
    ("container-runtime", {"options": CDI, "evidence": NOT_CDI}, WARNING, ("1.27.1", "enable_cdi")),
    ("container-runtime", {"options": CDI, "evidence": NodeEvidence(trouble="not mounted")}, SKIPPED, ("not mounted",)),
    ("container-runtime", {"options": {"device_list_strategy": "auto"}}, OK, ("auto chooses cdi-cri",)),
    ("container-runtime", {"options": {"device_list_strategy": "auto"}, "evidence": NOT_CDI}, OK, ("chooses envvar",)),
    ("cdi-directory", {}, SKIPPED, ("envvar",)),
    ("cdi-directory", {"options": CDI}, OK, ("/var/run/cdi",)),
    ("cdi-directory", {"options": CDI, "cdi_directory": Directory("/var/run/cdi", mode=0o777)}, WARNING, ("0777",)),
    ("cdi-directory", {"options": CDI, "cdi_conflicts": ("gpu=0 is in /c/a and in /c/b",)}, FAILED, ("/c/a",)),
    ("cdi-directory", {"options": {"device_list_strategy": "auto"}}, OK, ("/var/run/cdi",)),
    ("cdi-directory", {"options": {"device_list_strategy": "auto"}, "evidence": NOT_CDI}, SKIPPED, ("envvar",)),
    ("cdi-directory", {"options": CDI, "cdi_directory": Directory("/c", read_only=True)}, FAILED, ("read-only",)),
    ("cdi-directory", {"options": CDI, "cdi_directory": UNWRITABLE[0], "process": USER}, NOTE, ("uid 1000",)),
    (
        "cdi-directory",
        {"options": CDI, "cdi_directory": Directory("/c", filesystem="overlay"), "process": POD},
        WARNING,
        ("no runtime of the node",),
    ),
    ("cdi-directory", {"options": CDI, "cdi_directory": HUNG}, FAILED, ("state D",)),
    ("cdi-directory", {"cdi_directory": HUNG}, SKIPPED, ("envvar",)),
    ("daemon", {}, OK, ("version 1.2.3", "process 7")),
    ("daemon", {"daemon": Daemon(trouble="no daemon answers at /s")}, NOTE, ("no daemon answers", "systemctl status")),
    ("daemon", {"daemon": Daemon(trouble="denied", forbidden=True), "process": USER}, NOTE, ("denied", "as root")),
    ("daemon", {"daemon": Daemon(trouble="this daemon waits: another one", refused=True)}, FAILED, ("another one",)),
    ("daemon", unwell(gpus=(SICK,)), FAILED, ("GPU 3", "Xid 79", "systemctl reboot")),
    (
        "daemon",
        unwell(missing=(model.Missing(name="GPU 1b", uuid="G", why="away"),)),
        FAILED,
        ("1b: away", "uncordon G --override"),
    ),
    ("daemon", unwell(driver=model.Driver(restart="a call hangs")), FAILED, ("a call hangs",)),
    ("daemon", withheld("its MPS daemon is down: gone"), WARNING, ("MPS daemon is down: gone", "gpu-plugin doctor")),
    *(
        ("daemon", withheld(why), WARNING, ("MPS daemon is down", remedy))
        for why, remedy in (
            (readiness.why_down(Path("/nowhere"), None, "r"), "mps.enabled"),
            (why_down(Signs((1,)), Answer(Signs((1,)), 0.0, trouble="silent")), "Restart the program"),
        )
    ),
    ("daemon", unwell(waiting="another one", configuration=model.Configuration(since=1.0)), FAILED, ("Wait",)),
    ("daemon", unwell(kubelet=model.Kubelet(socket="/k/kubelet.sock", directory="/k")), WARNING, ("/k", DIR)),
    ("daemon", unwell(cdi=model.Cdi(directory="/c", complaints=("/x is left out",))), NOTE, ("/x is left out",)),
    ("daemon", {"daemon": HUNG}, FAILED, ("no answer within 10 s", "SIGUSR2", "restart gpu-plugin")),
    ("daemon", {"daemon": Daemon(trouble="no daemon answers at /s", abandoned=True)}, FAILED, ("killed", "no GPU")),
    ("registration", {}, OK, (GPU,)),
    ("registration", unwell(resources=LOST), FAILED, (GPU, "waiting for the kubelet")),
    ("registration", unwell(kubelet=model.Kubelet(directory=DIR)), NOTE, ("--kubelet-socket",)),
    ("registration", unwell(resources={}), FAILED, ("no resource",)),
    ("registration", {"pod_resources": PodResources("/p", 0.1)}, WARNING, ("no healthy device", "other-plugins")),
    ("registration", {"pod_resources": PodResources("/p", trouble="away")}, OK, (GPU,)),
    ("registration", {"daemon": Daemon(trouble="none")}, NOTE, ("other plugins", f"2 of {GPU}")),
    ("registration", {"daemon": Daemon(trouble="none"), "pod_resources": HUNG}, SKIPPED, ("no daemon",)),
    ("registration", {"daemon": HUNG}, SKIPPED, ("the daemon hangs",)),
    ("kubernetes-api", {}, SKIPPED, ("no enabled option",)),
    ("kubernetes-api", {"options": {"node_condition": True, "node_name": "n"}, "api": HUNG}, FAILED, ("no answer",)),
    ("features-directory", {}, SKIPPED, ("--node-labels",)),
    ("features-directory", {"options": LABELS}, OK, ("can be written",)),
    ("features-directory", {"options": LABELS, "features": absent(Directory("/f"))}, WARNING, ("no labels",)),
    ("features-directory", {"options": LABELS, "features": UNWRITABLE[0]}, WARNING, ("cannot be written",)),
    ("features-directory", {"options": LABELS, "features": HUNG}, WARNING, ("no answer",)),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_facts_come_to_a_verdict(row):
    judge(row)
