"""Reads the node's files, including TOML and dpkg's status file, below the directory at which the node's root is mounted.

Every call blocks for as long as the disk does.
"""

import errno
import fnmatch
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from gpu_plugin.containers.driver_root.inside import resolve
from gpu_plugin.runtime.regular_file import UnfitFileError, content, open_file

MAX_MATCHES = 64  # the most files that may match a pattern

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

_WILD = re.compile(r"[*?\[]")


class NodeFileError(Exception):
    """A file exists and cannot be used. `str()` is a sentence that names it."""


class NodeRoot:
    """The mount point of the node's root file system. Links are followed as on the node, and never out of this directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def seen(self, path: str) -> Path | None:
        """Return the path in this process of a path of the node, without links; None if it is missing or links form a circle.

        Raises NodeFileError if this process cannot open another file.
        """
        try:
            found = resolve(str(self._root).rstrip("/"), f"{str(self._root).rstrip('/')}/{path.lstrip('/')}")
        except OSError as error:
            raise NodeFileError(_unreadable(path, error)) from None
        return None if found is None else Path(found)

    def matching(self, pattern: str) -> tuple[str, ...]:
        """Return the existing paths that match a pattern, in order. Only the last part may have wildcards (*, ?, []).

        Raises NodeFileError for more than `MAX_MATCHES` paths, for wildcards in the directory, and for a directory that cannot be
        read.
        """
        directory, _, name = pattern.rpartition("/")
        if _WILD.search(directory):
            raise NodeFileError(
                f"{pattern} has wildcards in its directory, and they are supported only in the file name"
            )
        if not _WILD.search(name):
            return (pattern,) if self.seen(pattern) is not None else ()
        found = self.seen(directory or "/")
        try:
            names = sorted(os.listdir(found)) if found is not None else []  # noqa: PTH208 - names alone
        except OSError as error:
            if error.errno in _ABSENT:
                return ()
            raise NodeFileError(_unreadable(directory, error)) from None
        matches = tuple(f"{directory}/{each}" for each in names if fnmatch.fnmatchcase(each, name))
        if len(matches) > MAX_MATCHES:
            raise NodeFileError(f"{pattern} matches {len(matches)} files, and up to {MAX_MATCHES} are read")
        return matches

    def read(self, path: str, limit: int) -> bytes | None:
        """Read a regular file of up to `limit` bytes; None if it does not exist. Raises NodeFileError for any other file."""
        with self.opened(path) as file:
            return None if file is None else content(file, limit)

    @contextmanager
    def opened(self, path: str) -> Iterator[BinaryIO | None]:
        """Open a regular file; None if it does not exist. Raises NodeFileError, also for errors while it is read."""
        found = self.seen(path)
        try:
            if found is None:
                yield None
                return
            with open_file(found, links=False) as file:
                yield file
        except UnfitFileError as error:
            raise NodeFileError(f"{path} {error.strerror}") from None
        except OSError as error:
            raise NodeFileError(_unreadable(path, error)) from None

    def mode(self, path: str) -> int:
        """Return st_mode of the file at this path; 0 if it does not exist. Raises NodeFileError for other errors."""
        found = self.seen(path)
        try:
            return 0 if found is None else found.stat().st_mode
        except OSError as error:
            if error.errno in _ABSENT:
                return 0
            raise NodeFileError(_unreadable(path, error)) from None


def _unreadable(path: str, error: OSError) -> str:
    return f"{path} cannot be read: {error.strerror or error}"


MAX_TOML_BYTES = 1024 * 1024

MAX_DOTS = 64
"""The most dots in a line outside its strings. The memory for parsing a key grows with the square of the number of its parts."""

_APART = re.compile(rb""" "(?:[^"\\\n]|\\.)*"? | '[^'\n]*'? | \#.* """, re.VERBOSE)
"""Strings and comments, whose dots do not belong to a key. An unclosed string ends with its line, which keeps the search
linear."""


def table_of(root: NodeRoot, path: str) -> dict[str, Any] | None:
    """Read a TOML file; None if it does not exist. Raises NodeFileError if it cannot be read or is not TOML."""
    written = root.read(path, MAX_TOML_BYTES)
    if written is None:
        return None
    if any(line.count(b".") > MAX_DOTS for line in _APART.sub(b"", written).split(b"\n")):
        raise NodeFileError(f"{path} has a line with more than {MAX_DOTS} dots, and is not read")
    try:
        return tomllib.loads(written.decode())
    except (ValueError, RecursionError) as error:
        raise NodeFileError(f"{path} is not valid TOML: {error}") from None


def inner(table: dict[str, Any], path: str, *keys: str) -> dict[str, Any]:
    """Return the table under these keys; empty if there is no value. Raises NodeFileError for any other value."""
    for at, key in enumerate(keys):
        found = table.get(key, {})
        if not isinstance(found, dict):
            raise NodeFileError(f"{path}: {'.'.join(keys[: at + 1])} is not a table")
        table = found
    return table


def switch(table: dict[str, Any], path: str, key: str) -> bool | None:
    """Return true or false; None if the key is missing. Raises NodeFileError for any other value."""
    found = table.get(key)
    if found is not None and not isinstance(found, bool):
        raise NodeFileError(f"{path}: {key} is neither true nor false")
    return found


def texts(table: dict[str, Any], path: str, key: str) -> tuple[str, ...] | None:
    """Return a list of texts; None if the key is missing. Raises NodeFileError for any other value."""
    found = table.get(key)
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise NodeFileError(f"{path}: {key} is not a list of strings")
    return tuple(found)


STATUS = "/var/lib/dpkg/status"

MAX_RECORD_BYTES = 64 * 1024 * 1024  # ten times the size on a node with thousands of packages

_LINE = 64 * 1024


def installed(root: NodeRoot, names: Collection[str]) -> Mapping[str, str]:
    """Return the versions of the installed packages among `names`; empty if the node's distribution has no dpkg.

    Raises NodeFileError if dpkg's status file exists and cannot be read completely.
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
            if size > MAX_RECORD_BYTES:
                raise NodeFileError(f"{STATUS} is longer than {MAX_RECORD_BYTES} bytes, the most that are read")
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
