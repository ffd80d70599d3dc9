"""What is found of CRI-O: the version that it writes down when it starts, and where it looks for CDI specs (crio.conf(5))."""

import json
from collections.abc import Mapping

from gpu_plugin.access.node_evidence import CrioEvidence
from gpu_plugin.host.node_files.packages import STATUS
from gpu_plugin.host.node_files.root import NodeFileError, NodeRoot
from gpu_plugin.host.node_files.toml import inner, table_of, texts

VERSIONS = ("/run/crio/version", "/var/lib/crio/version")
"""Its version_file and, in older releases, version_file_persist: the version as JSON text (internal/version)."""

PACKAGE = "cri-o"

CONFIG = "/etc/crio/crio.conf"
DROP_INS = "/etc/crio/crio.conf.d/*"
"""Read in the order of their names, each overruling those before (crio(8), --config-dir)."""

_VERSION_BYTES = 4096


def crio_evidence(root: NodeRoot, packages: Mapping[str, str]) -> CrioEvidence:
    """Looks for them. `packages` has versions of installed packages. Never raises: what cannot be read is said."""
    try:
        version, source = _version(root)
        if not version and PACKAGE in packages:
            version, source = packages[PACKAGE], STATUS
        dirs, said_by = None, ""
        for path in (CONFIG, *root.matching(DROP_INS)):
            found = texts(inner(table_of(root, path) or {}, path, "crio", "runtime"), path, "cdi_spec_dirs")
            if found is not None:
                dirs, said_by = found, path
    except NodeFileError as error:
        return CrioEvidence(faults=(str(error),))
    return CrioEvidence(version, source, dirs, said_by)


def _version(root: NodeRoot) -> tuple[str, str]:
    for path in VERSIONS:
        written = root.read(path, _VERSION_BYTES)
        if written is None:
            continue
        try:
            version = json.loads(written)
        except (ValueError, RecursionError):
            version = None
        if not isinstance(version, str):
            raise NodeFileError(f"{path} holds no version of CRI-O")
        return version, path
    return "", ""
