"""The directories in which the dynamic loader of a driver root finds libraries. Every call blocks."""

from collections.abc import Iterator
from itertools import islice
from posixpath import dirname, normpath

from gpu_plugin.containers.cdi.host_files import Kind
from gpu_plugin.containers.driver_root import ld_cache
from gpu_plugin.containers.driver_root.tree import Tree
from gpu_plugin.containers.driver_root.wildcards import expand
from gpu_plugin.runtime.regular_file import open_file

_CACHE = "/etc/ld.so.cache"
_CONFIGURATION = "/etc/ld.so.conf"

_MAX_FILES = (
    64  # the most files, and the most patterns of files, that an ld.so.conf includes; distributions have some 5
)
_MAX_CONFIGURATION_BYTES = 64 * 1024


def loader_directories(tree: Tree) -> tuple[str, ...]:
    """Return the loader's directories below the root of this tree, such as usr/lib64/nvidia, MAX_DIRECTORIES at most.

    They are the directories of all libraries in the root's ld.so.cache. If the cache cannot be read, they are the directories in
    its ld.so.conf and in the files that it includes. Links are followed within the root.
    """
    try:
        found = ld_cache.cached_directories(_content(tree, _CACHE, ld_cache.MAX_BYTES))
    except (OSError, ValueError):
        found = tuple(_configured(tree))
    paths = dict.fromkeys(normpath(path).strip("/") for path in found if path.isprintable())
    return tuple(path for path in paths if path)[: ld_cache.MAX_DIRECTORIES]


def _configured(tree: Tree) -> Iterator[str]:
    """Yield the directories in ld.so.conf and in each included file. Each file is read once."""
    files, patterns = [_CONFIGURATION], set[str]()
    for file in files:  # the loop appends the files that each file includes
        try:
            found = ld_cache.configured(_content(tree, file, _MAX_CONFIGURATION_BYTES))
        except (OSError, ValueError):
            continue
        yield from found.directories
        for pattern in found.includes:
            path = pattern if pattern.startswith("/") else f"{dirname(file)}/{pattern}"
            if path not in patterns and len(patterns) < _MAX_FILES:
                patterns.add(path)
                new = (match for match in expand(tree, path) if match not in files)
                files += list(islice(new, _MAX_FILES - len(files)))


def _content(tree: Tree, path: str, most: int) -> bytes:
    """Read a safe file below the root. `Tree.changed` reports a later change. Raises OSError and ValueError."""
    seen = tree.look_for(path)
    if seen.fault or seen.kind is Kind.MISSING:
        raise ValueError(seen.fault or "it does not exist")
    file = tree.root + seen.target
    tree.watch(file)
    with open_file(file) as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content
