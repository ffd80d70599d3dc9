"""What is found of the kubelet: the files in its root directory, those that set its flags, and its package."""

import re
import shlex
from collections.abc import Mapping, Sequence

from gpu_plugin.access.strategy_choice import Gate, KubeletEvidence, on_run
from gpu_plugin.config import document
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.host.node_files.root import NodeFileError, NodeRoot

CONFIGS = ("config.yaml", "instance-config.yaml")
"""Files of kubeadm's in the kubelet's directory; the second says what is this node's own (cmd/kubeadm/app/constants)."""

FLAGS = "kubeadm-flags.env"  # flags that kubeadm gives the kubelet, in its directory

EXTRA_FLAGS = ("/etc/default/kubelet", "/etc/sysconfig/kubelet")
"""Flags that an operator gives it, by the unit files of the packages for Debian's and Red Hat's kinds of systems."""

STATE_FILES = ("allocated_pods_state", "actuated_pods_state")
"""Records that kubelets keep in their directory from 1.33 on, once a pod was admitted (pkg/kubelet/allocation)."""

STATE_DIRECTORY = "image_manager"
"""What kubelets make there at their start: from 1.35 on, and from 1.33 on with the feature gate KubeletEnsureSecretPulledImages
(pkg/kubelet/images/pullmanager)."""

MAX_BYTES = 1024 * 1024
MAX_FLAG_BYTES = 64 * 1024

_ASSIGNMENT = re.compile(r"\s*[A-Z_]+=(.*)")
_TRUE = ("true", "True", "TRUE", "t", "T", "1")  # Go's strconv.ParseBool, which the kubelet reads gates with


def kubelet_evidence(roots: Sequence[tuple[NodeRoot, str]], package: str) -> KubeletEvidence:
    """Looks into the kubelet's directory, which is seen under these roots at these paths: the first that has anything counts.

    The first root is the node's own, whose /etc has the operator's flags. Never raises: what cannot be read is said.
    """
    faults: list[str] = []
    gates: list[Gate] = []
    endpoint = source = ""
    state = _state(roots, faults)
    for path, content in _configs(roots, faults):
        gates += _gates_of(content.get("featureGates"), path, faults)
        named = content.get("containerRuntimeEndpoint")
        if isinstance(named, str) and named:
            endpoint, source = named, path
    flag_files = [
        _first(roots, FLAGS, MAX_FLAG_BYTES, faults),
        *(_read(roots[0][0], path, MAX_FLAG_BYTES, faults) for path in EXTRA_FLAGS),
    ]
    for path, written in filter(None, flag_files):
        for name, value in _flags(written, path, faults):
            if name == "container-runtime-endpoint":
                endpoint, source = value, path
            elif name == "feature-gates":
                pairs = (pair.partition("=") for pair in value.split(","))
                gates += [Gate(key.strip(), said.strip() in _TRUE, path) for key, _, said in pairs if key.strip()]
    return KubeletEvidence(package, state, tuple(gates), socket_path(endpoint), source, tuple(faults))


def _state(roots: Sequence[tuple[NodeRoot, str]], faults: list[str]) -> str:
    try:
        for root, directory in roots:
            for name in STATE_FILES:
                if root.is_file(f"{directory}/{name}"):
                    return f"{directory}/{name}"
            if root.is_directory(f"{directory}/{STATE_DIRECTORY}"):
                return f"{directory}/{STATE_DIRECTORY}"
    except NodeFileError as error:
        faults.append(str(error))
    return ""


def socket_path(endpoint: str) -> str:
    """The path of a Unix socket from an endpoint such as unix:///run/containerd/containerd.sock; /var/run is /run."""
    return on_run(re.sub("^(?:unix:)?/*(?=/)", "", endpoint))


def _configs(roots: Sequence[tuple[NodeRoot, str]], faults: list[str]) -> Sequence[tuple[str, Mapping[str, object]]]:
    found = []
    for name in CONFIGS:
        file = _first(roots, name, MAX_BYTES, faults)
        if file is not None:
            path, written = file
            try:
                found.append((path, document.parse(written, path).content))
            except ConfigError as error:
                faults.append(str(error))
    return found


def _first(roots: Sequence[tuple[NodeRoot, str]], name: str, limit: int, faults: list[str]) -> tuple[str, bytes] | None:
    for root, directory in roots:
        file = _read(root, f"{directory}/{name}", limit, faults)
        if file is not None:
            return file
    return None


def _read(root: NodeRoot, path: str, limit: int, faults: list[str]) -> tuple[str, bytes] | None:
    try:
        written = root.read(path, limit)
    except NodeFileError as error:
        faults.append(str(error))
        return None
    return None if written is None else (path, written)


def _gates_of(content: object, path: str, faults: list[str]) -> list[Gate]:
    if content is None:
        return []
    if not isinstance(content, Mapping) or not all(isinstance(value, bool) for value in content.values()):
        faults.append(f"{path}: featureGates is not a mapping of names to true or false")
        return []
    return [Gate(str(name), enabled is True, path) for name, enabled in content.items()]


def _flags(written: bytes, path: str, faults: list[str]) -> list[tuple[str, str]]:
    """Flags and their values in the assignments of an environment file, such as KUBELET_EXTRA_ARGS="--a=b --c d".

    A backslash at the end of a line continues it (systemd.exec(5), EnvironmentFile).
    """
    found: list[tuple[str, str]] = []
    for line in written.decode(errors="replace").replace("\\\n", " ").splitlines():
        assignment = _ASSIGNMENT.fullmatch(line)
        if assignment is None:
            continue
        try:
            # The value is quoted once for the file, and may hold quotes of its own.
            words = shlex.split(" ".join(shlex.split(assignment[1])))
        except ValueError:
            faults.append(f"{path} holds a value whose quotes do not match")
            continue
        for at, word in enumerate(words):
            name, equals, value = word.removeprefix("--").partition("=")
            if word.startswith("--"):
                after = words[at + 1] if not equals and at + 1 < len(words) else ""
                found.append((name, value if equals else after))
    return found
