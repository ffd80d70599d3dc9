"""What container runtimes' files say of CDI: those of containerd (containerd-config.toml(5)) and of CRI-O (crio.conf(5))."""

import json
import posixpath
from collections import deque
from collections.abc import Mapping
from typing import Any

from gpu_plugin.access.strategy_choice import CONTAINERD, K3S, RKE2, ContainerdEvidence, CrioEvidence, CriSection
from gpu_plugin.host.node_files.root import STATUS, NodeFileError, NodeRoot, inner, switch, table_of, texts

FILES = {
    CONTAINERD: "/etc/containerd/config.toml",
    K3S: "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    RKE2: "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
}

IMPLIED = "/etc/containerd/conf.d/*.toml"  # what newer releases import where the file names no imports

PLUGINS = {1: "cri", 2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
"""The CRI plugin, or the part of it that handles CDI, by the version of the configuration; later versions use the name of 3.

containerd 1.7 ignores the name of another version; 2.4 obeys it in a file of any version (`containerd config dump` shows that).
"""

MAX_FILES = 64  # the most files that one configuration may be made of


def containerd_evidence(root: NodeRoot, runtime: str) -> ContainerdEvidence | None:
    """What is found of this runtime's configuration; None where there is no file, and for containerd itself nothing imported.

    Never raises: what cannot be read is said.
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
    """Reads a file and what it imports, in the order in which they overrule each other."""

    def __init__(self, root: NodeRoot) -> None:
        self.sections: list[CriSection] = []
        self.version = 0
        self.disabled = ""
        self.imports = False
        self.implied = False
        self._root = root
        self._read: set[str] = set()

    def read(self, path: str, version: int) -> bool:
        """Reads a file, then its imports, then theirs, each once. `version` is that of the file that imports it.

        Returns whether the file is there. Raises NodeFileError.
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
                pending += self._take(each, table, version)
        return there

    def _take(self, path: str, table: dict[str, Any], version: int) -> list[tuple[str, int]]:
        """Takes note of what a file says. Returns the files that it imports, each with this one's version."""
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
"""Its version_file and, in older releases, version_file_persist: the version as JSON text (internal/version)."""

CRIO_PACKAGE = "cri-o"

CRIO_CONFIG = "/etc/crio/crio.conf"
CRIO_DROP_INS = "/etc/crio/crio.conf.d/*"
"""Read in the order of their names, each overruling those before (crio(8), --config-dir)."""

_CRIO_VERSION_BYTES = 4096


def crio_evidence(root: NodeRoot, packages: Mapping[str, str]) -> CrioEvidence:
    """Looks for them. `packages` has versions of installed packages. Never raises: what cannot be read is said."""
    try:
        version, source = _crio_version(root)
        if not version and CRIO_PACKAGE in packages:
            version, source = packages[CRIO_PACKAGE], STATUS
        dirs, said_by = None, ""
        for path in (CRIO_CONFIG, *root.matching(CRIO_DROP_INS)):
            found = texts(inner(table_of(root, path) or {}, path, "crio", "runtime"), path, "cdi_spec_dirs")
            if found is not None:
                dirs, said_by = found, path
    except NodeFileError as error:
        return CrioEvidence(faults=(str(error),))
    return CrioEvidence(version, source, dirs, said_by)


def _crio_version(root: NodeRoot) -> tuple[str, str]:
    for path in CRIO_VERSIONS:
        written = root.read(path, _CRIO_VERSION_BYTES)
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
