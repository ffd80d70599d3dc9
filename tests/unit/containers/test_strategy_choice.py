"""`--device-list-strategy auto`: the strategy for some evidence, and the reason."""

import pytest
from msgspec.structs import replace

from gpu_plugin.containers.strategy_choice import (
    OTHER_SOCKETS,
    ContainerdEvidence,
    CrioEvidence,
    CriSection,
    Gate,
    KubeletEvidence,
    NodeEvidence,
    choose,
)

CDI_DIR = "/var/run/cdi"
CONFIG = "/etc/containerd/config.toml"
DROP_IN = "/etc/containerd/conf.d/99-nvidia.toml"
YAML = "/var/lib/kubelet/config.yaml"
SOCKET, CRIO_SOCKET, K3S_SOCKET = (
    "/run/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/run/k3s/containerd/containerd.sock",
)
KUBELET = KubeletEvidence(package="1.31.2-1.1")
VERSION_3 = ContainerdEvidence(CONFIG, 3)


def containerd(*sections: CriSection, version: int = 2, **more: object) -> dict[str, ContainerdEvidence]:
    return {"containerd": ContainerdEvidence(CONFIG, version, sections, **more)}  # type: ignore[arg-type]


GOOD = NodeEvidence(kubelet=KUBELET, sockets=(SOCKET,), containerd={"containerd": VERSION_3})


def chosen(evidence: NodeEvidence, cdi_dir: str = CDI_DIR) -> tuple[str, str]:
    choice = choose(evidence, cdi_dir)
    return choice.strategy, choice.reason


def test_a_kubelet_and_a_runtime_that_take_cdi_device_names_get_them_and_it_is_said_how_that_is_known():
    assert chosen(GOOD) == (
        "cdi-cri",
        f"the kubelet's package is of version 1.31.2-1.1, and {CONFIG} is of version 3, which exists from containerd 2.0 on",
    )


def test_nothing_known_is_envvar():
    strategy, reason = chosen(NodeEvidence())
    assert strategy == "envvar"
    assert reason.startswith("the kubelet's version is not known")


def test_what_could_not_be_looked_at_is_envvar():
    assert chosen(replace(GOOD, trouble="the root is not mounted")) == ("envvar", "the root is not mounted")


@pytest.mark.parametrize(
    ("kubelet", "takes", "said"),
    [
        ({"package": "1.29.0-1.1"}, True, "1.29.0-1.1"),
        ({"package": "2:1.30.1-00"}, True, "1.30.1"),
        ({"package": "1.28.9-1.1"}, False, "only from 1.29 on"),
        ({"package": "1.28.9-1.1", "state_file": "/s"}, False, "only from 1.29 on"),
        ({"package": "1.28.9", "gates": (Gate("DevicePluginCDIDevices", True, YAML),)}, True, f"{YAML} sets"),
        ({"gates": (Gate("DevicePluginCDIDevices", True, YAML),)}, True, "to true"),
        ({"package": "1.30.0", "gates": (Gate("DevicePluginCDIDevices", False, YAML),)}, False, "to false"),
        ({"package": "1.30.0", "gates": (Gate("AllBeta", False, YAML),)}, False, "AllBeta to false"),
        ({"package": "1.31.0", "gates": (Gate("AllBeta", False, YAML),)}, True, "1.31.0"),
        (
            {"gates": (Gate("DevicePluginCDIDevices", True, YAML), Gate("DevicePluginCDIDevices", False, "/flags"))},
            False,
            "/flags sets",
        ),
        ({"state_file": "/var/lib/kubelet/allocated_pods_state"}, True, "from 1.33 on have /var/lib/kubelet/alloc"),
        ({"state_file": "/s", "faults": ("config.yaml is no YAML",)}, False, "config.yaml is no YAML"),
        ({"package": "1.30.0", "faults": ("config.yaml is no YAML",)}, False, "config.yaml is no YAML"),
        ({"package": "1.31.0", "faults": ("config.yaml is no YAML",)}, False, "config.yaml is no YAML"),
        ({"package": "unheard-of"}, False, "not known"),
        ({"package": "9" * 5000 + ".1"}, False, "not known"),
    ],
)
def test_the_kubelet(kubelet, takes, said):
    strategy, reason = chosen(replace(GOOD, kubelet=KubeletEvidence(**kubelet)))
    assert strategy == ("cdi-cri" if takes else "envvar")
    assert said in reason


ON, OFF = CriSection(CONFIG, enable_cdi=True), CriSection(CONFIG, enable_cdi=False)
MAYBE_ON, MAYBE_OFF = (CriSection(DROP_IN, enable_cdi=on, uncertain=True) for on in (True, False))


def at(*dirs: str, **more: object) -> CriSection:
    """A section of the configuration that names these directories of specs."""
    return CriSection(CONFIG, spec_dirs=dirs, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sections", "version", "package", "takes", "said"),
    [
        ((), 3, "", True, "of version 3"),
        ((), 4, "", True, "of version 4"),
        ((), 2, "", False, "does not set enable_cdi = true for containerd's CRI plugin, and containerd's version is"),
        ((), 2, "1.7.24-1", False, "containerd's package is of version 1.7.24-1"),
        ((), 2, "1.9.0-1", False, "does not set enable_cdi = true"),
        ((), 2, "2.0.0-1", True, "containerd's package is of version 2.0.0-1"),
        ((), 2, "2.1.0-1", True, "containerd's package is of version 2.1.0-1"),
        ((ON,), 2, "1.7.0-1", True, f"{CONFIG} sets enable_cdi = true"),
        ((ON,), 2, "", True, f"{CONFIG} sets enable_cdi = true"),
        ((ON,), 2, "1.6.33-1", False, "only from 1.7 on"),
        ((OFF,), 2, "2.0.0", False, f"{CONFIG} sets enable_cdi = false"),
        ((OFF,), 3, "", False, f"{CONFIG} sets enable_cdi = false"),
        # Before 2.0 an imported section replaces one whole, later its keys are merged.
        ((ON, CriSection(DROP_IN)), 2, "", False, f"{DROP_IN} does not set"),
        ((ON, CriSection(DROP_IN)), 3, "", True, "of version 3"),
        ((OFF, CriSection(DROP_IN, enable_cdi=True)), 2, "", True, f"{DROP_IN} sets"),
        # What only some releases count speaks against it, never for it.
        ((MAYBE_OFF,), 3, "", False, f"{DROP_IN} sets enable_cdi = false"),
        ((MAYBE_ON,), 2, "", False, "does not set enable_cdi"),
        ((OFF, MAYBE_ON), 3, "", False, f"{CONFIG} sets enable_cdi = false"),
        ((MAYBE_OFF, ON, MAYBE_ON), 2, "", False, f"{DROP_IN} sets enable_cdi = false"),
        ((at("/run/cdi"), CriSection(DROP_IN, None, ("/opt",), True)), 3, "", False, f"them from /opt ({DROP_IN})"),
        # Where it looks for specs.
        ((at("/etc/cdi", "/run/cdi/"),), 3, "", True, "of version 3"),
        ((at("/var/run//cdi"),), 3, "", True, "of version 3"),
        ((at("/run/cdi2"),), 3, "", False, f"reads them from /run/cdi2 ({CONFIG})"),
        ((at("/etc/cdi"),), 3, "", False, f"reads them from /etc/cdi ({CONFIG})"),
        ((at(enable_cdi=True),), 2, "", False, "reads them from no directory"),
        ((at("/opt"), CriSection(DROP_IN, enable_cdi=True)), 2, "", False, f"reads them from /opt ({CONFIG})"),
    ],
)
def test_containerd(sections, version, package, takes, said):
    evidence = replace(GOOD, containerd=containerd(*sections, version=version), containerd_package=package)
    strategy, reason = chosen(evidence)
    assert strategy == ("cdi-cri" if takes else "envvar")
    assert said in reason


def test_before_containerd_2_an_imported_section_loses_the_directories_of_the_one_that_it_replaces():
    sections = (CriSection(CONFIG, spec_dirs=("/opt/cdi",)), CriSection(DROP_IN, enable_cdi=True))
    evidence = replace(GOOD, containerd=containerd(*sections, version=2))
    assert chosen(evidence, "/opt/cdi") == (
        "envvar",
        "CDI specs are written to /opt/cdi, and the runtime reads them from /etc/cdi, /var/run/cdi (the default)",
    )


def test_containerd_without_a_configuration_goes_by_its_package():
    bare = replace(GOOD, containerd={})
    assert chosen(replace(bare, containerd_package="2.0.5-1~ubuntu"))[0] == "cdi-cri"
    assert chosen(bare)[1].startswith("containerd has no configuration file that could be found")


def test_a_disabled_cri_plugin_and_a_file_that_cannot_be_read_are_envvar():
    disabled = replace(GOOD, containerd=containerd(version=3, disabled=CONFIG))
    assert chosen(disabled)[1].startswith(f"{CONFIG} disables containerd's CRI plugin")
    broken = replace(GOOD, containerd=containerd(version=3, faults=(f"{CONFIG} is not valid TOML: x",)))
    assert chosen(broken) == ("envvar", f"{CONFIG} is not valid TOML: x")


@pytest.mark.parametrize(
    ("crio", "takes", "said"),
    [
        (CrioEvidence("1.31.0", "/run/crio/version"), True, "CRI-O is of version 1.31.0 (/run/crio/version)"),
        (CrioEvidence("1.23.2", "/s"), True, "1.23.2"),
        (CrioEvidence("1.23.1", "/s"), False, "only from 1.23.2 on"),
        (CrioEvidence(), False, "CRI-O's version is not known"),
        (CrioEvidence("1.31.0", "/s", ("/etc/cdi",), "/etc/crio/crio.conf"), False, "/etc/cdi (/etc/crio/crio.conf)"),
        (CrioEvidence("1.31.0", "/s", ("/run/cdi",), "/etc/crio/crio.conf"), True, "1.31.0"),
        (CrioEvidence(faults=("crio.conf is not valid TOML",)), False, "crio.conf is not valid TOML"),
    ],
)
def test_crio(crio, takes, said):
    strategy, reason = chosen(NodeEvidence(kubelet=KUBELET, sockets=(CRIO_SOCKET,), crio=crio))
    assert strategy == ("cdi-cri" if takes else "envvar")
    assert said in reason


def test_the_runtime_that_the_kubelet_is_told_of_counts_whatever_else_there_is():
    told = replace(KUBELET, endpoint=CRIO_SOCKET, endpoint_source=YAML)
    both = replace(GOOD, sockets=(SOCKET, CRIO_SOCKET))
    assert chosen(replace(both, kubelet=told, crio=CrioEvidence("1.31.0", "/s")))[0] == "cdi-cri"
    assert chosen(replace(both, kubelet=told))[1].startswith("CRI-O's version is not known")
    assert chosen(both)[1] == (
        f"it is not known which container runtime the kubelet uses: {SOCKET} and {CRIO_SOCKET} exist"
    )
    docker = replace(KUBELET, endpoint="/run/cri-dockerd.sock", endpoint_source=YAML)
    assert chosen(replace(GOOD, kubelet=docker)) == (
        "envvar",
        f"{YAML} names an unknown container runtime: /run/cri-dockerd.sock",
    )
    assert chosen(replace(GOOD, sockets=()))[1].startswith("no container runtime is found")


@pytest.mark.parametrize("other", OTHER_SOCKETS)
def test_a_runtime_that_is_not_judged_leaves_it_unknown_which_one_the_kubelet_uses(other):
    assert chosen(replace(GOOD, sockets=(SOCKET, other))) == (
        "envvar",
        f"it is not known which container runtime the kubelet uses: {SOCKET} and {other} exist",
    )
    assert chosen(replace(GOOD, sockets=(other,))) == ("envvar", f"the container runtime at {other} is unknown")
    told = replace(KUBELET, endpoint=SOCKET, endpoint_source=YAML)
    assert chosen(replace(GOOD, sockets=(SOCKET, other), kubelet=told))[0] == "cdi-cri"


@pytest.mark.parametrize(
    ("socket", "runtime"),
    [
        ("/run/k0s/containerd.sock", "k0s"),
        ("/var/snap/microk8s/common/run/containerd.sock", "MicroK8s"),
        (SOCKET, "Talos"),
    ],
)
def test_k0s_microk8s_and_talos_are_judged_by_their_own_configuration(socket, runtime):
    own = {runtime: ContainerdEvidence("/own.toml", 2, (CriSection("/own.toml", enable_cdi=True),))}
    evidence = NodeEvidence(kubelet=KUBELET, sockets=(socket,), containerd={**own, **containerd(version=2)})
    assert chosen(evidence)[0] == "cdi-cri"
    assert chosen(replace(evidence, containerd=containerd(version=2)))[0] == "envvar"


def test_k3s_and_rke2_are_judged_by_their_own_configuration():
    section = CriSection("/k3s.toml", enable_cdi=True)
    k3s = {"k3s": ContainerdEvidence("/k3s.toml", 2, (section,))}
    evidence = NodeEvidence(kubelet=KUBELET, sockets=(K3S_SOCKET,), containerd={**k3s, **containerd(version=2)})
    assert chosen(evidence)[0] == "cdi-cri"
    assert chosen(replace(evidence, containerd=containerd(version=3)))[1].startswith("neither of k3s and RKE2")
    assert chosen(replace(evidence, containerd={**k3s, "RKE2": VERSION_3}))[1].startswith("both of k3s and RKE2")


def test_specs_that_are_written_elsewhere_must_be_looked_for_there():
    assert chosen(GOOD, "/opt/cdi") == (
        "envvar",
        "CDI specs are written to /opt/cdi, and the runtime reads them from /etc/cdi, /var/run/cdi (the default)",
    )
    placed = containerd(CriSection(CONFIG, spec_dirs=("/opt/cdi",)), version=3)
    assert chosen(replace(GOOD, containerd=placed), "/opt/cdi")[0] == "cdi-cri"
