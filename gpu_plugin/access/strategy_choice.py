"""Which device list strategy suits a node, decided from what its files say. What is not known means envvar.

cdi-cri takes a kubelet that passes CDI device names on, and a runtime that takes them and reads specs where they are written:

- The kubelet's feature gate DevicePluginCDIDevices came in 1.28, is on by default from 1.29 and locked from 1.31
  (pkg/features/kube_features.go, KEP-4009); a kubelet does not start with a gate that it does not know.
- containerd takes them from 1.7 on where enable_cdi is true, which it is by default from 2.0 on; its configuration has version
  3 from there on (docs/cri/config.md, RELEASES.md). Before 2.0 an imported file replaces the section of a plugin whole, later
  their keys are merged (cmd/containerd/server/config, mergeConfig).
- CRI-O takes them from 1.23.2 on, always.
"""

import re
from collections.abc import Callable, Sequence

import msgspec

from gpu_plugin.access.node_evidence import (
    CONTAINERD,
    CRIO,
    K3S,
    RKE2,
    ContainerdEvidence,
    CrioEvidence,
    CriSection,
    KubeletEvidence,
    NodeEvidence,
)

DEFAULT_SPEC_DIRS = ("/etc/cdi", "/var/run/cdi")
"""Where runtimes look for them by default (tags.cncf.io/container-device-interface, DefaultSpecDirs)."""

GATE = "DevicePluginCDIDevices"

SOCKETS = {
    "/run/containerd/containerd.sock": (CONTAINERD,),
    "/run/crio/crio.sock": (CRIO,),
    "/run/k3s/containerd/containerd.sock": (K3S, RKE2),
}
"""The sockets of container runtimes, and which ones may listen there. k3s and RKE2 share one path, and no node."""

OTHER_SOCKETS = (
    "/run/cri-dockerd.sock",
    "/run/k3s/cri-dockerd/cri-dockerd.sock",
    "/run/k0s/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
)
"""Sockets of runtimes that are not judged here. Where one exists, another runtime's socket may be there for other programs, such
as containerd's for Docker."""

_VERSION = re.compile(r"(?:\d+:)?v?(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?")  # with the epoch of a Debian package


class Choice(msgspec.Struct, frozen=True):
    """A device list strategy, and how it is known to be the right one."""

    strategy: str
    reason: str


class _Verdict(msgspec.Struct, frozen=True):
    takes: bool
    reason: str


def choose(evidence: NodeEvidence, cdi_dir: str) -> Choice:
    """The strategy for a node whose CDI specs are written to `cdi_dir`."""
    if evidence.trouble:
        return Choice("envvar", evidence.trouble)
    kubelet = _kubelet(evidence.kubelet)
    if not kubelet.takes:
        return Choice("envvar", kubelet.reason)
    runtime = _runtime(evidence, cdi_dir)
    if not runtime.takes:
        return Choice("envvar", runtime.reason)
    return Choice("cdi-cri", f"{kubelet.reason}, and {runtime.reason}")


def same_directory(one: str, other: str) -> bool:
    """Whether two paths are one directory on a node: /var/run is a link to /run."""
    return _plain(one) == _plain(other)


def _plain(path: str) -> str:
    path = re.sub("/+", "/", f"{path}/")
    return f"/run/{path.removeprefix('/var/run/')}" if path.startswith("/var/run/") else path


def _parsed(version: str) -> tuple[int, int, int]:
    found = _VERSION.match(version)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (0, 0, 0)


def _kubelet(kubelet: KubeletEvidence) -> _Verdict:
    version = _parsed(kubelet.package)
    said = {gate.name: gate for gate in kubelet.gates}
    gate, betas = said.get(GATE), said.get("AllBeta")
    package = f"the kubelet's package is of version {kubelet.package}"
    if kubelet.faults:  # such a file may name another runtime, whatever the version
        return _Verdict(False, kubelet.faults[0])
    if version >= (1, 31, 0):
        return _Verdict(True, package)
    if gate is not None:
        set_to = f"{gate.source} sets the kubelet's feature gate {GATE} to {str(gate.enabled).lower()}"
        return _Verdict(gate.enabled, set_to)
    if version >= (1, 29, 0):
        if betas is not None and not betas.enabled:
            return _Verdict(False, f"{betas.source} sets the kubelet's feature gate AllBeta to false")
        return _Verdict(True, package)
    if version > (0, 0, 0):
        return _Verdict(False, f"{package}, and only from 1.29 on kubelets pass CDI device names on by themselves")
    if kubelet.state_file:
        return _Verdict(True, f"only kubelets from 1.33 on keep {kubelet.state_file}")
    return _Verdict(
        False,
        "the kubelet's version is not known: no package of it in /var/lib/dpkg/status, no allocated_pods_state or image_manager "
        f"in its directory, and nothing sets its feature gate {GATE}",
    )


def _runtime(evidence: NodeEvidence, cdi_dir: str) -> _Verdict:
    kubelet = evidence.kubelet
    if kubelet.endpoint:
        socket = kubelet.endpoint
        if socket not in SOCKETS:
            return _Verdict(
                False, f"{kubelet.endpoint_source} names a container runtime that is not known here: {socket}"
            )
    elif len(evidence.sockets) == 1:
        [socket] = evidence.sockets
        if socket not in SOCKETS:
            return _Verdict(False, f"nothing is known here of the container runtime at {socket}")
    elif evidence.sockets:
        found = " and ".join(evidence.sockets)
        return _Verdict(False, f"it is not known which container runtime the kubelet uses: {found} exist")
    else:
        return _Verdict(False, f"no container runtime is found: there is none of {', '.join(SOCKETS)}")
    judges: dict[str, Callable[[], _Verdict]] = {
        CRIO: lambda: _crio(evidence.crio, cdi_dir),
        CONTAINERD: lambda: _containerd(
            evidence.containerd.get(CONTAINERD, ContainerdEvidence()), evidence.containerd_package, cdi_dir
        ),
    }
    runtimes = SOCKETS[socket]
    if len(runtimes) == 1:
        return judges[runtimes[0]]()
    own = [runtime for runtime in runtimes if runtime in evidence.containerd]
    if len(own) != 1:
        which = "both" if own else "neither"
        return _Verdict(
            False, f"{which} of {' and '.join(runtimes)} have left a configuration of the containerd at {socket}"
        )
    return _containerd(evidence.containerd[own[0]], "", cdi_dir)


def _crio(crio: CrioEvidence, cdi_dir: str) -> _Verdict:
    if crio.faults:
        return _Verdict(False, crio.faults[0])
    if not crio.version:
        return _Verdict(False, "CRI-O's version is not known: neither /run/crio/version nor a package of it says")
    known = f"CRI-O is of version {crio.version} ({crio.version_source})"
    if _parsed(crio.version) < (1, 23, 2):
        return _Verdict(False, f"{known}, and takes CDI device names only from 1.23.2 on")
    dirs = DEFAULT_SPEC_DIRS if crio.spec_dirs is None else crio.spec_dirs
    if not _among(cdi_dir, dirs):
        return _Verdict(False, _elsewhere(crio.spec_dirs_source or "the default", dirs, cdi_dir))
    return _Verdict(True, known)


def _containerd(containerd: ContainerdEvidence, package: str, cdi_dir: str) -> _Verdict:
    if containerd.faults:
        return _Verdict(False, containerd.faults[0])
    if containerd.disabled:
        return _Verdict(
            False, f"{containerd.disabled} disables containerd's CRI plugin, so the kubelet must use another runtime"
        )
    newer = ""
    if containerd.version >= 3:
        newer = f"{containerd.file} is of version {containerd.version}, which is that of containerd 2"
    elif _parsed(package) >= (2, 0, 0):
        newer = f"containerd's package is of version {package}"
    if newer:
        fault = _newer(containerd.sections, cdi_dir)
        return _Verdict(not fault, fault or newer)
    known = f"containerd's package is of version {package}" if package else "containerd's version is not known"
    if (0, 0, 0) < _parsed(package) < (1, 7, 0):
        return _Verdict(False, f"{known}, and takes CDI device names only from 1.7 on")
    declared = _declared(containerd.sections)
    if not declared:
        if not containerd.file:
            return _Verdict(False, f"containerd has no configuration file that could be found, and {known}")
        return _Verdict(
            False, f"{containerd.file} does not set enable_cdi = true for containerd's CRI plugin, and {known}"
        )
    fault = _older(containerd.sections, cdi_dir)
    return _Verdict(not fault, fault or f"{declared[-1].source} sets enable_cdi = true for containerd")


def _declared(sections: Sequence[CriSection]) -> tuple[CriSection, ...]:
    return tuple(section for section in sections if not section.uncertain)


def _newer(sections: Sequence[CriSection], cdi_dir: str) -> str:
    """Why a containerd from 2.0 on does not take our names; empty where it does, whichever uncertain section it counts."""
    declared = _declared(sections)
    readings = (declared, *((*declared, section) for section in sections if section.uncertain))
    return next(filter(None, (_merged(reading, cdi_dir) for reading in readings)), "")


def _merged(sections: Sequence[CriSection], cdi_dir: str) -> str:
    """Why a containerd that merges the keys of these sections does not take our names; empty where it does."""
    said = [section for section in sections if section.enable_cdi is not None]
    if said and not said[-1].enable_cdi:
        return f"{said[-1].source} sets enable_cdi = false for containerd"
    placed = [section for section in sections if section.spec_dirs is not None]
    return _place(placed[-1] if placed else None, cdi_dir)


def _older(sections: Sequence[CriSection], cdi_dir: str) -> str:
    """Why a containerd that may be older than 2.0 does not take our names; empty where it does in either way of merging."""
    last = _declared(sections)[-1]
    if not last.enable_cdi:
        return (
            f"{last.source} does not set enable_cdi = true for containerd, which may be one before 2.0 and takes no CDI device "
            "names then"
        )
    return _place(last if last.spec_dirs is not None else None, cdi_dir) or _newer(sections, cdi_dir)


def _place(section: CriSection | None, cdi_dir: str) -> str:
    dirs = DEFAULT_SPEC_DIRS if section is None or section.spec_dirs is None else section.spec_dirs
    if _among(cdi_dir, dirs):
        return ""
    return _elsewhere("the default" if section is None else section.source, dirs, cdi_dir)


def _among(directory: str, dirs: Sequence[str]) -> bool:
    return any(same_directory(directory, each) for each in dirs)


def _elsewhere(source: str, dirs: Sequence[str], cdi_dir: str) -> str:
    return f"CDI specs are written to {cdi_dir} and the runtime looks for them in {', '.join(dirs) or 'no directory'} ({source})"
