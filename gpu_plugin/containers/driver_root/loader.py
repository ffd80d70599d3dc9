"""The directories in which the dynamic loader of a driver root finds libraries. Every call blocks."""

from collections.abc import Iterator
from itertools import islice
from posixpath import dirname, normpath

from gpu_plugin.containers.driver_root import ld_cache
from gpu_plugin.containers.driver_root.tree import Tree
from gpu_plugin.containers.driver_root.wildcards import expand

_CACHE = "/etc/ld.so.cache"
_CONFIGURATION = "/etc/ld.so.conf"

_MAX_FILES = 64  # the most files, and the most patterns of files, that an ld.so.conf includes; distributions have 5
_MAX_CONFIGURATION_BYTES = 64 * 1024


def loader_directories(tree: Tree) -> tuple[str, ...]:
    """Return the loader's directories below the root of this tree, such as usr/lib64/nvidia, MAX_DIRECTORIES at most.

    They are the directories of all libraries in the root's ld.so.cache. If the cache cannot be read, they are the directories in
    its ld.so.conf and in the files that it includes. Links are followed within the root.
    """
    try:
        found = ld_cache.cached_directories(tree.read(_CACHE, ld_cache.MAX_BYTES))
    except (OSError, ValueError):
        found = tuple(_configured(tree))
    paths = dict.fromkeys(normpath(path).strip("/") for path in found if path.isprintable())
    return tuple(path for path in paths if path)[: ld_cache.MAX_DIRECTORIES]


def _configured(tree: Tree) -> Iterator[str]:
    """Yield the directories in ld.so.conf and in each included file. Each file is read once."""
    files, patterns = [_CONFIGURATION], set[str]()
    for file in files:  # the loop appends the files that each file includes
        try:
            found = ld_cache.configured(tree.read(file, _MAX_CONFIGURATION_BYTES))
        except (OSError, ValueError):
            continue
        yield from found.directories
        for pattern in found.includes:
            path = pattern if pattern.startswith("/") else f"{dirname(file)}/{pattern}"
            if path not in patterns and len(patterns) < _MAX_FILES:
                patterns.add(path)
                new = (match for match in expand(tree, path) if match not in files)
                files += list(islice(new, _MAX_FILES - len(files)))
