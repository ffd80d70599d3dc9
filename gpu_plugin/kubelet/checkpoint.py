"""The kubelet's own record of which pod has which devices, beside its socket: a second witness to PodResources.

PodResources leaves out what plain init containers were given, and may be empty for a moment after the kubelet's start, or
not be mounted for us at all; the file has all of it, and may for a while hold on to pods that have ended (it is written at
the next allocation or list). Source: pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go.

Its checksum is made of Go's own rendering of its structures and is not looked at here: the file is replaced as a whole, and
what can be read of one that is damaged names devices that pods had.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gpu_plugin.runtime.printable import excerpt
from gpu_plugin.runtime.regular_file import UnfitFileError, content, open_file

NAME = "kubelet_internal_checkpoint"

MAX_BYTES = 16 * 1024 * 1024
"""More than a node with 110 pods and tens of thousands of device ids has: 46 bytes for each id, healthy or given out, and the
answer for each container, some 1 KiB. Reading a file takes eleven times its size for a moment."""

Writing = tuple[int, int, int, int]
"""What tells one writing of the file from another: device, inode, time of the last change in nanoseconds, bytes."""


class CheckpointError(Exception):
    """The file is no witness: it is not there, cannot be read, or cannot be understood. The text says why."""


class NoCheckpointError(CheckpointError):
    """The kubelet's checkpoint is not there: a kubelet that has given nothing away may not have written it yet."""


def read(directory: Path) -> tuple[Mapping[tuple[str, str], frozenset[str]], Writing]:
    """The uids of the pods that each (resource, device id) was given to, and which writing of the file says so.

    A kubelet makes a new file each time it writes. Blocks for as long as the disk does.

    Raises:
        CheckpointError: the file is no witness.
    """
    try:
        with open_file(directory / NAME, links=False) as file:
            status = os.fstat(file.fileno())
            written = content(file, MAX_BYTES)
        writing = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        return _entries(msgspec.json.decode(written, type=_Checkpoint)), writing
    except FileNotFoundError as error:
        raise NoCheckpointError(error.strerror or str(error)) from None
    except UnfitFileError as error:
        raise CheckpointError(f"it {error.strerror}") from None
    except OSError as error:
        raise CheckpointError(error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors, as is that of text that is no UTF-8
        raise CheckpointError(f"it is not as kubelets write it: {excerpt(str(error))}") from None


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
    """The uids of pods by resource and device id.

    What one pod has shares one set: a set for each of tens of thousands of ids has the interpreter look for cycles among them,
    which holds every thread up.
    """
    found: dict[tuple[str, str], frozenset[str]] = {}
    for entry in content.Data.PodDeviceEntries or ():
        ids, uids = entry.DeviceIDs or (), frozenset({entry.PodUID})
        for some in ids.values() if isinstance(ids, dict) else [ids]:
            for identifier in some or ():
                key = (entry.ResourceName, identifier)
                found[key] = found[key] | uids if key in found else uids
    return found
