"""Checks of the machine as tables: the process, the driver, GPUs, device nodes and what else runs beside them."""

import errno

import pytest
from msgspec.structs import replace

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.doctor.facts import (
    Clock,
    DeviceNode,
    Driver,
    KernelModule,
    Mps,
    Pci,
    Unknown,
)
from gpu_plugin.health.observation import Fabric
from tests.unit.doctor.made_up import (
    FAILED,
    HUNG,
    NOTE,
    OK,
    POD,
    SKIPPED,
    USER,
    WARNING,
    Row,
    driver,
    gpu,
    judge,
    node,
    nodes,
)

SWITCHES = Pci(switches={"0000:c1:00.0": "nvidia", "0000:c2:00.0": "nvidia"})
NO_DRIVER = Driver(int(Return.LIBRARY_NOT_FOUND), "dlopen: no libnvidia-ml.so.1", count=0)
JOINED, STARTING = Fabric(3, 0, summary=1), Fabric(2)
OLD_SWITCHED = driver(gpu(0, nvswitch=True, fabric=None))

TABLE: list[Row] = [
    ("configuration", {}, OK, ("no file",)),
    (
        "configuration",
        {"configuration": "c.yaml:2: unknown key"},
        FAILED,
        ("c.yaml:2", "flags and environment", "validate"),
    ),
    (
        "configuration",
        {"configuration": Unknown("c.yaml: no answer within 1 s", hung=True)},
        FAILED,
        ("c.yaml: no answer", "flags and environment", "state D"),
    ),
    (
        "configuration",
        {"options": {"config_file_srcdir": "/configs", "node_name": "n"}},
        NOTE,
        ("label", "/configs", "--config-file"),
    ),
    ("configuration", {"file": "/configs/a.yaml"}, OK, ("/configs/a.yaml can be used",)),
    ("configuration", {"options": {"default_config": "a"}}, WARNING, ("--default-config", "no effect")),
    ("permissions", {}, OK, ("uid 0", "all capabilities", "on the host")),
    (
        "permissions",
        {"process": replace(POD, capabilities=1 << 21)},
        OK,
        ("uid 0, the capability SYS_ADMIN, a seccomp filter",),
    ),
    (
        "permissions",
        {"process": replace(POD, capabilities=0xA80425FB)},
        OK,
        ("the capabilities CHOWN, DAC_OVERRIDE, FOWNER,", "MKNOD, AUDIT_WRITE, SETFCAP"),
    ),
    (
        "permissions",
        {"process": replace(POD, capabilities=(1 << 41) - 1 & ~(1 << 25))},
        OK,
        ("all capabilities but SYS_TIME",),
    ),
    ("permissions", {"process": USER}, NOTE, ("uid 1000", "as root")),
    ("permissions", {"process": POD}, OK, ("no capability", "a seccomp filter", "read-only root", "in a container")),
    ("permissions", {"process": POD, "options": {"mig_strategy": "single"}}, WARNING, ("SYS_ADMIN", "MIG monitoring")),
    ("security-modules", {}, OK, ("neither SELinux nor AppArmor",)),
    (
        "security-modules",
        {"process": replace(POD, selinux="enforcing", label="system_u:system_r:container_t:s0:c1,c2")},
        NOTE,
        ("enforcing", "container_t", "ausearch"),
    ),
    (
        "security-modules",
        {"process": replace(POD, selinux="enforcing", label="system_u:system_r:spc_t:s0")},
        OK,
        ("spc_t",),
    ),
    ("security-modules", {"process": replace(POD, label="cri-containerd.apparmor.d (enforce)")}, OK, ("AppArmor",)),
    ("clock", {}, OK, ("synchronised", "20 ms")),
    ("clock", {"clock": Clock(0.0, True)}, FAILED, ("1970-01-01", "certificates", "chrony")),
    ("clock", {"clock": Clock(1e30, True)}, FAILED, ("certificates",)),
    ("clock", {"clock": Clock(1.8e9, False)}, WARNING, ("not synchronised", "timedatectl")),
    ("clock", {"clock": Clock(1.8e9, None, why="adjtimex: denied")}, SKIPPED, ("adjtimex: denied",)),
    ("driver-library", {}, OK, ("/usr/lib64/libnvidia-ml.so.1", "580.95.05")),
    (
        "driver-library",
        {"driver": NO_DRIVER},
        FAILED,
        ("no libnvidia-ml.so.1 below /driver-root, /", "install the NVIDIA"),
    ),
    (
        "driver-library",
        {"driver": Driver(9, "nvmlInit: driver not loaded (9)", "/l/libnvidia-ml.so.1")},
        FAILED,
        ("driver not loaded", "modprobe nvidia", "privileged"),
    ),
    (
        "driver-library",
        {"driver": Driver(18, "nvmlInit: mismatch (18)", "/l")},
        FAILED,
        ("mismatch", "driver-versions"),
    ),
    ("driver-library", {"driver": Driver(4, "nvmlInit: no permission (4)", "/l")}, FAILED, ("as root",)),
    ("driver-library", {"driver": Driver(999, "nvmlInit: unknown (999)", "/l")}, FAILED, ("kernel log",)),
    ("driver-library", {"driver": HUNG}, FAILED, ("does not open", "reboot")),
    ("driver-library", {"driver": Unknown("GPU 1 is released")}, SKIPPED, ("released", "")),
    ("driver-library", {"driver": driver(platform="wsl")}, NOTE, ("WSL",)),
    ("driver-library", {"driver": driver(count=-1, count_trouble="unknown (999)")}, FAILED, ("how many GPUs",)),
    ("driver-versions", {}, OK, ("both of version 580.95.05",)),
    (
        "driver-versions",
        {"module": KernelModule(True, "575.57")},
        FAILED,
        ("library is of version 580.95.05", "module of 575.57", "reboot"),
    ),
    ("driver-versions", {"module": KernelModule(False)}, FAILED, ("not loaded", "modprobe")),
    ("driver-versions", {"module": KernelModule(False, nouveau=True)}, FAILED, ("nouveau", "blacklist")),
    ("driver-versions", {"module": KernelModule(True)}, SKIPPED, ("/proc/driver/nvidia/version",)),
    ("driver-versions", {"driver": NO_DRIVER}, OK, ("kernel module 580.95.05",)),
    ("driver-versions", {"driver": driver(platform="tegra")}, SKIPPED, ("tegra",)),
    ("driver-versions", {"options": {"simulate": "hgx-h100"}}, SKIPPED, ("simulated",)),
    ("gpus", {}, OK, ("all 2 answer", "NVIDIA H100")),
    ("gpus", {"driver": driver(gpu(0), gpu(1, trouble="GPU is lost (15)"))}, FAILED, ("GPU 1 does not answer", "lost")),
    ("gpus", {"driver": driver(), "pci": Pci()}, FAILED, ("finds no GPU", "lspci")),
    (
        "gpus",
        {"driver": driver(gpu(0)), "pci": Pci({"0000:10:00.0": "", "0000:1b:00.0": "nouveau"})},
        WARNING,
        ("0000:1b:00.0", "nouveau"),
    ),
    (
        "gpus",
        {"driver": driver(gpu(0)), "pci": Pci({"0000:10:00.0": "", "0000:1b:00.0": "vfio-pci"})},
        OK,
        ("answers",),
    ),
    ("gpus", {"driver": NO_DRIVER}, SKIPPED, ("0000:10:00.0 (nvidia)",)),
    ("gpus", {"driver": NO_DRIVER, "pci": Unknown("no bus")}, SKIPPED, ("not open",)),
    (
        "device-nodes",
        {},
        OK,
        ("/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia-uvm-tools and the device nodes of 2 GPUs",),
    ),
    (
        "device-nodes",
        {"nodes": nodes(DeviceNode("/dev/nvidia1"))},
        FAILED,
        ("/dev/nvidia1: does not exist", "modprobe"),
    ),
    ("device-nodes", {"nodes": nodes(DeviceNode("/dev/nvidia-uvm"))}, WARNING, ("no CUDA program", "nvidia-uvm")),
    ("device-nodes", {"nodes": nodes(DeviceNode("/dev/nvidia-uvm-tools"))}, OK, ()),
    (
        "device-nodes",
        {
            "nodes": nodes(
                *(node(f"/dev/nvidia{i}", minor=i, error=errno.EPERM, reason="Operation not permitted") for i in (0, 1))
            )
        },
        FAILED,
        ("/dev/nvidia0, /dev/nvidia1: cannot be opened", "device cgroup", "privileged"),
    ),
    (
        "device-nodes",
        {"nodes": nodes(node("/dev/nvidiactl", error=errno.EACCES, reason="Permission denied")), "process": USER},
        NOTE,
        ("uid 1000", "0666", "as root"),
    ),
    (
        "device-nodes",
        {
            "nodes": nodes(node("/dev/nvidiactl", error=errno.EACCES, reason="Permission denied")),
            "process": replace(POD, selinux="enforcing"),
        },
        FAILED,
        ("Permission denied", "ausearch"),
    ),
    (
        "device-nodes",
        {"nodes": nodes(node("/dev/nvidia0", minor=0, error=errno.ENXIO, reason="No such device"))},
        FAILED,
        ("no GPU or module",),
    ),
    (
        "device-nodes",
        {"nodes": nodes(node("/dev/nvidia0", minor=0, error=errno.EIO, reason="Input/output error"))},
        FAILED,
        ("Input/output error", "Xid"),
    ),
    ("device-nodes", {"nodes": nodes(node("/dev/nvidia-uvm", 511, 0))}, FAILED, ("511:0", "238:0", "remove it")),
    ("device-nodes", {"nodes": nodes(node("/dev/nvidia1", minor=7))}, FAILED, ("195:7", "195:1")),
    ("device-nodes", {"nodes": nodes(DeviceNode("/dev/nvidia0", there=True))}, FAILED, ("not a character device",)),
    (
        "device-nodes",
        {"nodes": nodes(DeviceNode("/dev/nvidia0", there=True, why="no answer within 10 s"))},
        FAILED,
        ("no answer", "hangs"),
    ),
    ("device-nodes", {"driver": driver(platform="wsl")}, SKIPPED, ("platform",)),
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
    (
        "fabric-manager",
        {"driver": driver(gpu(0, nvswitch=True, fabric=JOINED), gpu(1, nvswitch=True, fabric=JOINED))},
        OK,
        ("joined",),
    ),
    (
        "fabric-manager",
        {"driver": driver(*(gpu(i, nvswitch=True, fabric=STARTING) for i in range(3)))},
        FAILED,
        ("GPU 0, 1, 2", "error 802", "nvidia-fabricmanager"),
    ),
    (
        "fabric-manager",
        {"driver": driver(*(gpu(i, nvswitch=i != 3, fabric=JOINED if i != 3 else Fabric(0)) for i in range(8)))},
        WARNING,
        ("GPU 3", "7 other GPUs"),
    ),
    (
        "fabric-manager",
        {"driver": driver(gpu(0, nvswitch=True, fabric=JOINED), gpu(1, fabric=None), gpu(2, fabric=None))},
        WARNING,
        ("GPU 1, 2", "1 other GPU"),
    ),
    (
        "fabric-manager",
        {"driver": driver(gpu(0, nvswitch=True, fabric=JOINED), gpu(1, fabric=None, model="NVIDIA L4"))},
        OK,
        ("joined",),
    ),
    (
        "fabric-manager",
        {"driver": driver(gpu(0, nvswitch=True, fabric=JOINED), gpu(1, fabric=None, mig=True))},
        OK,
        ("joined",),
    ),
    (
        "fabric-manager",
        {"driver": driver(gpu(0, nvswitch=True, fabric=STARTING))},
        FAILED,
        ("NVreg_NvLinkDisable=1", "virtual machine"),
    ),
    ("fabric-manager", {"driver": driver(gpu(0, nvswitch=True, fabric=STARTING, mig=True))}, FAILED, ("does not run",)),
    ("fabric-manager", {"driver": OLD_SWITCHED, "pci": SWITCHES}, FAILED, ("2 NVSwitches", "does not run")),
    ("fabric-manager", {"driver": OLD_SWITCHED, "fabric_manager": "process 77"}, OK, ("process 77",)),
    ("fabric-manager", {"driver": OLD_SWITCHED, "fabric_manager": "/run/s"}, OK, ("/run/s",)),
    ("fabric-manager", {"driver": OLD_SWITCHED, "process": POD}, NOTE, ("cannot be seen", "systemctl status")),
    ("fabric-manager", {"driver": NO_DRIVER, "pci": SWITCHES}, FAILED, ("2 NVSwitches",)),
    ("imex-channels", {}, SKIPPED, ("--imex-channel-ids",)),
    ("imex-channels", {"options": {"imex_channel_ids": "0"}}, WARNING, ("channel0", "do not get", "nvidia-imex")),
    ("imex-channels", {"options": {"imex_channel_ids": "0", "imex_required": True}}, FAILED, ("does not start",)),
    ("imex-channels", {"options": {"imex_channel_ids": "auto"}}, OK, ("pods get no channel",)),
    (
        "imex-channels",
        {
            "options": {"imex_channel_ids": "0", "imex_required": True},
            "nodes": nodes(channels=("/dev/nvidia-caps-imex-channels/channel0",)),
        },
        OK,
        ("exists",),
    ),
    ("mps", {}, SKIPPED, ("no trace",)),
    ("mps", {"mps": Mps(((8, "nvidia-cuda-mps-"),))}, WARNING, ("process 8", "no resource is shared", "quit")),
    ("mps", {"mps": Mps((), {"/m/nvidia.com/gpu": True}, "/m")}, WARNING, ("/m/nvidia.com/gpu",)),
    (
        "mps",
        {"mps": Mps((), {"/m/nvidia.com/gpu": False}, "/m")},
        NOTE,
        ("cleanup --mps --mps-root /m",),
    ),
    ("mps", {"driver": driver(gpu(0), gpu(1, compute_mode=3))}, WARNING, ("GPU 1", "-c DEFAULT")),
    ("device-nodes", {"nodes": HUNG}, FAILED, ("no answer within 10 s", "state D")),
    ("mps", {"mps": HUNG}, WARNING, ("no answer within 10 s",)),
    ("clock", {"clock": HUNG}, WARNING, ("no answer within 10 s",)),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_facts_come_to_a_verdict(row):
    judge(row)
