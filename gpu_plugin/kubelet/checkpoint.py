"""The kubelet's own record of which pod has which devices, beside its socket: a second witness to PodResources.

PodResources leaves out what plain init containers were given, and may be empty for a moment after the kubelet's start, or
not be mounted for us at all; the file has all of it, and may for a while hold on to pods that have ended (it is written at
the next allocation or list). Source: pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go.

Its checksum is made of Go's own rendering of its structures and is not looked at here: the file is replaced as a whole, and
what can be read of one that is damaged names devices that pods had.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

NAME = "kubelet_internal_checkpoint"

MAX_BYTES = 16 * 1024 * 1024
"""More than a node with 110 pods and tens of thousands of device ids has: 46 bytes for each id, healthy or given out, and the
answer for each container, some 1 KiB. Reading a file takes eleven times its size for a moment."""


Writing = tuple[int, int, int, int]
"""What tells one writing of the file from another: device, inode, time of the last change in nanoseconds, bytes."""


def entries(directory: Path) -> Mapping[tuple[str, str], frozenset[str]] | None:
    """The uids of the pods that each (resource, device id) was given to; None where the kubelet has not written that down.

    Blocks for as long as the disk does. A file that cannot be understood is no witness: None.
    """
    found = read(directory)
    return None if found is None else found[0]


def read(directory: Path) -> tuple[Mapping[tuple[str, str], frozenset[str]], Writing] | None:
    """The same, and which writing of the file it is of: a kubelet makes the file anew each time it writes."""
    try:
        descriptor = os.open(directory / NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            return None
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            return None
        writing = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        return _entries(msgspec.json.decode(content, type=_Checkpoint)), writing
    except (
        OSError,
        ValueError,
        RecursionError,
    ):  # msgspec's errors are ValueErrors, as is that of text that is no UTF-8
        return None
    finally:
        os.close(descriptor)


class _Entry(msgspec.Struct):
    """What one container has of one resource. Ids go by NUMA node since 1.20; before, they were one list."""

    PodUID: str
    ResourceName: str
    DeviceIDs: dict[str, list[str] | None] | list[str] | None = None


class _Data(msgspec.Struct):
    PodDeviceEntries: list[_Entry] | None


class _Checkpoint(msgspec.Struct):
    Data: _Data


def _entries(content: _Checkpoint) -> Mapping[tuple[str, str], frozenset[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for entry in content.Data.PodDeviceEntries or ():
        ids = entry.DeviceIDs or ()
        for some in ids.values() if isinstance(ids, dict) else [ids]:
            for identifier in some or ():
                found.setdefault((entry.ResourceName, identifier), set()).add(entry.PodUID)
    return {key: frozenset(uids) for key, uids in found.items()}
