"""What a node's files say of its kubelet and of its container runtime, as far as that bears on CDI. Paths are the node's own."""

from collections.abc import Mapping

import msgspec

CONTAINERD = "containerd"
K3S = "k3s"
RKE2 = "RKE2"
CRIO = "CRI-O"
"""Container runtimes; k3s and RKE2 bring a containerd of their own."""


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
