"""Versions of installed packages, from dpkg's own record of them (dpkg-query(1), deb822(5))."""

from collections.abc import Collection, Mapping

from gpu_plugin.host.node_files.root import NodeFileError, NodeRoot

STATUS = "/var/lib/dpkg/status"

MAX_BYTES = 64 * 1024 * 1024
"""Ten times what a node with thousands of packages has."""

_LINE = 64 * 1024


def installed(root: NodeRoot, names: Collection[str]) -> Mapping[str, str]:
    """The versions of those of these packages that are installed; empty where the node's distribution has no dpkg.

    Raises NodeFileError where the record is there and cannot be read whole.
    """
    found: dict[str, str] = {}
    wanted = {name.encode(): name for name in names}
    with root.opened(STATUS) as file:
        if file is None:
            return found
        name = version = ""
        there, size = False, 0
        while True:
            line = file.readline(_LINE)
            size += len(line)
            if size > MAX_BYTES:
                raise NodeFileError(f"{STATUS} is longer than the {MAX_BYTES} bytes that are read of it")
            if line.startswith(b"Package:"):
                name = wanted.get(line[8:].strip(), "")
                version, there = "", False
            elif name and line.startswith(b"Status:"):
                there = line.split()[-1] == b"installed"
            elif name and line.startswith(b"Version:"):
                version = line[8:].strip().decode(errors="replace")
            elif not line.strip():
                if name and there and version:
                    found[name] = version
                name = ""
                if not line:
                    return found
