"""The facts about the kubelet and container runtimes in a node's files."""

import errno
import random
from pathlib import Path

import msgspec
import pytest

from gpu_plugin.config.resolve import resolve
from gpu_plugin.containers.driver_root import inside
from gpu_plugin.containers.node_files import root
from gpu_plugin.containers.node_files.evidence import MAX_FILES, containerd_evidence, host_root, look, socket_path
from gpu_plugin.containers.node_files.root import NodeFileError, NodeRoot, installed
from gpu_plugin.containers.strategy_choice import (
    ContainerdEvidence,
    CrioEvidence,
    CriSection,
    Gate,
    KubeletEvidence,
    NodeEvidence,
    choose,
)
from tests.unit.containers.node_files.node import NodeTree

KUBELET = "/var/lib/kubelet"
TOML = "/etc/containerd/config.toml"
SETTINGS = resolve({}, {})


@pytest.fixture
def elsewhere(tmp_path):
    """The root that the process sees, where it is not the node's."""
    root = tmp_path / "own"
    root.mkdir()
    return NodeTree(root)


@pytest.fixture
def seen(node, elsewhere):
    return lambda: look(node.root, KUBELET, elsewhere.root)


def test_an_empty_node_says_nothing(seen):
    assert seen() == NodeEvidence()


# Packages


def test_installed_packages_are_those_that_are_installed(node):
    node.package(
        ("adduser", "install ok installed", "3.134"),
        ("kubelet", "hold ok installed", "1.31.2-1.1"),
        ("containerd", "deinstall ok config-files", "1.6.20"),
        ("containerd.io", "install ok installed", "2.1.3-1~debian.12"),
        ("cri-o", "install ok half-installed", "1.31"),
    )
    names = ("kubelet", "containerd", "containerd.io", "cri-o")
    assert installed(NodeRoot(node.root), names) == {"kubelet": "1.31.2-1.1", "containerd.io": "2.1.3-1~debian.12"}


def test_the_last_package_needs_no_blank_line_and_its_fields_no_order(node):
    node.put(
        "/var/lib/dpkg/status",
        "Package: a\nVersion: 1\nStatus: install ok installed\n\nPackage: c\nStatus: install ok installed\n\n"
        "Package: d\nVersion: 3\n\nPackage:b\nVersion:2\nStatus: x ok installed",
    )
    assert installed(NodeRoot(node.root), ("a", "b", "c", "d")) == {"a": "1", "b": "2"}


def test_a_record_of_packages_that_is_too_long_is_said(node, seen, monkeypatch):
    monkeypatch.setattr(root, "MAX_RECORD_BYTES", 100)
    node.package(*[("a", "install ok installed", "1")] * 10)
    with pytest.raises(NodeFileError, match="is longer than 100 bytes"):
        installed(NodeRoot(node.root), ("a",))
    assert seen().trouble == "/var/lib/dpkg/status is longer than 100 bytes, the most that are read"


# The kubelet


def test_the_kubelet_s_own_files(node, seen):
    node.package(("kubelet", "install ok installed", "1.30.0-1.1"))
    config = node.put(
        f"{KUBELET}/config.yaml",
        "kind: KubeletConfiguration\nfeatureGates: {DevicePluginCDIDevices: false, AllBeta: true}\nsyncFrequency: 0s\n"
        "containerRuntimeEndpoint: unix:///run/containerd/containerd.sock\n",
    )
    instance = node.put(
        f"{KUBELET}/instance-config.yaml", 'containerRuntimeEndpoint: "unix:///var/run/crio/crio.sock"\n'
    )
    node.put(f"{KUBELET}/actuated_pods_state", "{}")
    assert seen().kubelet == KubeletEvidence(
        "1.30.0-1.1",
        f"{KUBELET}/actuated_pods_state",
        (Gate("DevicePluginCDIDevices", False, config), Gate("AllBeta", True, config)),
        "/run/crio/crio.sock",
        instance,
    )


def test_flags_overrule_files_and_the_operator_s_own_come_last(node, seen):
    node.put(f"{KUBELET}/config.yaml", "containerRuntimeEndpoint: unix:///a.sock\nfeatureGates: {AllBeta: true}\n")
    node.put(
        f"{KUBELET}/kubeadm-flags.env",
        'KUBELET_KUBEADM_ARGS="--container-runtime-endpoint=unix:///run/containerd/containerd.sock --v 2"\n',
    )
    extra = node.put(
        "/etc/default/kubelet",
        "# comment\nKUBELET_EXTRA_ARGS=--feature-gates=\"AllBeta=false,X=t\" --container-runtime-endpoint 'unix:///b.sock'\n",
    )
    assert (seen().kubelet.endpoint, seen().kubelet.endpoint_source) == ("/b.sock", extra)
    node.put(
        "/etc/default/kubelet",
        'KUBELET_EXTRA_ARGS=\'--feature-gates="AllBeta=false,X=t" --container-runtime-endpoint "unix:///b.sock"\'\n',
    )
    found = seen().kubelet
    assert (found.endpoint, found.endpoint_source) == ("/b.sock", extra)
    assert {gate.name: gate.enabled for gate in found.gates} == {"AllBeta": False, "X": True}


def test_the_kubelet_s_directory_as_this_process_sees_it_counts_too(node, elsewhere, seen):
    elsewhere.put(f"{KUBELET}/config.yaml", "containerRuntimeEndpoint: /run/crio/crio.sock\n")
    elsewhere.put(f"{KUBELET}/allocated_pods_state", "{}")
    elsewhere.package(("kubelet", "install ok installed", "1.31.0"))  # of this container's image
    assert seen().kubelet == KubeletEvidence(
        "", f"{KUBELET}/allocated_pods_state", (), "/run/crio/crio.sock", f"{KUBELET}/config.yaml"
    )
    node.put(f"{KUBELET}/config.yaml", "containerRuntimeEndpoint: /run/containerd/containerd.sock\n")
    assert seen().kubelet.endpoint == "/run/containerd/containerd.sock"


@pytest.mark.parametrize("name", ["allocated_pods_state", "actuated_pods_state", "image_manager/pulled/a"])
def test_what_only_later_kubelets_keep(node, seen, name):
    node.put(f"{KUBELET}/{name}")
    assert seen().kubelet.state_file == f"{KUBELET}/{name.partition('/')[0]}"


def test_a_line_of_flags_may_be_continued_on_the_next(node, seen):
    node.put(
        "/etc/default/kubelet",
        'KUBELET_EXTRA_ARGS="--v=2 \\\n  --container-runtime-endpoint=unix:///run/crio/crio.sock"\n',
    )
    assert seen().kubelet.endpoint == "/run/crio/crio.sock"


@pytest.mark.parametrize(
    ("endpoint", "path"),
    [
        ("unix:///run/containerd/containerd.sock", "/run/containerd/containerd.sock"),
        ("unix:////var/run/crio/crio.sock", "/run/crio/crio.sock"),
        ("/var/run/crio/crio.sock", "/run/crio/crio.sock"),
        ("unix:/run/a.sock", "/run/a.sock"),
        ("tcp://localhost:1", "tcp://localhost:1"),
        ("", ""),
    ],
)
def test_endpoints_as_paths_of_sockets(endpoint, path):
    assert socket_path(endpoint) == path


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.yaml", "a: [", "config.yaml"),
        ("config.yaml", "- a\n", "not a mapping"),
        ("config.yaml", "featureGates: [a]\n", "featureGates is not a mapping"),
        ("config.yaml", "featureGates: {a: maybe}\n", "featureGates is not a mapping"),
        ("config.yaml", b"\xff\xfe\x00", "config.yaml"),
        ("config.yaml", "a: 1\n" * 300_000, "config.yaml"),
        ("kubeadm-flags.env", 'KUBELET_KUBEADM_ARGS="--a', "quotes do not match"),
        ("kubeadm-flags.env", f'A="{"--a=b " * 20_000}"', "is larger than"),
    ],
)
def test_a_file_of_the_kubelet_s_that_cannot_be_read_is_a_sentence(node, seen, file, content, said):
    node.put(f"{KUBELET}/{file}", content)
    [fault] = seen().kubelet.faults
    assert said in fault
    assert fault.startswith(f"{KUBELET}/{file}")
    assert "\n" not in fault


# containerd


def test_containerd_s_file_and_what_it_imports(node, seen):
    node.put(
        TOML,
        'version = 2\nimports = ["conf.d/*.toml", "/etc/more.toml", "/absent.toml"]\n'
        '[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = false\n',
    )
    node.put("/etc/containerd/conf.d/b.toml", '[plugins."io.containerd.grpc.v1.cri"]\ncdi_spec_dirs = ["/run/cdi"]\n')
    node.put("/etc/containerd/conf.d/a.toml", '[plugins."io.containerd.cri.v1.runtime"]\nenable_cdi = false\n')
    node.put(
        "/etc/more.toml",
        f'imports = ["{TOML}", "/etc/more.toml"]\n[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = true\n',
    )
    assert seen().containerd == {
        "containerd": ContainerdEvidence(
            TOML,
            2,
            (
                CriSection(TOML, enable_cdi=False),
                CriSection("/etc/containerd/conf.d/a.toml", enable_cdi=False, uncertain=True),
                CriSection("/etc/containerd/conf.d/b.toml", spec_dirs=("/run/cdi",)),
                CriSection("/etc/more.toml", enable_cdi=True),
            ),
        )
    }


def test_imports_are_read_after_the_files_beside_their_importer(node, seen):
    section = '[plugins."io.containerd.cri.v1.runtime"]\nenable_cdi = {}\n'
    node.put(TOML, 'version = 2\nimports = ["a.toml", "b.toml"]\n')
    node.put("/etc/containerd/a.toml", 'version = 3\nimports = ["c.toml"]\n')
    node.put("/etc/containerd/b.toml", f"version = 3\n{section.format('true')}")
    node.put("/etc/containerd/c.toml", f"version = 3\n{section.format('false')}")
    found = seen().containerd["containerd"]
    assert found.version == 2
    assert [(each.source, each.enable_cdi) for each in found.sections] == [
        ("/etc/containerd/b.toml", True),
        ("/etc/containerd/c.toml", False),
    ]


@pytest.mark.parametrize(
    ("version", "name"), [(3, "io.containerd.grpc.v1.cri"), (3, "cri"), (2, "io.containerd.cri.v1.runtime")]
)
def test_a_section_under_the_plugin_s_name_of_another_version_is_uncertain(node, seen, version, name):
    node.put(TOML, f"version = {version}\n[plugins.'{name}']\nenable_cdi = false\n")
    assert seen().containerd["containerd"].sections == (CriSection(TOML, enable_cdi=False, uncertain=True),)
    node.put(TOML, f"version = {version}\n[plugins.'{name}']\nstream_idle_timeout = '4h0m0s'\n")
    assert seen().containerd["containerd"].sections == ()


def test_drop_ins_that_no_import_names_are_uncertain(node, seen):
    node.put(TOML, "version = 3\n")
    drop_in = node.put(
        "/etc/containerd/conf.d/a.toml", "[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = false\n"
    )
    section = CriSection(drop_in, enable_cdi=False, uncertain=True)
    assert seen().containerd["containerd"] == ContainerdEvidence(TOML, 3, (section,))
    node.put(TOML, "version = 3\nimports = []\n")
    assert seen().containerd["containerd"] == ContainerdEvidence(TOML, 3)


@pytest.mark.parametrize(
    ("version", "plugin"), [(1, "cri"), (2, "io.containerd.grpc.v1.cri"), (4, "io.containerd.cri.v1.runtime")]
)
def test_the_cri_plugin_has_a_name_by_the_version_of_the_file(node, seen, version, plugin):
    node.put(TOML, f'version = {version}\ndisabled_plugins = ["{plugin}"]\n[plugins."{plugin}"]\nenable_cdi = true\n')
    assert seen().containerd["containerd"] == ContainerdEvidence(TOML, version, (CriSection(TOML, True),), TOML)


def test_dots_in_strings_and_comments_part_no_key(node, seen):
    addresses = ", ".join(f"\"10.0.0.{at}\", '10.1.0.{at}'" for at in range(30))
    node.put(TOML, f"version = 3 # {'.' * 100}\n[plugins.a]\nendpoint = [{addresses}]\n")
    assert seen().containerd["containerd"] == ContainerdEvidence(TOML, 3)


@pytest.mark.parametrize(
    ("runtime", "file", "imported"),
    [
        ("k3s", "/var/lib/rancher/k3s/agent/etc/containerd/config.toml", "/a.toml"),
        ("RKE2", "/var/lib/rancher/rke2/agent/etc/containerd/config.toml", "/a.toml"),
        ("k0s", "/etc/k0s/containerd.toml", "/run/k0s/containerd-cri.toml"),
        ("MicroK8s", "/var/snap/microk8s/7000/args/containerd.toml", "/var/snap/microk8s/7000/args/certs.toml"),
        ("Talos", "/etc/cri/containerd.toml", "/etc/cri/conf.d/cri.toml"),
    ],
)
def test_distributions_keep_files_of_their_own(node, seen, runtime, file, imported):
    node.put(file, f'version = 2\nimports = ["{imported}"]\n')
    node.put(imported, '[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = true\n')
    if runtime == "MicroK8s":
        (node.root / "var/snap/microk8s/current").symlink_to("7000")
    assert list(seen().containerd) == [runtime]
    found = seen().containerd[runtime]
    assert (found.version, [section.enable_cdi for section in found.sections]) == (2, [True])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("version = ", "is not valid TOML"),
        (b"\xff", "is not valid TOML"),
        ("a = " + "[" * 100_000, "is not valid TOML"),
        (".".join(["a"] * 500_000) + " = 1", "has a line with more than 64 dots"),
        ("[a" + ".'b'" * 65 + "]", "has a line with more than 64 dots"),
        ('version = "3"', "version is not a number"),
        ("version = true", "version is not a number"),
        ("version = 3\nplugins = 1", "plugins is not a table"),
        ("version = 3\n[plugins]\n'io.containerd.cri.v1.runtime' = 1", "is not a table"),
        (
            "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = 'yes'",
            "enable_cdi is neither true nor false",
        ),
        (
            "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\ncdi_spec_dirs = '/a'",
            "cdi_spec_dirs is not a list of strings",
        ),
        ("imports = [1]", "imports is not a list of strings"),
        ('imports = ["/etc/*/a.toml"]', "has wildcards in its directory"),
        ("disabled_plugins = 1", "disabled_plugins is not a list of strings"),
    ],
)
def test_a_configuration_of_containerd_s_that_cannot_be_read_is_a_sentence(node, seen, content, said):
    node.put(TOML, content)
    [fault] = seen().containerd["containerd"].faults
    assert said in fault
    assert "\n" not in fault


def test_imports_without_end_are_given_up(node):
    node.put(TOML, 'imports = ["/c/0"]')
    for at in range(MAX_FILES + 5):
        node.put(f"/c/{at}", f'imports = ["/c/{at + 1}"]')
    found = containerd_evidence(NodeRoot(node.root), "containerd")
    assert found is not None
    assert found.faults == (f"/c/{MAX_FILES - 1}: containerd's configuration consists of more than {MAX_FILES} files",)


# CRI-O


def test_crio_s_version_and_directories(node, seen):
    version = node.put("/run/crio/version", '"1.31.1+abc"')
    node.put("/etc/crio/crio.conf", '[crio.runtime]\ncdi_spec_dirs = ["/etc/cdi"]\n')
    last = node.put("/etc/crio/crio.conf.d/10-b.conf", '[crio.runtime]\ncdi_spec_dirs = ["/run/cdi"]\n')
    node.put("/etc/crio/crio.conf.d/99-c.conf", "[crio.runtime]\n")
    assert seen().crio == CrioEvidence("1.31.1+abc", version, ("/run/cdi",), last)


def test_crio_s_version_is_taken_from_its_package_else(node, seen):
    node.package(("cri-o", "install ok installed", "1.30.0-1.1"))
    assert seen().crio == CrioEvidence("1.30.0-1.1", "/var/lib/dpkg/status")
    node.put("/var/lib/crio/version", '"1.29.0"')
    assert seen().crio == CrioEvidence("1.29.0", "/var/lib/crio/version")
    node.put("/run/crio/version", '"1.31.1"')
    assert seen().crio == CrioEvidence("1.31.1", "/run/crio/version")


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        ("/run/crio/version", "{", "/run/crio/version does not have CRI-O's version"),
        ("/run/crio/version", "1", "does not have CRI-O's version"),
        ("/run/crio/version", '"' + "1" * 5000 + '"', "is larger than"),
        ("/etc/crio/crio.conf", "[", "/etc/crio/crio.conf is not valid TOML"),
        ("/etc/crio/crio.conf", "crio = 1", "crio is not a table"),
    ],
)
def test_a_file_of_crio_s_that_cannot_be_read_is_a_sentence(node, seen, path, content, said):
    node.put(path, content)
    [fault] = seen().crio.faults
    assert said in fault


# Files that this process may not read


@pytest.mark.parametrize(
    "path",
    [
        "/var/lib/dpkg/status",
        "/run/containerd/containerd.sock",
        f"{KUBELET}/allocated_pods_state",
        f"{KUBELET}/config.yaml",
        TOML,
        "/etc/containerd/conf.d",
        "/run/crio/version",
        "/etc/crio/crio.conf.d",
    ],
)
def test_what_may_not_be_looked_at_is_said_and_does_not_count_as_absent(node, seen, monkeypatch, path):
    find = inside.resolve

    def forbid(below, asked):
        if asked == f"{below}{path}":
            raise PermissionError(errno.EACCES, "Permission denied")
        return find(below, asked)

    monkeypatch.setattr(root, "resolve", forbid)
    found = seen()
    said = [found.trouble, *found.kubelet.faults, *found.crio.faults]
    for each in found.containerd.values():
        said += each.faults
    assert f"{path} cannot be read: Permission denied" in said


# All together


def test_a_kubeadm_node_with_containerd_2_takes_cdi_device_names(node, seen):
    node.package(("kubelet", "hold ok installed", "1.31.2-1.1"))
    node.put(TOML, "version = 3\n")
    node.put(f"{KUBELET}/config.yaml", "containerRuntimeEndpoint: ''\n")
    node.link("/var/run", "/run")
    node.listen("/run/containerd/containerd.sock")
    assert choose(seen(), "/var/run/cdi").strategy == "cdi-cri"


def test_containerd_for_docker_is_not_taken_for_the_kubelet_s_runtime(node, seen):
    node.package(("kubelet", "hold ok installed", "1.31.2-1.1"))
    node.put(TOML, "version = 3\n")
    node.listen("/run/containerd/containerd.sock")
    node.listen("/run/cri-dockerd.sock")
    assert choose(seen(), "/var/run/cdi").strategy == "envvar"


def test_no_content_of_any_file_is_more_than_a_sentence(node, seen):
    files = (
        f"{KUBELET}/config.yaml",
        f"{KUBELET}/instance-config.yaml",
        f"{KUBELET}/kubeadm-flags.env",
        "/etc/default/kubelet",
        TOML,
        "/etc/containerd/conf.d/a.toml",
        "/run/crio/version",
        "/etc/crio/crio.conf",
        "/var/lib/dpkg/status",
    )
    words = [b"version = 3\n", b"[plugins", b"'", b'"', b"]", b"{", b"&a [*a]", b"\xff", b"\n", b": ", b"=", b"--a"]
    words.append(b"Package: kubelet\n")
    rng = random.Random(7)
    for _ in range(150):
        for file in files:
            node.put(file, b"".join(rng.choice(words) for _ in range(rng.randrange(12))))
        choice = choose(seen(), "/var/run/cdi")
        assert choice.strategy == "envvar"
        assert choice.reason
        assert "\n" not in choice.reason


# Where the node's root is


def test_the_node_s_root_is_where_it_is_mounted_or_this_process_s_own_on_the_host(tmp_path):
    mounted = msgspec.structs.replace(SETTINGS, driver_root_ctr_path=str(tmp_path / "driver-root"))
    here = tmp_path / "own"
    here.mkdir()
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert host_root(mounted, {}, here) == here
    assert host_root(mounted, pod, here) is None
    (tmp_path / "driver-root").mkdir()
    assert host_root(mounted, pod, here) == Path(mounted.driver_root_ctr_path)
    assert host_root(mounted, {}, here) == Path(mounted.driver_root_ctr_path)
    container = msgspec.structs.replace(mounted, driver_root="/run/nvidia/driver")
    assert host_root(container, pod, here) is None
    assert host_root(container, {}, here) == here
    (here / ".dockerenv").touch()
    assert host_root(container, {}, here) is None
