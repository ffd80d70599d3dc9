"""Paths with wildcards below a driver root. Every call blocks."""

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import islice

from gpu_plugin.containers.driver_root.tree import Tree

MAX_MATCHES = 1_000  # the most paths that match a path with wildcards

_WILD = frozenset("*?[")


def expand(tree: Tree, pattern: str) -> Iterator[str]:
    """Yield the paths below the root of this tree that match `pattern`, in order. A path without wildcards matches itself."""
    if _WILD.isdisjoint(pattern):
        yield pattern
        return
    found = [""]
    for part in pattern.split("/")[1:]:
        if _WILD.isdisjoint(part):
            found = [f"{base}/{part}" for base in found]
        else:
            found = list(
                islice((f"{base}/{name}" for base in found for name in _matching(tree, base, part)), MAX_MATCHES)
            )
    yield from found


def _matching(tree: Tree, directory: str, pattern: str) -> Iterator[str]:
    path = tree.directory(directory)
    try:
        names = sorted(os.listdir(path or "/")) if path is not None else []  # noqa: PTH208
    except OSError:
        return  # not a directory, or it cannot be read
    yield from (
        name for name in names if fnmatchcase(name, pattern) and name.startswith(".") == pattern.startswith(".")
    )
