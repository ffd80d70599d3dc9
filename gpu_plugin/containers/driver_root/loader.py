"""The directories in which the dynamic loader of a driver root finds libraries: from its ld.so.cache, or else its ld.so.conf.

Sources: glibc's sysdeps/generic/dl-cache.h and elf/cache.c for the cache, ldconfig(8) and elf/ldconfig.c for ld.so.conf.
"""

import os
import struct
from collections.abc import Iterator
from itertools import islice
from posixpath import dirname, normpath

from gpu_plugin.containers.driver_root.tree import Tree

_CACHE = "/etc/ld.so.cache"
_CONFIGURATION = "/etc/ld.so.conf"

_MAX_FILES = 64  # the most files, and the most patterns of files, that an ld.so.conf includes; distributions have 5
_MAX_CONFIGURATION_BYTES = 64 * 1024
_MAX_CACHE_BYTES = 8 * 1024 * 1024  # the most bytes of a cache; a workstation's cache of 5,000 libraries has 0.5 MiB
MAX_DIRECTORIES = 256  # the most directories of a cache, or of all files of an ld.so.conf; distributions have some 10

_OLD_MAGIC = b"ld.so-1.7.0\0"
_NEW_MAGIC = b"glibc-ld.so.cache1.1"
_COUNT = struct.Struct("<I")
# Only the offset of the path is read from each entry. Flags and the offset of the name come before it. In the newer format, the
# version of the system and hardware capabilities come after it.
_OLD_ENTRY = struct.Struct("<8xI")
_NEW_ENTRY = struct.Struct("<8xI12x")
_NEW_HEADER = 48  # bytes: magic, number of entries, length of the names, flags, and reserved space
_ALIGNMENT = 8  # of the new header, after the old one

_SLASH = ord("/")
_BLANK = " \t\r\f\v"


def loader_directories(tree: Tree) -> tuple[str, ...]:
    """Return the loader's directories below the root of this tree, such as usr/lib64/nvidia, MAX_DIRECTORIES at most.

    They are the directories of all libraries in the root's ld.so.cache. If the cache cannot be read, they are the directories in
    its ld.so.conf and in the files that it includes. Links are followed within the root.
    """
    try:
        found = cached_directories(tree.read(_CACHE, _MAX_CACHE_BYTES))
    except (OSError, ValueError):
        found = tuple(_configured(tree))
    paths = dict.fromkeys(normpath(path).strip("/") for path in found if path.isprintable())
    return tuple(path for path in paths if path)[:MAX_DIRECTORIES]


def _configured(tree: Tree) -> Iterator[str]:
    """Yield the directories in ld.so.conf and in each included file. Each file is read once."""
    files, patterns = [_CONFIGURATION], set[str]()
    for file in files:  # the loop appends the files that each file includes
        try:
            directories, includes = _parsed(tree.read(file, _MAX_CONFIGURATION_BYTES))
        except (OSError, ValueError):
            continue
        yield from directories
        for pattern in includes:
            path = pattern if pattern.startswith("/") else f"{dirname(file)}/{pattern}"
            if path not in patterns and len(patterns) < _MAX_FILES:
                patterns.add(path)
                new = (match for match in tree.expand(path) if match not in files)
                files += list(islice(new, _MAX_FILES - len(files)))


def cached_directories(content: bytes) -> tuple[str, ...]:
    """Return the absolute directories of all libraries in an ld.so.cache, without duplicates, MAX_DIRECTORIES at most.

    Entries whose path is outside of the file or not absolute are left out. Only little-endian caches are read, since NVIDIA has
    no driver for other processors. Raises ValueError with the reason if the content is not a cache.
    """
    found: dict[bytes, None] = {}
    for directory in _directories(content):
        found[directory] = None
        if len(found) == MAX_DIRECTORIES:
            break
    # A cache may have hundreds of thousands of paths, so only their different directories are decoded.
    return tuple(os.fsdecode(directory) or "/" for directory in found)


def _directories(content: bytes) -> Iterator[bytes]:
    start = 0
    if content.startswith(_OLD_MAGIC):
        entries = len(_OLD_MAGIC) + _COUNT.size
        names = entries + _count(content, len(_OLD_MAGIC)) * _OLD_ENTRY.size
        if names > len(content):
            raise ValueError("it ends within its table of libraries")
        start = (names + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        if not content.startswith(_NEW_MAGIC, start):
            return _named(content, _OLD_ENTRY, entries, names, names)
    if not content.startswith(_NEW_MAGIC, start):
        raise ValueError("it does not begin like a cache of the dynamic loader")
    entries = start + _NEW_HEADER
    end = entries + _count(content, start + len(_NEW_MAGIC)) * _NEW_ENTRY.size
    if end > len(content):
        raise ValueError("it ends within its table of libraries")
    return _named(content, _NEW_ENTRY, entries, end, start)


def _count(content: bytes, at: int) -> int:
    if at + _COUNT.size > len(content):
        raise ValueError("it ends within its header")
    count: int = _COUNT.unpack_from(content, at)[0]
    return count


def _named(content: bytes, entry: struct.Struct, start: int, end: int, names: int) -> Iterator[bytes]:
    """Yield the directory of each entry between two offsets; empty for /. Offsets of paths count from `names`."""
    for at in dict.fromkeys(names + at for (at,) in entry.iter_unpack(content[start:end])):
        # PATH_MAX includes the NUL. Without this limit, entries that all point to one long text would take minutes.
        stop = content.find(b"\0", at, at + 4096)
        if stop != -1 and content[at] == _SLASH:
            yield content[at : content.rfind(b"/", at, stop)]


def _parsed(content: bytes) -> tuple[list[str], list[str]]:
    """Return the directories and the patterns of included files in an ld.so.conf. Other lines are ignored."""
    directories: dict[str, None] = {}
    includes: dict[str, None] = {}
    for line in os.fsdecode(content).split("\n"):
        text = line.partition("#")[0].strip(_BLANK)
        word, *patterns = text.split()[:MAX_DIRECTORIES] or [""]
        if word == "include":
            includes |= dict.fromkeys(patterns)
        elif text.startswith("/"):
            directories[text.partition("=")[0].rstrip(_BLANK)] = None  # /usr/lib=libc5 names a directory and its type
    return list(directories)[:MAX_DIRECTORIES], list(includes)[:MAX_DIRECTORIES]
