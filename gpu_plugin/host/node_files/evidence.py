"""Everything that a node's files say of its kubelet and its container runtime. Blocks for as long as the disks do."""

import os
from collections.abc import Mapping
from pathlib import Path

from gpu_plugin.access.strategy_choice import OTHER_SOCKETS, SOCKETS, ContainerdEvidence, NodeEvidence
from gpu_plugin.config.settings import Settings
from gpu_plugin.host.node_files.kubelet import kubelet_evidence
from gpu_plugin.host.node_files.root import NodeFileError, NodeRoot, installed
from gpu_plugin.host.node_files.runtimes import CRIO_PACKAGE, FILES, containerd_evidence, crio_evidence

_CONTAINERD_PACKAGES = ("containerd.io", "containerd")  # Docker's, and the distributions'

_IN_CONTAINER = ("/.dockerenv", "/run/.containerenv")
"""Files that container engines leave in a container's root; in a pod the kubelet names the API server in the environment."""


def host_root(settings: Settings, environ: Mapping[str, str] = os.environ, here: Path = Path("/")) -> Path | None:
    """Where this process sees the root of the node's file system; None where it does not.

    That is where the driver root is mounted, if the driver root is the node's own root. Outside containers it is `here`, the
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
    """What is found under the root of the node, and in the kubelet's directory under `here`, this process's own root.

    Never raises for what stands in a file or does not.
    """
    node = NodeRoot(root)
    trouble = ""
    packages: Mapping[str, str] = {}
    sockets: tuple[str, ...] = ()
    try:
        packages = installed(node, ("kubelet", *_CONTAINERD_PACKAGES, CRIO_PACKAGE))
        sockets = tuple(path for path in (*SOCKETS, *OTHER_SOCKETS) if node.is_socket(path))
    except NodeFileError as error:
        trouble = str(error)
    containerd: dict[str, ContainerdEvidence] = {}
    for runtime in FILES:
        found = containerd_evidence(node, runtime)
        if found is not None:
            containerd[runtime] = found
    roots = [(node, kubelet_directory)]
    if root != here:
        roots.append((NodeRoot(here), kubelet_directory))
    return NodeEvidence(
        trouble=trouble,
        kubelet=kubelet_evidence(roots, packages.get("kubelet", "")),
        sockets=sockets,
        containerd=containerd,
        containerd_package=next((packages[name] for name in _CONTAINERD_PACKAGES if name in packages), ""),
        crio=crio_evidence(node, packages),
    )
