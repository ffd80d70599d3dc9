"""TOML files of the node as plain tables."""

import re
import tomllib
from typing import Any

from gpu_plugin.host.node_files.root import NodeFileError, NodeRoot

MAX_BYTES = 1024 * 1024

MAX_DOTS = 64
"""The most dots in a line outside its strings: a key of many parts takes memory by the square of their number to read."""

_APART = re.compile(rb""" "(?:[^"\\\n]|\\.)*"? | '[^'\n]*'? | \#.* """, re.VERBOSE)
"""Strings and comments, whose dots part no key. An unclosed string ends with its line here, which keeps the search linear."""


def table_of(root: NodeRoot, path: str) -> dict[str, Any] | None:
    """What a TOML file holds; None where there is none. Raises NodeFileError for one that cannot be read or is no TOML."""
    written = root.read(path, MAX_BYTES)
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
