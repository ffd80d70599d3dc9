"""Checks of what serving needs as tables: directories, the kubelet, the container runtime, the daemon and the API."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpu_plugin.containers.strategy_choice import KubeletEvidence, NodeEvidence
from gpu_plugin.doctor.edges.api import needed
from gpu_plugin.doctor.facts import (
    Api,
    Daemon,
    Directory,
    KubeletDirectory,
    PodResources,
    Socket,
)
from gpu_plugin.mps.foreign import Answer, Signs, why_down
from gpu_plugin.mps.readiness import ready
from tests.unit.doctor.made_up import (
    DIR,
    FAILED,
    GPU,
    HUNG,
    NOTE,
    OK,
    POD,
    SKIPPED,
    USER,
    WARNING,
    Row,
    absent,
    facts,
    judge,
    status,
)

STATE = Directory("/s", mode=0o700, filesystem="ext4", free_bytes=2**40, free_inodes=2**20)
NOT_CDI = NodeEvidence(kubelet=KubeletEvidence(package="1.27.1"), sockets=("/run/containerd/containerd.sock",))
SICK = {"index": 3, "uuid": "GPU-3", "state": "unhealthy", "reasons": ["Xid 79 (fell off the bus)"], "signals": {}}
LOST = {GPU: {"registered": False, "since": None, "why": "waiting for the kubelet", "endpoint": ""}}


def unwell(**more: Any) -> Daemon:
    return Daemon(status(**more))


TABLE: list[Row] = [
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
    ("state-directory", {"state": replace(STATE, is_directory=False)}, FAILED, ("not a directory",)),
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
    ("kubelet-socket", {"kubelet_socket": Socket("/k", is_socket=False)}, FAILED, ("not a socket",)),
    ("kubelet-socket", {"kubelet_socket": Socket("/k", error="Connection refused")}, FAILED, ("refused", "restart")),
    (
        "kubelet-socket",
        {"kubelet_socket": Socket("/k", error="Permission denied")},
        FAILED,
        ("SELinux", "mode", "root"),
    ),
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
    ("other-plugins", {"kubelet_directory": KubeletDirectory(absent(Directory(DIR)))}, SKIPPED, ("cannot be listed",)),
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
    ("container-runtime", {"options": {"device_list_strategy": "auto"}}, OK, ("auto chooses cdi-cri",)),
    ("container-runtime", {"options": {"device_list_strategy": "auto"}, "evidence": NOT_CDI}, OK, ("chooses envvar",)),
    ("cdi-directory", {}, SKIPPED, ("envvar",)),
    ("cdi-directory", {"options": {"device_list_strategy": "cdi-cri"}}, OK, ("/var/run/cdi",)),
    (
        "cdi-directory",
        {
            "options": {"device_list_strategy": "cdi-cri"},
            "cdi_directory": Directory("/var/run/cdi", mode=0o777),
        },
        WARNING,
        ("/var/run/cdi", "0777", "chmod go-w"),
    ),
    (
        "cdi-directory",
        {"options": {"device_list_strategy": "cdi-cri"}, "cdi_conflicts": ("gpu=0 is in /c/a and in /c/b",)},
        FAILED,
        ("1 CDI device", "/c/a", "cdi list"),
    ),
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
    (
        "daemon",
        {"daemon": unwell(missing=[{"name": "GPU 0000:1b:00.0", "uuid": "GPU-3", "why": "it is away"}])},
        FAILED,
        ("0000:1b:00.0 is missing", "uncordon --gpu GPU-3 --override"),
    ),
    (
        "daemon",
        {"daemon": unwell(driver={"trouble": "", "answered": True, "restart": "a call hangs"})},
        FAILED,
        ("a call hangs", "systemctl restart gpu-plugin"),
    ),
    (
        "daemon",
        {
            "daemon": unwell(
                resources={"r": {"devices": 2, "healthy": 0, "retired": 0, "reasons": ["its MPS daemon is down: gone"]}}
            )
        },
        FAILED,
        ("MPS daemon is down: gone", "the log of `gpu-plugin mps`"),
    ),
    *(
        (
            "daemon",
            {"daemon": unwell(resources={"r": {"devices": 2, "healthy": 0, "retired": 0, "reasons": [why]}})},
            FAILED,
            ("MPS daemon is down", remedy),
        )
        for why, remedy in (
            (ready(Path("/nowhere"), "r"), "mps.enabled"),
            (why_down(Signs((1,)), Answer(Signs((1,)), 0.0, trouble="silent")), "restart the program"),
        )
    ),
    ("daemon", {"daemon": unwell(waiting="another daemon uses it")}, FAILED, ("another daemon", "status")),
    (
        "daemon",
        {"daemon": unwell(kubelet={"socket": "/k/kubelet.sock", "directory": "/k", "resources": {}})},
        WARNING,
        ("/k", DIR, "options"),
    ),
    (
        "daemon",
        {"daemon": unwell(cdi={"trouble": "", "complaints": ["/tmp/nvidia-mps is left out: a link"]})},
        WARNING,
        ("/tmp/nvidia-mps is left out", "docs/containers.md"),
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
    ("kubernetes-api", {}, SKIPPED, ("no enabled option",)),
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
    ("daemon", {"daemon": HUNG}, FAILED, ("no answer within 10 s", "SIGUSR2", "restart gpu-plugin")),
    (
        "daemon",
        {"daemon": Daemon(trouble="no daemon answers at /s", abandoned=True)},
        FAILED,
        ("killed", "no GPU", "gpu-plugin cleanup"),
    ),
    ("registration", {"daemon": HUNG}, SKIPPED, ("the daemon hangs",)),
    ("state-directory", {"state": HUNG}, FAILED, ("no answer within 10 s", "state D")),
    ("kubelet-directory", {"kubelet_directory": HUNG}, FAILED, (DIR, "state D")),
    ("kubelet-socket", {"kubelet_socket": HUNG}, FAILED, ("kubelet.sock", "restart the kubelet")),
    ("pod-resources", {"pod_resources": HUNG}, WARNING, ("no answer within 10 s",)),
    ("cdi-directory", {"options": {"device_list_strategy": "cdi-cri"}, "cdi_directory": HUNG}, FAILED, ("state D",)),
    ("cdi-directory", {"cdi_directory": HUNG}, SKIPPED, ("envvar",)),
    ("kubernetes-api", {"api": HUNG}, FAILED, ("no answer",)),
    ("features-directory", {"options": {"node_labels": "file"}, "features": HUNG}, WARNING, ("no answer",)),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_facts_come_to_a_verdict(row):
    judge(row)
