"""Collects facts about the kubelet and the container runtime from a node's files. Blocks for as long as the disks do."""

import os
import posixpath
import re
import shlex
import stat
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gpu_plugin.config import document
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings
from gpu_plugin.containers.node_files.root import (
    STATUS,
    NodeFileError,
    NodeRoot,
    inner,
    installed,
    switch,
    table_of,
    texts,
)
from gpu_plugin.containers.strategy_choice import (
    CONTAINERD,
    K0S,
    K3S,
    MICROK8S,
    OTHER_SOCKETS,
    RKE2,
    SOCKETS,
    TALOS,
    ContainerdEvidence,
    CrioEvidence,
    CriSection,
    Gate,
    KubeletEvidence,
    NodeEvidence,
    on_run,
)

CONFIGS = ("config.yaml", "instance-config.yaml")
"""kubeadm's files in the kubelet's directory. The second file has this node's own values (cmd/kubeadm/app/constants)."""

FLAGS = "kubeadm-flags.env"  # the file in the kubelet's directory with kubeadm's flags for the kubelet

EXTRA_FLAGS = ("/etc/default/kubelet", "/etc/sysconfig/kubelet")
"""Files with an operator's flags for the kubelet, which the unit files of the packages for Debian and Red Hat read."""

STATE_FILES = ("allocated_pods_state", "actuated_pods_state")
"""Files that kubelets from 1.33 on have in their directory after they have admitted a pod (pkg/kubelet/allocation)."""

STATE_DIRECTORY = "image_manager"
"""A directory that kubelets make in their directory at their start: from 1.35 on, and from 1.33 on with the feature gate
KubeletEnsureSecretPulledImages (pkg/kubelet/images/pullmanager)."""

MAX_BYTES = 1024 * 1024
MAX_FLAG_BYTES = 64 * 1024

_ASSIGNMENT = re.compile(r"\s*[A-Z_]+=(.*)")
_TRUE = ("true", "True", "TRUE", "t", "T", "1")  # by Go's strconv.ParseBool, with which the kubelet reads gates


def kubelet_evidence(roots: Sequence[NodeRoot], directory: str, package: str) -> KubeletEvidence:
    """Read the files of the kubelet's directory, each from the first of these roots that has it.

    The first root is the node's own root, whose /etc has the operator's flags. Never raises: `faults` has the files that cannot
    be read.
    """
    faults: list[str] = []
    gates: list[Gate] = []
    endpoint = source = ""
    state = _state(roots, directory, faults)
    for path, written in _read(roots, (f"{directory}/{name}" for name in CONFIGS), MAX_BYTES, faults):
        try:
            content = document.parse(written, path).content
        except ConfigError as error:
            faults.append(str(error))
            continue
        gates += _gates_of(content.get("featureGates"), path, faults)
        named = content.get("containerRuntimeEndpoint")
        if isinstance(named, str) and named:
            endpoint, source = named, path
    flag_files = _read(roots, [f"{directory}/{FLAGS}"], MAX_FLAG_BYTES, faults)
    flag_files += _read(roots[:1], EXTRA_FLAGS, MAX_FLAG_BYTES, faults)
    for path, written in flag_files:
        for name, value in _flags(written, path, faults):
            if name == "container-runtime-endpoint":
                endpoint, source = value, path
            elif name == "feature-gates":
                pairs = (pair.partition("=") for pair in value.split(","))
                gates += [Gate(key.strip(), text.strip() in _TRUE, path) for key, _, text in pairs if key.strip()]
    return KubeletEvidence(package, state, tuple(gates), socket_path(endpoint), source, tuple(faults))


def _state(roots: Sequence[NodeRoot], directory: str, faults: list[str]) -> str:
    kinds = {**dict.fromkeys(STATE_FILES, stat.S_ISREG), STATE_DIRECTORY: stat.S_ISDIR}
    paths = ((root, f"{directory}/{name}", is_kind) for root in roots for name, is_kind in kinds.items())
    try:
        return next((path for root, path, is_kind in paths if is_kind(root.mode(path))), "")
    except NodeFileError as error:
        faults.append(str(error))
        return ""


def _read(roots: Sequence[NodeRoot], paths: Iterable[str], limit: int, faults: list[str]) -> list[tuple[str, bytes]]:
    """Return the path and the content of each of these files that exists, from the first root that has the file."""
    found = []
    for path in paths:
        for root in roots:
            try:
                written = root.read(path, limit)
            except NodeFileError as error:
                faults.append(str(error))
                continue
            if written is not None:
                found.append((path, written))
                break
    return found


def socket_path(endpoint: str) -> str:
    """Return the path of a Unix socket in an endpoint such as unix:///run/containerd/containerd.sock. /var/run becomes /run."""
    return on_run(re.sub("^(?:unix:)?/*(?=/)", "", endpoint))


def _gates_of(content: object, path: str, faults: list[str]) -> list[Gate]:
    if content is None:
        return []
    if not isinstance(content, Mapping) or not all(isinstance(value, bool) for value in content.values()):
        faults.append(f"{path}: featureGates is not a mapping of names to true or false")
        return []
    return [Gate(str(name), enabled is True, path) for name, enabled in content.items()]


def _flags(written: bytes, path: str, faults: list[str]) -> list[tuple[str, str]]:
    """Return flags and their values in the assignments of an environment file, such as KUBELET_EXTRA_ARGS="--a=b --c d".

    A backslash at the end of a line continues it (systemd.exec(5), EnvironmentFile).
    """
    found: list[tuple[str, str]] = []
    for line in written.decode(errors="replace").replace("\\\n", " ").splitlines():
        assignment = _ASSIGNMENT.fullmatch(line)
        if assignment is None:
            continue
        try:
            # The whole value is quoted for the file, and may have further quotes inside.
            words = shlex.split(" ".join(shlex.split(assignment[1])))
        except ValueError:
            faults.append(f"{path} has a value whose quotes do not match")
            continue
        for at, word in enumerate(words):
            name, equals, value = word.removeprefix("--").partition("=")
            if word.startswith("--"):
                after = words[at + 1] if not equals and at + 1 < len(words) else ""
                found.append((name, value if equals else after))
    return found


FILES = {
    CONTAINERD: "/etc/containerd/config.toml",
    K3S: "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    RKE2: "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
    K0S: "/etc/k0s/containerd.toml",
    MICROK8S: "/var/snap/microk8s/current/args/containerd.toml",
    TALOS: "/etc/cri/containerd.toml",
}

IMPLIED = "/etc/containerd/conf.d/*.toml"  # newer releases import these files if the configuration names no imports

PLUGINS = {1: "cri", 2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
"""The CRI plugin, or its part that handles CDI, by the version of the configuration. Later versions use the name of version 3.

containerd 1.7 ignores a name of another version; 2.4 accepts it in a file of any version (`containerd config dump` shows that).
"""

MAX_FILES = 64  # the most files that one configuration may be made of


def containerd_evidence(root: NodeRoot, runtime: str) -> ContainerdEvidence | None:
    """Read this runtime's configuration; None if there is no file, and for containerd itself no implied import.

    Never raises: `faults` has the files that cannot be read.
    """
    file = FILES[runtime]
    reader = _Reader(root)
    try:
        found = reader.read(file, 0)
        if runtime == CONTAINERD and not reader.imports:
            reader.implied = True
            for path in root.matching(IMPLIED):
                reader.read(path, reader.version)
    except NodeFileError as error:
        return ContainerdEvidence(file, faults=(str(error),))
    if not found and not reader.sections:
        return None
    return ContainerdEvidence(file if found else "", reader.version, tuple(reader.sections), reader.disabled)


class _Reader:
    """Reads a file and its imports, with increasing precedence."""

    def __init__(self, root: NodeRoot) -> None:
        self.sections: list[CriSection] = []
        self.version = 0
        self.disabled = ""
        self.imports = False
        self.implied = False
        self._root = root
        self._read: set[str] = set()

    def read(self, path: str, version: int) -> bool:
        """Read a file, then its imports, then the imports' imports, each file once. Returns whether the file exists.

        `version` is the version of the file that imports this file; 0 if no file does. Raises NodeFileError.
        """
        there = False
        pending = deque([(path, version)])
        while pending:
            each, version = pending.popleft()
            each = posixpath.normpath(each)
            if each in self._read:
                continue
            self._read.add(each)
            if len(self._read) > MAX_FILES:
                raise NodeFileError(f"{each}: containerd's configuration consists of more than {MAX_FILES} files")
            table = table_of(self._root, each)
            if table is not None:
                there = there or each == posixpath.normpath(path)
                pending += self._add(each, table, version)
        return there

    def _add(self, path: str, table: dict[str, Any], version: int) -> list[tuple[str, int]]:
        """Add the sections of a file. Returns the files that it imports, each with the version of this file."""
        written = table.get("version", version)
        if not isinstance(written, int) or isinstance(written, bool):
            raise NodeFileError(f"{path}: version is not a number")
        self.version = self.version or written
        if {*PLUGINS.values()} & {*(texts(table, path, "disabled_plugins") or ())}:
            self.disabled = self.disabled or path
        own = PLUGINS[min(max(written, 1), 3)]
        for name in (own, *(other for other in PLUGINS.values() if other != own)):
            if name in inner(table, path, "plugins"):
                plugin = inner(table, path, "plugins", name)
                enabled, dirs = switch(plugin, path, "enable_cdi"), texts(plugin, path, "cdi_spec_dirs")
                if name == own or enabled is not None or dirs is not None:
                    self.sections.append(CriSection(path, enabled, dirs, self.implied or name != own))
        imports = texts(table, path, "imports")
        self.imports = self.imports or imports is not None
        directory = posixpath.dirname(path)
        patterns = (posixpath.normpath(posixpath.join(directory, pattern)) for pattern in imports or ())
        return [(each, written) for pattern in patterns for each in self._root.matching(pattern)]


CRIO_VERSIONS = ("/run/crio/version", "/var/lib/crio/version")
"""CRI-O's version_file and, in older releases, version_file_persist, with the version as JSON text (internal/version)."""

CRIO_PACKAGE = "cri-o"

CRIO_CONFIG = "/etc/crio/crio.conf"
CRIO_DROP_INS = "/etc/crio/crio.conf.d/*"
"""Files that CRI-O reads in the order of their names, with increasing precedence (crio(8), --config-dir)."""

_CRIO_VERSION_BYTES = 4096


def crio_evidence(root: NodeRoot, packages: Mapping[str, str]) -> CrioEvidence:
    """Read CRI-O's version and configuration. `packages` has versions of installed packages.

    Never raises: `faults` has the file that cannot be read.
    """
    try:
        version, source = _crio_version(root)
        if not version and CRIO_PACKAGE in packages:
            version, source = packages[CRIO_PACKAGE], STATUS
        dirs, dirs_source = None, ""
        for path in (CRIO_CONFIG, *root.matching(CRIO_DROP_INS)):
            found = texts(inner(table_of(root, path) or {}, path, "crio", "runtime"), path, "cdi_spec_dirs")
            if found is not None:
                dirs, dirs_source = found, path
    except NodeFileError as error:
        return CrioEvidence(faults=(str(error),))
    return CrioEvidence(version, source, dirs, dirs_source)


def _crio_version(root: NodeRoot) -> tuple[str, str]:
    for path in CRIO_VERSIONS:
        written = root.read(path, _CRIO_VERSION_BYTES)
        if written is None:
            continue
        try:
            return msgspec.json.decode(written, type=str), path
        except ValueError:
            raise NodeFileError(f"{path} does not have CRI-O's version") from None
    return "", ""


_CONTAINERD_PACKAGES = ("containerd.io", "containerd")  # Docker's, and the distributions'

_IN_CONTAINER = ("/.dockerenv", "/run/.containerenv")
"""Files that container engines make in a container's root. In a pod, the kubelet sets KUBERNETES_SERVICE_HOST."""


def host_root(settings: Settings, environ: Mapping[str, str] = os.environ, here: Path = Path("/")) -> Path | None:
    """Return the path of the node's root file system in this process; None if it is not mounted.

    If the driver root is the node's own root, the path is the driver root's mount point. Outside containers it is `here`, the
    process's root.
    """
    mounted = Path(settings.driver_root_ctr_path)
    if not settings.driver_root.strip("/") and mounted.is_dir():
        return mounted
    return None if contained(environ, here) else here


def contained(environ: Mapping[str, str] = os.environ, here: Path = Path("/")) -> bool:
    """Whether this process is in a container, whose root `here` is not the node's."""
    return "KUBERNETES_SERVICE_HOST" in environ or any((here / file[1:]).exists() for file in _IN_CONTAINER)


def look(root: Path, kubelet_directory: str, here: Path = Path("/")) -> NodeEvidence:
    """Collect the facts in the files under the node's root, and in the kubelet's directory under `here`, this process's root.

    Never raises because of the content of a file, or because it is missing.
    """
    node = NodeRoot(root)
    trouble = ""
    packages: Mapping[str, str] = {}
    sockets: tuple[str, ...] = ()
    try:
        packages = installed(node, ("kubelet", *_CONTAINERD_PACKAGES, CRIO_PACKAGE))
        sockets = tuple(path for path in (*SOCKETS, *OTHER_SOCKETS) if stat.S_ISSOCK(node.mode(path)))
    except NodeFileError as error:
        trouble = str(error)
    containerd = {runtime: found for runtime in FILES if (found := containerd_evidence(node, runtime)) is not None}
    roots = [node] if root == here else [node, NodeRoot(here)]
    return NodeEvidence(
        trouble=trouble,
        kubelet=kubelet_evidence(roots, kubelet_directory, packages.get("kubelet", "")),
        sockets=sockets,
        containerd=containerd,
        containerd_package=next((packages[name] for name in _CONTAINERD_PACKAGES if name in packages), ""),
        crio=crio_evidence(node, packages),
    )
