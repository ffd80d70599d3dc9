"""Each check, as a table: facts, and what they come to."""

import errno
from dataclasses import fields, replace
from typing import Any

import pytest

from gpu_plugin.access.node_evidence import KubeletEvidence, NodeEvidence
from gpu_plugin.config.sharing import MPS, SharedResource
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.doctor.facts import (
    Api,
    Clock,
    Daemon,
    DeviceNode,
    Directory,
    Driver,
    FabricManager,
    Facts,
    KernelModule,
    KubeletDirectory,
    Mps,
    MpsDirectory,
    Pci,
    PciDevice,
    PodResources,
    Process,
    Socket,
    Unknown,
)
from gpu_plugin.doctor.finding import Status
from gpu_plugin.doctor.registry import CHECKS, examined
from gpu_plugin.doctor.rights import needed
from gpu_plugin.health.observation import Fabric
from tests.unit.doctor.made_up import DIR, GPU, absent, driver, facts, gpu, node, nodes, status

OK, NOTE, WARNING, FAILED, SKIPPED = Status.OK, Status.NOTE, Status.WARNING, Status.FAILED, Status.SKIPPED

HUNG = Unknown("no answer within 10 s", hung=True)
USER = Process(1000, 0, 2, True, False, False, "", "", True)
POD = Process(0, 0, 2, True, True, True, "", "", False)
STATE = Directory("/s", mode=0o700, filesystem="ext4", free_bytes=2**40, free_inodes=2**20)
SWITCHES = Pci(switches=(PciDevice("0000:c1:00.0", "nvidia"), PciDevice("0000:c2:00.0", "nvidia")))
NO_DRIVER = Driver(int(Return.LIBRARY_NOT_FOUND), "dlopen: no libnvidia-ml.so.1", count=0)
JOINED, STARTING = Fabric(3, 0, summary=1), Fabric(2)
OLD_SWITCHED = driver(gpu(0, nvswitch=True, fabric=None))
NOT_CDI = NodeEvidence(kubelet=KubeletEvidence(package="1.27.1"), sockets=("/run/containerd/containerd.sock",))


def mps_shared(given: Facts) -> Facts:
    entry = SharedResource(GPU, GPU, 4, MPS)
    return replace(given, settings=replace(given.settings, sharing=(entry,), mps_root="/run/nvidia/mps"))


def unwell(**more: Any) -> Daemon:
    return Daemon(status(**more))


SICK = {"index": 3, "uuid": "GPU-3", "state": "unhealthy", "reasons": ["Xid 79 (fell off the bus)"], "signals": {}}
LOST = {GPU: {"registered": False, "since": None, "why": "waiting for the kubelet", "endpoint": ""}}

# check, what differs on a node that is well, how it stands, and words of the finding or its remedy
TABLE: list[tuple[str, dict[str, Any], Status, tuple[str, ...]]] = [
    ("configuration", {}, OK, ("no file",)),
    (
        "configuration",
        {"configuration": "c.yaml:2: unknown key"},
        FAILED,
        ("c.yaml:2", "flags and environment", "validate"),
    ),
    (
        "configuration",
        {"options": {"config_file_srcdir": "/configs", "node_name": "n"}},
        NOTE,
        ("label", "/configs", "--config-file"),
    ),
    ("configuration", {"file": "/configs/a.yaml"}, OK, ("/configs/a.yaml can be used",)),
    ("permissions", {}, OK, ("uid 0", "all capabilities", "on the host")),
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
        {"driver": driver(gpu(0)), "pci": Pci((PciDevice("0000:10:00.0"), PciDevice("0000:1b:00.0", "vfio-pci")))},
        WARNING,
        ("0000:1b:00.0", "vfio-pci"),
    ),
    ("gpus", {"driver": NO_DRIVER}, SKIPPED, ("0000:10:00.0 (nvidia)",)),
    ("gpus", {"driver": NO_DRIVER, "pci": Unknown("no bus")}, SKIPPED, ("not open",)),
    ("device-nodes", {}, OK, ("/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia-uvm-tools and those of 2 GPUs",)),
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
    ("device-nodes", {"nodes": nodes(DeviceNode("/dev/nvidia0", there=True))}, FAILED, ("no character device",)),
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
    ("persistence-mode", {"driver": driver(gpu(0, persistence=None))}, SKIPPED, ("no GPU says",)),
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
    ("fabric-manager", {"driver": driver(gpu(0, nvswitch=True, fabric=STARTING, mig=True))}, FAILED, ("does not run",)),
    ("fabric-manager", {"driver": OLD_SWITCHED, "pci": SWITCHES}, FAILED, ("2 NVSwitches", "does not run")),
    ("fabric-manager", {"driver": OLD_SWITCHED, "fabric_manager": FabricManager((77,))}, OK, ("process 77",)),
    ("fabric-manager", {"driver": OLD_SWITCHED, "fabric_manager": FabricManager((), "/run/s")}, OK, ("/run/s",)),
    ("fabric-manager", {"driver": OLD_SWITCHED, "process": POD}, NOTE, ("cannot be seen", "systemctl status")),
    ("fabric-manager", {"driver": NO_DRIVER, "pci": SWITCHES}, FAILED, ("2 NVSwitches",)),
    ("imex-channels", {}, SKIPPED, ("--imex-channel-ids",)),
    ("imex-channels", {"options": {"imex_channel_ids": "0"}}, WARNING, ("channel0", "do not get", "nvidia-imex")),
    ("imex-channels", {"options": {"imex_channel_ids": "0", "imex_required": True}}, FAILED, ("does not start",)),
    ("imex-channels", {"options": {"imex_channel_ids": "auto"}}, OK, ("none is given",)),
    (
        "imex-channels",
        {
            "options": {"imex_channel_ids": "0", "imex_required": True},
            "nodes": nodes(channels=("/dev/nvidia-caps-imex-channels/channel0",)),
        },
        OK,
        ("exists",),
    ),
    ("mps", {}, SKIPPED, ("nothing of it is seen",)),
    ("mps", {"mps": Mps(((8, "nvidia-cuda-mps-"),))}, WARNING, ("process 8", "no resource is shared", "quit")),
    ("mps", {"mps": Mps((), (MpsDirectory("/m/nvidia.com/gpu", True),), "/m")}, WARNING, ("/m/nvidia.com/gpu",)),
    (
        "mps",
        {"mps": Mps((), (MpsDirectory("/m/nvidia.com/gpu", False),), "/m")},
        NOTE,
        ("cleanup --mps --mps-root /m",),
    ),
    ("mps", {"driver": driver(gpu(0), gpu(1, compute_mode=3))}, WARNING, ("GPU 1", "-c DEFAULT")),
    ("state-directory", {}, OK, ("ext4", "10240 MiB free")),
    ("state-directory", {"state": replace(absent(STATE), writable=True)}, OK, ("once it is made",)),
    (
        "state-directory",
        {"state": replace(STATE, filesystem="tmpfs", mount="/run")},
        WARNING,
        ("next boot", "--state-dir"),
    ),
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
    ("state-directory", {"state": replace(STATE, is_directory=False)}, FAILED, ("no directory",)),
    ("kubelet-directory", {}, OK, (DIR,)),
    (
        "kubelet-directory",
        {"kubelet_directory": KubeletDirectory(absent(Directory(DIR)))},
        FAILED,
        ("no directory", "mount"),
    ),
    (
        "kubelet-directory",
        {"kubelet_directory": KubeletDirectory(Directory(DIR))},
        NOTE,
        ("kubelet_internal_checkpoint",),
    ),
    (
        "kubelet-directory",
        {"kubelet_directory": KubeletDirectory(Directory(DIR, removed=True))},
        FAILED,
        ("delete this pod",),
    ),
    (
        "kubelet-directory",
        {"kubelet_directory": KubeletDirectory(Directory(DIR, writable=False))},
        FAILED,
        ("even by root", "SELinux"),
    ),
    (
        "kubelet-directory",
        {"kubelet_directory": KubeletDirectory(Directory(DIR, writable=False)), "process": USER},
        NOTE,
        ("uid 1000",),
    ),
    (
        "kubelet-directory",
        {"kubelet_directory": KubeletDirectory(Directory(DIR, read_only=True))},
        FAILED,
        ("read-only",),
    ),
    (
        "kubelet-directory",
        {"kubelet_directory": KubeletDirectory(Directory(DIR, error="Stale file handle"))},
        FAILED,
        ("Stale",),
    ),
    ("kubelet-socket", {}, OK, ("process 900 (kubelet)",)),
    ("kubelet-socket", {"kubelet_socket": Socket("/k", pid=0)}, OK, ("/k is answered",)),
    (
        "kubelet-socket",
        {"kubelet_socket": Socket("/k", there=False, is_socket=False)},
        FAILED,
        ("systemctl status kubelet",),
    ),
    ("kubelet-socket", {"kubelet_socket": Socket("/k", is_socket=False)}, FAILED, ("no socket",)),
    ("kubelet-socket", {"kubelet_socket": Socket("/k", error="Connection refused")}, FAILED, ("refused", "restart")),
    ("kubelet-socket", {"kubelet_socket": Socket("/k", http2=False, pid=5, program="nc")}, FAILED, ("process 5 (nc)",)),
    ("kubelet-socket", {"kubelet_socket": Socket("/k", pid=5, program="python3")}, WARNING, ("python3", "not called")),
    ("kubelet-socket", {"kubelet_socket": Socket("/k", pid=5, program="k3s-server")}, OK, ("k3s-server",)),
    ("kubelet-socket", {"kubelet_socket": None}, NOTE, ("--kubelet-socket",)),
    ("other-plugins", {}, OK, ("no other plugin",)),
    (
        "other-plugins",
        {"kubelet_directory": KubeletDirectory(Directory(DIR), True, ("nvidia-gpu.sock", "x.sock"))},
        WARNING,
        ("nvidia-gpu.sock", "remove one"),
    ),
    (
        "other-plugins",
        {"kubelet_directory": KubeletDirectory(Directory(DIR), True, ("kvm.sock",))},
        NOTE,
        ("kvm.sock",),
    ),
    ("other-plugins", {"kubelet_directory": KubeletDirectory(absent(Directory(DIR)))}, SKIPPED, ("looked through",)),
    ("pod-resources", {}, OK, ("4 ms", "3 devices")),
    (
        "pod-resources",
        {"pod_resources": PodResources("/p", absent=True, trouble="no")},
        WARNING,
        ("there is no /p", "mount"),
    ),
    (
        "pod-resources",
        {"pod_resources": PodResources("/p", trouble="/p refused: UNAVAILABLE")},
        WARNING,
        ("UNAVAILABLE",),
    ),
    ("pod-resources", {"pod_resources": PodResources("/p", 2.5)}, WARNING, ("2500 ms", "slow")),
    ("container-runtime", {}, OK, ("envvar", "cdi-cri would work, too")),
    ("container-runtime", {"evidence": NOT_CDI}, OK, ("NVIDIA's container runtime", "1.27.1")),
    ("container-runtime", {"options": {"device_list_strategy": "cdi-cri"}}, OK, ("cdi-cri", "containerd 2")),
    (
        "container-runtime",
        {"options": {"device_list_strategy": "cdi-cri"}, "evidence": NOT_CDI},
        WARNING,
        ("1.27.1", "enable_cdi"),
    ),
    (
        "container-runtime",
        {"options": {"device_list_strategy": "cdi-cri"}, "evidence": NodeEvidence(trouble="not mounted")},
        SKIPPED,
        ("not mounted",),
    ),
    ("container-runtime", {"options": {"device_list_strategy": "auto"}}, OK, ("auto comes to cdi-cri",)),
    ("container-runtime", {"options": {"device_list_strategy": "auto"}, "evidence": NOT_CDI}, OK, ("comes to envvar",)),
    ("cdi-directory", {}, SKIPPED, ("envvar",)),
    ("cdi-directory", {"options": {"device_list_strategy": "cdi-cri"}}, OK, ("/var/run/cdi",)),
    ("cdi-directory", {"options": {"device_list_strategy": "auto"}}, OK, ("/var/run/cdi",)),
    ("cdi-directory", {"options": {"device_list_strategy": "auto"}, "evidence": NOT_CDI}, SKIPPED, ("envvar",)),
    (
        "cdi-directory",
        {
            "options": {"device_list_strategy": "cdi-cri"},
            "cdi_directory": Directory("/c", read_only=True, writable=False),
        },
        FAILED,
        ("read-only", "Unhealthy"),
    ),
    (
        "cdi-directory",
        {
            "options": {"device_list_strategy": "cdi-cri"},
            "cdi_directory": Directory("/c", writable=False),
            "process": USER,
        },
        NOTE,
        ("uid 1000",),
    ),
    (
        "cdi-directory",
        {
            "options": {"device_list_strategy": "cdi-cri"},
            "cdi_directory": Directory("/c", filesystem="overlay"),
            "process": POD,
        },
        WARNING,
        ("no runtime of the node sees", "mount"),
    ),
    ("daemon", {}, OK, ("version 1.2.3", "process 7")),
    ("daemon", {"daemon": Daemon(trouble="no daemon answers at /s")}, NOTE, ("no daemon answers", "systemctl status")),
    ("daemon", {"daemon": Daemon(trouble="denied", forbidden=True), "process": USER}, NOTE, ("denied", "as root")),
    (
        "daemon",
        {"daemon": Daemon(trouble="this daemon waits: another one", refused=True)},
        FAILED,
        ("another one", "one daemon"),
    ),
    ("daemon", {"daemon": unwell(health={"gpus": [SICK]})}, FAILED, ("GPU 3 (GPU-3)", "Xid 79", "explain --gpu 3")),
    ("daemon", {"daemon": unwell(waiting="another daemon uses it")}, FAILED, ("another daemon", "status")),
    (
        "daemon",
        {"daemon": unwell(kubelet={"socket": "/k/kubelet.sock", "directory": "/k", "resources": {}})},
        WARNING,
        ("/k", DIR, "options"),
    ),
    ("registration", {}, OK, (GPU,)),
    (
        "registration",
        {"daemon": unwell(kubelet={"socket": "/k", "directory": DIR, "resources": LOST})},
        FAILED,
        (GPU, "waiting for the kubelet"),
    ),
    (
        "registration",
        {"daemon": unwell(kubelet={"socket": "", "directory": DIR, "resources": {}})},
        NOTE,
        ("--kubelet-socket",),
    ),
    ("registration", {"daemon": unwell(kubelet={"socket": "/k", "resources": {}})}, FAILED, ("no resource",)),
    ("registration", {"pod_resources": PodResources("/p", 0.1)}, WARNING, ("no healthy device", "other-plugins")),
    ("registration", {"pod_resources": PodResources("/p", trouble="away")}, OK, (GPU,)),
    ("registration", {"daemon": Daemon(trouble="none")}, NOTE, ("other plugins", f"2 of {GPU}")),
    ("registration", {"daemon": Daemon(trouble="none"), "pod_resources": HUNG}, SKIPPED, ("no daemon",)),
    ("kubernetes-api", {}, SKIPPED, ("no option",)),
    (
        "kubernetes-api",
        {"api": Api(needed(facts(options={"node_condition": True, "node_name": "n"}).settings), "https://k", 0.02)},
        OK,
        ("https://k", "20 ms"),
    ),
    (
        "kubernetes-api",
        {
            "api": Api(
                asked := needed(facts(options={"node_taint": "NoSchedule", "node_name": "n"}).settings),
                "https://k",
                0,
                asked[1:],
            )
        },
        FAILED,
        ("--node-taint", "patch on nodes", "ClusterRole"),
    ),
    (
        "kubernetes-api",
        {"api": Api(asked, trouble="cannot be reached")},
        FAILED,
        ("--node-taint", "cannot be reached", "DNS"),
    ),
    ("features-directory", {}, SKIPPED, ("--node-labels",)),
    ("features-directory", {"options": {"node_labels": "file"}}, OK, ("can be written",)),
    (
        "features-directory",
        {"options": {"node_labels": "file"}, "features": absent(Directory("/f"))},
        WARNING,
        ("no labels", "Node Feature Discovery"),
    ),
    (
        "features-directory",
        {"options": {"node_labels": "file"}, "features": Directory("/f", writable=False)},
        WARNING,
        ("cannot be written",),
    ),
]


@pytest.mark.parametrize(
    ("check", "differs", "stands", "words"), TABLE, ids=lambda value: value if isinstance(value, str) else ""
)
def test_facts_come_to_a_verdict(check, differs, stands, words):
    [found] = CHECKS[check](facts(**dict(differs)))
    assert found.status is stands, found
    said = f"{found.found} {found.remedy}"
    assert not [word for word in words if word not in said], said
    assert found.remedy or stands in (OK, SKIPPED, NOTE)


def test_every_check_has_a_table():
    assert {check for check, *_ in TABLE} == set(CHECKS)


def test_a_node_that_is_well_has_nothing_wrong():
    assert {found.status for _, found in examined(facts())} <= {OK, SKIPPED}


@pytest.mark.parametrize("unknown", [HUNG, Unknown("not to be seen")], ids=["hung", "unseen"])
@pytest.mark.parametrize("options", [{}, {"simulate": "hgx-h100"}], ids=["real", "simulated"])
def test_no_fact_is_taken_for_granted(unknown, options):
    """What cannot be seen fails nothing, and what hangs is said by at least one check, whichever fact it is."""
    gathered = [each.name for each in fields(Facts) if each.default is each.default_factory]  # those without a default
    options = {**options, "device_list_strategy": "cdi-cri", "node_labels": "file", "imex_channel_ids": "0"}
    for name in gathered:
        if name == "settings":
            continue
        found = examined(facts(options=options, **{name: unknown}))
        failures = [each for _, each in found if each.status is FAILED]
        assert all(unknown.hung for _ in failures), (name, failures)
        if unknown.hung and not (options.get("simulate") and name in {"pci", "module", "fabric_manager"}):
            assert [each for _, each in found if unknown.why in each.found] or name in {"pci", "fabric_manager"}, name
    assert len(examined(facts(options=options, **dict.fromkeys(set(gathered) - {"settings"}, unknown)))) >= len(CHECKS)


def test_a_check_that_fails_takes_no_other_with_it():
    found = examined(facts(daemon=Daemon({"daemon": {}})))  # of a daemon that has another idea of a status
    stands = {name: each for name, each in found if each.status is WARNING}
    assert set(stands) == {"daemon", "registration"}
    assert "another version" in stands["daemon"].remedy
    assert len(found) == len(CHECKS)


def test_mps_that_is_wanted():
    check = CHECKS["mps"]
    up, down = MpsDirectory("/m/nvidia.com/gpu", True), MpsDirectory("/m/nvidia.com/old", False)
    [missing] = check(mps_shared(facts(mps=Mps(root="/m"))))
    assert missing.status is WARNING
    assert "mps.enabled" in missing.remedy
    [well] = check(mps_shared(facts(mps=Mps((), (up,), "/m"), driver=driver(gpu(0, compute_mode=3)))))
    assert (well.status, well.found) == (OK, "1 MPS daemon below /m")
    [silent] = check(mps_shared(facts(mps=Mps((), (up, down), "/m"))))
    assert silent.status is WARNING
    assert "/m/nvidia.com/old" in silent.found
    assert "/m/nvidia.com/gpu" not in silent.found
    [unseen] = CHECKS["permissions"](mps_shared(facts(process=POD)))
    assert (unseen.status, "hostPID" in unseen.found) == (NOTE, True)


def test_released_gpus_keep_their_nodes_closed():
    [found] = CHECKS["device-nodes"](facts(nodes=replace(nodes(), nodes={})))
    assert found.status is SKIPPED
    assert "maintenance" in found.found


def test_rights_are_those_of_the_options_that_are_on():
    on = {
        "node_name": "n",
        "node_events": True,
        "pod_events": True,
        "node_condition": True,
        "node_taint": "NoSchedule",
        "cordon_annotation": True,
        "node_labels": "api",
        "config_file_srcdir": "/configs",
    }
    said = {str(right): (right.needed_by, right.name) for right in needed(facts(options=on).settings)}
    assert said == {
        "get on nodes": ("--config-file-srcdir", "n"),
        "watch on nodes": ("--config-file-srcdir", "n"),
        "create on events in namespace default": ("--node-events", ""),
        "patch on events in namespace default": ("--node-events", ""),
        "create on events": ("--pod-events", ""),
        "patch on events": ("--pod-events", ""),
        "get on pods": ("--pod-events", ""),
        "patch on nodes/status": ("--node-condition", "n"),
        "patch on nodes": ("--node-taint", "n"),
    }
    assert needed(facts().settings) == ()
