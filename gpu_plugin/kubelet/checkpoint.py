"""Read the kubelet's checkpoint, its own record of the devices of each pod, in the directory of its socket.

The file supplements PodResources, which omits the devices of plain init containers, may be empty for a moment after the
kubelet's start, and may not be mounted for us. The file has all devices. It may keep pods that have ended for a while, because
the kubelet writes it only at the next allocation or list.
Source: pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go.

The checksum is computed from Go's own rendering of the structures, and is not checked here: the kubelet replaces the file as a
whole, and a damaged file that can be read still names devices that pods had.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gpu_plugin.runtime.printable import excerpt
from gpu_plugin.runtime.regular_file import UnfitFileError, content, open_file

NAME = "kubelet_internal_checkpoint"

# The largest accepted file: more than a node with 110 pods and tens of thousands of device ids needs. Each id takes 46 bytes,
# once if it is healthy and once if a pod has it, and the answer for each container takes about 1 KiB. Reading the file takes
# eleven times its size for a moment.
MAX_BYTES = 16 * 1024 * 1024

# Identifies one version of the file: device, inode, time of the last change in nanoseconds, and size in bytes.
Writing = tuple[int, int, int, int]


class CheckpointError(Exception):
    """The file does not exist, cannot be read, or is not in the kubelet's format. The text has the reason."""


class NoCheckpointError(CheckpointError):
    """The file does not exist. Before its first allocation, a kubelet may not have written it."""


def read(directory: Path) -> tuple[Mapping[tuple[str, str], frozenset[str]], Writing]:
    """Return the uids of the pods that have each (resource, device id), and the version of the file.

    A kubelet makes a new file for each version. Blocks for as long as the disk does.

    Raises:
        NoCheckpointError: the file does not exist.
        CheckpointError: the file cannot be read, or is not in the kubelet's format.
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
    except (ValueError, RecursionError) as error:  # msgspec's errors, and invalid UTF-8
        raise CheckpointError(f"it is not in the kubelet's format: {excerpt(str(error))}") from None


class _Entry(msgspec.Struct):
    """The devices of one resource in one container: ids by NUMA node since Kubernetes 1.20, and one list of ids before."""

    PodUID: str
    ResourceName: str
    DeviceIDs: dict[str, list[str] | None] | list[str] | None = None


class _Data(msgspec.Struct):
    PodDeviceEntries: list[_Entry] | None


class _Checkpoint(msgspec.Struct):
    Data: _Data


def _entries(content: _Checkpoint) -> Mapping[tuple[str, str], frozenset[str]]:
    """Return the uids of pods by resource and device id.

    The devices of an entry share one set: with a set for each of tens of thousands of ids, the interpreter would search them
    for cycles, which stops every thread.
    """
    found: dict[tuple[str, str], frozenset[str]] = {}
    for entry in content.Data.PodDeviceEntries or ():
        ids, uids = entry.DeviceIDs or (), frozenset({entry.PodUID})
        for some in ids.values() if isinstance(ids, dict) else [ids]:
            for identifier in some or ():
                key = (entry.ResourceName, identifier)
                found[key] = found[key] | uids if key in found else uids
    return found
