"""Parses the two files that configure glibc's dynamic loader: ld.so.cache and ld.so.conf. Does no I/O.

Sources: glibc's sysdeps/generic/dl-cache.h and elf/cache.c for the cache, ldconfig(8) and elf/ldconfig.c for ld.so.conf.
"""

import os
import struct
from collections.abc import Iterator

import msgspec

MAX_BYTES = 8 * 1024 * 1024  # the most bytes of a cache; a workstation's cache of 5,000 libraries has 0.5 MiB
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


class Configured(msgspec.Struct, frozen=True):
    """The directories and the patterns of included files in one ld.so.conf, in their order."""

    directories: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()


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


def configured(content: bytes) -> Configured:
    """Return the directories and included files of an ld.so.conf. Other lines (hwcap, relative directories) are ignored."""
    directories: dict[str, None] = {}
    includes: dict[str, None] = {}
    for line in os.fsdecode(content).split("\n"):
        text = line.partition("#")[0].strip(_BLANK)
        word, *patterns = text.split()[:MAX_DIRECTORIES] or [""]
        if word == "include":
            includes |= dict.fromkeys(patterns)
        elif text.startswith("/"):
            directories[text.partition("=")[0].rstrip(_BLANK)] = None  # /usr/lib=libc5 names a directory and its type
    return Configured(tuple(directories)[:MAX_DIRECTORIES], tuple(includes)[:MAX_DIRECTORIES])
