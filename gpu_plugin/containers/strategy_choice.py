"""Chooses the device list strategy of a node from the files of its kubelet and of its container runtime.

Paths are the node's own. If the files leave a doubt, the choice is envvar.

cdi-cri needs a kubelet that passes CDI device names on, and a runtime that accepts them and reads specs from our directory:

- The kubelet's feature gate DevicePluginCDIDevices exists from 1.28, is on by default from 1.29 and locked from 1.31
  (pkg/features/kube_features.go, KEP-4009). A kubelet does not start with an unknown gate.
- containerd accepts CDI names from 1.7 on if enable_cdi is true, which is the default from 2.0 on. Its configuration has version
  3 from 2.0 on (docs/cri/config.md, RELEASES.md). Before 2.0, an imported file replaces the whole section of a plugin; from 2.0
  on, the keys are merged (cmd/containerd/server/config, mergeConfig).
- CRI-O accepts CDI names from 1.23.2 on, always.
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
"""Container runtimes. k3s, RKE2, k0s, MicroK8s and Talos include their own containerd."""

DEFAULT_SPEC_DIRS = ("/etc/cdi", "/var/run/cdi")
"""The default directories of specs in runtimes (tags.cncf.io/container-device-interface, DefaultSpecDirs)."""

GATE = "DevicePluginCDIDevices"

SOCKETS = {
    "/run/containerd/containerd.sock": (CONTAINERD,),
    "/run/crio/crio.sock": (CRIO,),
    "/run/k3s/containerd/containerd.sock": (K3S, RKE2),
    "/run/k0s/containerd.sock": (K0S,),
    "/var/snap/microk8s/common/run/containerd.sock": (MICROK8S,),
}
"""The sockets of container runtimes, and the runtimes that may use each path. k3s and RKE2 use the same path, on different nodes.

On Talos, the containerd for pods uses containerd's own path. A second containerd, for the system, uses another path.
"""

OTHER_SOCKETS = ("/run/cri-dockerd.sock", "/run/k3s/cri-dockerd/cri-dockerd.sock")
"""Sockets of runtimes that this module does not support. If such a socket exists, another runtime's socket may serve other
programs, for example containerd's socket serves Docker."""

_VERSION = re.compile(r"(?:\d+:)?v?(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?")  # with the epoch of a Debian package


class Gate(msgspec.Struct, frozen=True):
    """A feature gate that is set explicitly, and the file that sets it."""

    name: str
    enabled: bool
    source: str


class KubeletEvidence(msgspec.Struct, frozen=True):
    """The facts about the kubelet that are known."""

    package: str = ""  # the version of the distribution's package; empty if unknown
    state_file: str = ""  # a file or directory that only kubelets from 1.33 on have; empty if there is none
    gates: tuple[Gate, ...] = ()  # feature gates, with increasing precedence
    # The path of the container runtime's socket that the kubelet is configured to use; empty if unknown.
    endpoint: str = ""
    endpoint_source: str = ""  # the file that has `endpoint`
    faults: tuple[str, ...] = ()  # a sentence for each file that exists and cannot be read


class CriSection(msgspec.Struct, frozen=True):
    """The section for containerd's CRI plugin in one file. A value is None if the section does not have it."""

    source: str
    enable_cdi: bool | None = None
    spec_dirs: tuple[str, ...] | None = None
    # Only some releases use the section: the file is not a named import, or the section has the plugin's name of another
    # configuration version.
    uncertain: bool = False


class ContainerdEvidence(msgspec.Struct, frozen=True):
    """The facts about a containerd that are known."""

    file: str = ""  # its configuration file; empty if it was not found
    version: int = 0  # the version of the configuration's format
    # The CRI plugin's sections in this file and its imports, with increasing precedence.
    sections: tuple[CriSection, ...] = ()
    disabled: str = ""  # the file that disables the CRI plugin; empty if no file does
    faults: tuple[str, ...] = ()  # a sentence for each file that exists and cannot be read


class CrioEvidence(msgspec.Struct, frozen=True):
    """The facts about CRI-O that are known: its version, its directories of CDI specs, and the files that have these facts."""

    version: str = ""
    version_source: str = ""
    spec_dirs: tuple[str, ...] | None = None  # None if no file sets the directories
    spec_dirs_source: str = ""
    faults: tuple[str, ...] = ()


class NodeEvidence(msgspec.Struct, frozen=True):
    """The facts about the kubelet and the container runtimes in the node's files."""

    trouble: str = ""  # why no file could be read; empty otherwise
    kubelet: KubeletEvidence = KubeletEvidence()
    # The existing sockets of container runtimes, of the paths in SOCKETS and OTHER_SOCKETS.
    sockets: tuple[str, ...] = ()
    # Each runtime with a containerd whose configuration was found.
    containerd: Mapping[str, ContainerdEvidence] = msgspec.field(default_factory=dict)
    containerd_package: str = ""  # the version of the distribution's containerd package; empty if unknown
    crio: CrioEvidence = CrioEvidence()


class Choice(msgspec.Struct, frozen=True):
    """A device list strategy, and the reason for its choice."""

    strategy: str
    reason: str


class _RefusedError(Exception):
    """The node does not support CDI device names, or may not support them. The text is the reason."""


def choose(evidence: NodeEvidence, cdi_dir: str) -> Choice:
    """Choose the strategy for a node whose CDI specs are written to `cdi_dir`."""
    if evidence.trouble:
        return Choice("envvar", evidence.trouble)
    try:
        return Choice("cdi-cri", f"{_kubelet(evidence.kubelet)}, and {_runtime(evidence, cdi_dir)}")
    except _RefusedError as error:
        return Choice("envvar", str(error))


def on_run(path: str) -> str:
    """Replace /var/run at the beginning of the path by /run, since /var/run is a link to /run on every node."""
    return f"/run/{path.removeprefix('/var/run/')}" if path.startswith("/var/run/") else path


def _plain(path: str) -> str:
    """Return one spelling of a directory's path on a node."""
    return on_run(re.sub("/+", "/", f"{path}/"))


def _parsed(version: str) -> tuple[int, int, int]:
    found = _VERSION.match(version)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (0, 0, 0)


def _kubelet(kubelet: KubeletEvidence) -> str:
    """Return the evidence that the kubelet passes CDI device names on. Raises _RefusedError if there is no evidence."""
    version = _parsed(kubelet.package)
    gates = {gate.name: gate for gate in kubelet.gates}
    gate, betas = gates.get(GATE), gates.get("AllBeta")
    package = f"the kubelet's package is of version {kubelet.package}"
    if kubelet.faults:  # an unreadable file may name another runtime
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
        raise _RefusedError(f"{package}, and kubelets pass CDI device names on by default only from 1.29 on")
    if kubelet.state_file:
        return f"only kubelets from 1.33 on have {kubelet.state_file}"
    raise _RefusedError(
        "the kubelet's version is not known: no package of it in /var/lib/dpkg/status, no allocated_pods_state or image_manager "
        f"in its directory, and nothing sets its feature gate {GATE}"
    )


def _runtime(evidence: NodeEvidence, cdi_dir: str) -> str:
    """Return the evidence that the runtime accepts CDI names and finds our specs.

    Raises _RefusedError if there is no evidence.
    """
    kubelet = evidence.kubelet
    socket = kubelet.endpoint or " and ".join(evidence.sockets)
    if not socket:
        raise _RefusedError(f"no container runtime is found: none of these sockets exists: {', '.join(SOCKETS)}")
    if not kubelet.endpoint and len(evidence.sockets) > 1:
        raise _RefusedError(f"it is not known which container runtime the kubelet uses: {socket} exist")
    if socket not in SOCKETS:
        if kubelet.endpoint:
            raise _RefusedError(f"{kubelet.endpoint_source} names an unknown container runtime: {socket}")
        raise _RefusedError(f"the container runtime at {socket} is unknown")
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
        raise _RefusedError(
            "CRI-O's version is not known: neither /run/crio/version nor a package of it has the version"
        )
    known = f"CRI-O is of version {crio.version} ({crio.version_source})"
    if _parsed(crio.version) < (1, 23, 2):
        raise _RefusedError(f"{known}, and CRI-O accepts CDI device names only from 1.23.2 on")
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
        newer = f"{containerd.file} is of version {containerd.version}, which exists from containerd 2.0 on"
    elif _parsed(package) >= (2, 0, 0):
        newer = f"containerd's package is of version {package}"
    if newer:
        _check_newer(containerd.sections, cdi_dir)
        return newer
    known = f"containerd's package is of version {package}" if package else "containerd's version is not known"
    if (0, 0, 0) < _parsed(package) < (1, 7, 0):
        raise _RefusedError(f"{known}, and containerd accepts CDI device names only from 1.7 on")
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
            f"{last.source} does not set enable_cdi = true for containerd, and a containerd before 2.0 accepts no CDI device "
            "names without it"
        )
    # The release is not known, so containerd must accept our names both with replaced sections and with merged keys.
    _check_place(last.spec_dirs, last.source, cdi_dir)
    _check_newer(containerd.sections, cdi_dir)
    return f"{last.source} sets enable_cdi = true for containerd"


def _declared(sections: Sequence[CriSection]) -> tuple[CriSection, ...]:
    return tuple(section for section in sections if not section.uncertain)


def _check_newer(sections: Sequence[CriSection], cdi_dir: str) -> None:
    """Raises _RefusedError if a containerd from 2.0 on may reject our names, with or without any of the uncertain sections."""
    declared = _declared(sections)
    for merged in (declared, *((*declared, section) for section in sections if section.uncertain)):
        switches = [section for section in merged if section.enable_cdi is not None]
        if switches and not switches[-1].enable_cdi:
            raise _RefusedError(f"{switches[-1].source} sets enable_cdi = false for containerd")
        placed = [section for section in merged if section.spec_dirs is not None]
        last = placed[-1] if placed else CriSection("")
        _check_place(last.spec_dirs, last.source, cdi_dir)


def _check_place(spec_dirs: Sequence[str] | None, source: str, cdi_dir: str) -> None:
    """Raises _RefusedError if a runtime does not read specs from our directory.

    `spec_dirs` are the runtime's directories, as `source` sets them; None for the default.
    """
    dirs = DEFAULT_SPEC_DIRS if spec_dirs is None else spec_dirs
    if _plain(cdi_dir) not in map(_plain, dirs):
        by = "the default" if spec_dirs is None else source
        raise _RefusedError(
            f"CDI specs are written to {cdi_dir}, and the runtime reads them from {', '.join(dirs) or 'no directory'} ({by})"
        )
