"""The node's files, seen under the directory where its root is mounted for this process; TOML and dpkg's record among them.

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

MAX_MATCHES = 64  # the most files that one pattern stands for

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

_WILD = re.compile(r"[*?\[]")


class NodeFileError(Exception):
    """A file that is there and cannot be made use of; `str()` is a sentence that names it."""


class NodeRoot:
    """A directory that is the root of the node's file system. Links in it lead where they lead on the node, never out of it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def seen(self, path: str) -> Path | None:
        """Where this process finds a path of the node, links followed; None where nothing is there, or links go in circles.

        Raises NodeFileError if this process has no room for another open file.
        """
        try:
            found = resolve(str(self._root).rstrip("/"), f"{str(self._root).rstrip('/')}/{path.lstrip('/')}")
        except OSError as error:
            raise NodeFileError(_unreadable(path, error)) from None
        return None if found is None else Path(found)

    def matching(self, pattern: str) -> tuple[str, ...]:
        """Paths that a pattern stands for, in order: a file, or those whose last part matches (*, ?, []).

        Raises NodeFileError for more than `MAX_MATCHES`, for a pattern whose directory has such signs, and for a directory that
        cannot be read.
        """
        directory, _, name = pattern.rpartition("/")
        if _WILD.search(directory):
            raise NodeFileError(f"{pattern} is a pattern of directories, and only those of files are followed")
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
            raise NodeFileError(f"{pattern} stands for {len(matches)} files, and up to {MAX_MATCHES} are read")
        return matches

    def read(self, path: str, limit: int) -> bytes | None:
        """What a regular file of up to `limit` bytes holds; None where there is none. Raises NodeFileError for anything else."""
        with self.opened(path) as file:
            return None if file is None else content(file, limit)

    @contextmanager
    def opened(self, path: str) -> Iterator[BinaryIO | None]:
        """A regular file, open; None where there is none. Raises NodeFileError, also for what fails while it is read."""
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
        """The st_mode of what is at this path; 0 where nothing is. Raises NodeFileError where that cannot be told."""
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
"""The most dots in a line outside its strings: a key of many parts takes memory by the square of their number to read."""

_APART = re.compile(rb""" "(?:[^"\\\n]|\\.)*"? | '[^'\n]*'? | \#.* """, re.VERBOSE)
"""Strings and comments, whose dots part no key. An unclosed string ends with its line here, which keeps the search linear."""


def table_of(root: NodeRoot, path: str) -> dict[str, Any] | None:
    """What a TOML file holds; None where there is none. Raises NodeFileError for one that cannot be read or is no TOML."""
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
    """The table under these keys; empty where there is none. Raises NodeFileError where something else stands there."""
    for at, key in enumerate(keys):
        found = table.get(key, {})
        if not isinstance(found, dict):
            raise NodeFileError(f"{path}: {'.'.join(keys[: at + 1])} is not a table")
        table = found
    return table


def switch(table: dict[str, Any], path: str, key: str) -> bool | None:
    """True or false; None where nothing is said. Raises NodeFileError for anything else."""
    found = table.get(key)
    if found is not None and not isinstance(found, bool):
        raise NodeFileError(f"{path}: {key} is neither true nor false")
    return found


def texts(table: dict[str, Any], path: str, key: str) -> tuple[str, ...] | None:
    """A list of texts; None where there is none. Raises NodeFileError for anything else."""
    found = table.get(key)
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise NodeFileError(f"{path}: {key} is not a list of strings")
    return tuple(found)


STATUS = "/var/lib/dpkg/status"

MAX_RECORD_BYTES = 64 * 1024 * 1024  # ten times what a node with thousands of packages has

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
            if size > MAX_RECORD_BYTES:
                raise NodeFileError(f"{STATUS} is longer than the {MAX_RECORD_BYTES} bytes that are read of it")
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
