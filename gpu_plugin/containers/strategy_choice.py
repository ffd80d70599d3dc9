"""Which device list strategy suits a node, decided from what its files say of its kubelet and of its container runtime.

Paths are the node's own. What is not known means envvar.

cdi-cri takes a kubelet that passes CDI device names on, and a runtime that takes them and reads specs where they are written:

- The kubelet's feature gate DevicePluginCDIDevices came in 1.28, is on by default from 1.29 and locked from 1.31
  (pkg/features/kube_features.go, KEP-4009); a kubelet does not start with a gate that it does not know.
- containerd takes them from 1.7 on where enable_cdi is true, which it is by default from 2.0 on; its configuration has version
  3 from there on (docs/cri/config.md, RELEASES.md). Before 2.0 an imported file replaces the section of a plugin whole, later
  their keys are merged (cmd/containerd/server/config, mergeConfig).
- CRI-O takes them from 1.23.2 on, always.
"""

import re
from collections.abc import Mapping, Sequence

import msgspec

CONTAINERD = "containerd"
K3S = "k3s"
RKE2 = "RKE2"
K0S = "k0s"
MICROK8S = "MicroK8s"
TALOS = "Talos"
CRIO = "CRI-O"
"""Container runtimes; k3s, RKE2, k0s, MicroK8s and Talos bring a containerd of their own."""

DEFAULT_SPEC_DIRS = ("/etc/cdi", "/var/run/cdi")
"""Where runtimes look for them by default (tags.cncf.io/container-device-interface, DefaultSpecDirs)."""

GATE = "DevicePluginCDIDevices"

SOCKETS = {
    "/run/containerd/containerd.sock": (CONTAINERD,),
    "/run/crio/crio.sock": (CRIO,),
    "/run/k3s/containerd/containerd.sock": (K3S, RKE2),
    "/run/k0s/containerd.sock": (K0S,),
    "/var/snap/microk8s/common/run/containerd.sock": (MICROK8S,),
}
"""The sockets of container runtimes, and which ones may listen there. k3s and RKE2 share one path, and no node.

Talos has its containerd for pods at containerd's own path, and a second containerd for the system elsewhere.
"""

OTHER_SOCKETS = (
    "/run/cri-dockerd.sock",
    "/run/k3s/cri-dockerd/cri-dockerd.sock",
)
"""Sockets of runtimes that are not judged here. Where one exists, another runtime's socket may be there for other programs, such
as containerd's for Docker."""

_VERSION = re.compile(r"(?:\d+:)?v?(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?")  # with the epoch of a Debian package


class Gate(msgspec.Struct, frozen=True):
    """A feature gate that somebody set, and where."""

    name: str
    enabled: bool
    source: str


class KubeletEvidence(msgspec.Struct, frozen=True):
    """What is known of the kubelet.

    `package` is the version of the distribution's package, `state_file` a file or directory that only kubelets from 1.33
    on keep, `gates`
    in the order in which they overrule each other, the last one counts; `endpoint` is the path of the container runtime's
    socket that the kubelet is told to use, by `endpoint_source`. Empty: nothing says so. `faults` has a sentence for each file
    that is there and cannot be read.
    """

    package: str = ""
    state_file: str = ""
    gates: tuple[Gate, ...] = ()
    endpoint: str = ""
    endpoint_source: str = ""
    faults: tuple[str, ...] = ()


class CriSection(msgspec.Struct, frozen=True):
    """What one file says of containerd's CRI plugin; None where it says nothing.

    `uncertain` where only some releases count it: in a file that is read without being named as an import, or under the
    plugin's name of another version of the configuration.
    """

    source: str
    enable_cdi: bool | None = None
    spec_dirs: tuple[str, ...] | None = None
    uncertain: bool = False


class ContainerdEvidence(msgspec.Struct, frozen=True):
    """What is known of a containerd.

    `file` is its configuration, empty where there is none, `version` that of the file's format. `sections` has what the file
    and what it imports say of the CRI plugin, the last one overrules; `disabled` is a file that disables the plugin.
    """

    file: str = ""
    version: int = 0
    sections: tuple[CriSection, ...] = ()
    disabled: str = ""
    faults: tuple[str, ...] = ()


class CrioEvidence(msgspec.Struct, frozen=True):
    """What is known of CRI-O: its version and which file says so, and where it looks for CDI specs if a file says so."""

    version: str = ""
    version_source: str = ""
    spec_dirs: tuple[str, ...] | None = None
    spec_dirs_source: str = ""
    faults: tuple[str, ...] = ()


class NodeEvidence(msgspec.Struct, frozen=True):
    """What the node's files say of its kubelet and container runtimes.

    `trouble` is why nothing could be looked at, empty otherwise. `sockets` are those of the known paths of container runtimes
    that exist; `containerd` is by runtime, of those with a configuration that was found; `containerd_package` is the version
    of the distribution's package.
    """

    trouble: str = ""
    kubelet: KubeletEvidence = KubeletEvidence()
    sockets: tuple[str, ...] = ()
    containerd: Mapping[str, ContainerdEvidence] = msgspec.field(default_factory=dict)
    containerd_package: str = ""
    crio: CrioEvidence = CrioEvidence()


class Choice(msgspec.Struct, frozen=True):
    """A device list strategy, and how it is known to be the right one."""

    strategy: str
    reason: str


class _RefusedError(Exception):
    """What is known of the node speaks against CDI device names; the text says what."""


def choose(evidence: NodeEvidence, cdi_dir: str) -> Choice:
    """The strategy for a node whose CDI specs are written to `cdi_dir`."""
    if evidence.trouble:
        return Choice("envvar", evidence.trouble)
    try:
        return Choice("cdi-cri", f"{_kubelet(evidence.kubelet)}, and {_runtime(evidence, cdi_dir)}")
    except _RefusedError as error:
        return Choice("envvar", str(error))


def on_run(path: str) -> str:
    """The path, by /run where it lies below /var/run, which is a link to that on every node."""
    return f"/run/{path.removeprefix('/var/run/')}" if path.startswith("/var/run/") else path


def same_directory(one: str, other: str) -> bool:
    """Whether two paths are one directory on a node."""
    return _plain(one) == _plain(other)


def _plain(path: str) -> str:
    return on_run(re.sub("/+", "/", f"{path}/"))


def _parsed(version: str) -> tuple[int, int, int]:
    found = _VERSION.match(version)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (0, 0, 0)


def _kubelet(kubelet: KubeletEvidence) -> str:
    """How it is known that the kubelet passes CDI device names on. Raises _RefusedError."""
    version = _parsed(kubelet.package)
    said = {gate.name: gate for gate in kubelet.gates}
    gate, betas = said.get(GATE), said.get("AllBeta")
    package = f"the kubelet's package is of version {kubelet.package}"
    if kubelet.faults:  # such a file may name another runtime, whatever the version
        raise _RefusedError(kubelet.faults[0])
    if version >= (1, 31, 0):
        return package
    if gate is not None:
        set_to = f"{gate.source} sets the kubelet's feature gate {GATE} to {str(gate.enabled).lower()}"
        if not gate.enabled:
            raise _RefusedError(set_to)
        return set_to
    if version >= (1, 29, 0):
        if betas is not None and not betas.enabled:
            raise _RefusedError(f"{betas.source} sets the kubelet's feature gate AllBeta to false")
        return package
    if version > (0, 0, 0):
        raise _RefusedError(f"{package}, and only from 1.29 on kubelets pass CDI device names on by themselves")
    if kubelet.state_file:
        return f"only kubelets from 1.33 on keep {kubelet.state_file}"
    raise _RefusedError(
        "the kubelet's version is not known: no package of it in /var/lib/dpkg/status, no allocated_pods_state or image_manager "
        f"in its directory, and nothing sets its feature gate {GATE}"
    )


def _runtime(evidence: NodeEvidence, cdi_dir: str) -> str:
    """How it is known that the runtime takes the names and finds our specifications. Raises _RefusedError."""
    kubelet = evidence.kubelet
    socket = kubelet.endpoint or " and ".join(evidence.sockets)
    if not socket:
        raise _RefusedError(f"no container runtime is found: there is none of {', '.join(SOCKETS)}")
    if not kubelet.endpoint and len(evidence.sockets) > 1:
        raise _RefusedError(f"it is not known which container runtime the kubelet uses: {socket} exist")
    if socket not in SOCKETS:
        if kubelet.endpoint:
            raise _RefusedError(f"{kubelet.endpoint_source} names a container runtime that is not known here: {socket}")
        raise _RefusedError(f"nothing is known here of the container runtime at {socket}")
    runtimes = SOCKETS[socket]
    if runtimes == (CRIO,):
        return _crio(evidence.crio, cdi_dir)
    if runtimes == (CONTAINERD,):
        known = evidence.containerd.get(TALOS) or evidence.containerd.get(CONTAINERD, ContainerdEvidence())
        return _containerd(known, evidence.containerd_package, cdi_dir)
    own = [runtime for runtime in runtimes if runtime in evidence.containerd]
    if len(own) != 1:
        which = "none" if len(runtimes) == 1 else "both" if own else "neither"
        raise _RefusedError(
            f"{which} of {' and '.join(runtimes)} have left a configuration of the containerd at {socket}"
        )
    return _containerd(evidence.containerd[own[0]], "", cdi_dir)


def _crio(crio: CrioEvidence, cdi_dir: str) -> str:
    if crio.faults:
        raise _RefusedError(crio.faults[0])
    if not crio.version:
        raise _RefusedError("CRI-O's version is not known: neither /run/crio/version nor a package of it says")
    known = f"CRI-O is of version {crio.version} ({crio.version_source})"
    if _parsed(crio.version) < (1, 23, 2):
        raise _RefusedError(f"{known}, and takes CDI device names only from 1.23.2 on")
    _check_place(crio.spec_dirs, crio.spec_dirs_source, cdi_dir)
    return known


def _containerd(containerd: ContainerdEvidence, package: str, cdi_dir: str) -> str:
    if containerd.faults:
        raise _RefusedError(containerd.faults[0])
    if containerd.disabled:
        raise _RefusedError(
            f"{containerd.disabled} disables containerd's CRI plugin, so the kubelet must use another runtime"
        )
    newer = ""
    if containerd.version >= 3:
        newer = f"{containerd.file} is of version {containerd.version}, which is that of containerd 2"
    elif _parsed(package) >= (2, 0, 0):
        newer = f"containerd's package is of version {package}"
    if newer:
        _check_newer(containerd.sections, cdi_dir)
        return newer
    known = f"containerd's package is of version {package}" if package else "containerd's version is not known"
    if (0, 0, 0) < _parsed(package) < (1, 7, 0):
        raise _RefusedError(f"{known}, and takes CDI device names only from 1.7 on")
    declared = _declared(containerd.sections)
    if not declared and not containerd.file:
        raise _RefusedError(f"containerd has no configuration file that could be found, and {known}")
    if not declared:
        raise _RefusedError(
            f"{containerd.file} does not set enable_cdi = true for containerd's CRI plugin, and {known}"
        )
    last = declared[-1]
    if not last.enable_cdi:
        raise _RefusedError(
            f"{last.source} does not set enable_cdi = true for containerd, which may be one before 2.0 and takes no CDI device "
            "names then"
        )
    # It takes our names only if it does in either way of merging.
    _check_place(last.spec_dirs, last.source, cdi_dir)
    _check_newer(containerd.sections, cdi_dir)
    return f"{last.source} sets enable_cdi = true for containerd"


def _declared(sections: Sequence[CriSection]) -> tuple[CriSection, ...]:
    return tuple(section for section in sections if not section.uncertain)


def _check_newer(sections: Sequence[CriSection], cdi_dir: str) -> None:
    """Raises _RefusedError where a containerd from 2.0 on may not take our names, whichever uncertain section it counts."""
    declared = _declared(sections)
    for merged in (declared, *((*declared, section) for section in sections if section.uncertain)):
        said = [section for section in merged if section.enable_cdi is not None]
        if said and not said[-1].enable_cdi:
            raise _RefusedError(f"{said[-1].source} sets enable_cdi = false for containerd")
        placed = [section for section in merged if section.spec_dirs is not None]
        last = placed[-1] if placed else CriSection("")
        _check_place(last.spec_dirs, last.source, cdi_dir)


def _check_place(spec_dirs: Sequence[str] | None, source: str, cdi_dir: str) -> None:
    """Raises _RefusedError where a runtime does not look into our directory: `spec_dirs` by `source`; None: the default."""
    dirs = DEFAULT_SPEC_DIRS if spec_dirs is None else spec_dirs
    if not any(same_directory(cdi_dir, each) for each in dirs):
        by = "the default" if spec_dirs is None else source
        raise _RefusedError(
            f"CDI specs are written to {cdi_dir} and the runtime looks for them in {', '.join(dirs) or 'no directory'} ({by})"
        )
