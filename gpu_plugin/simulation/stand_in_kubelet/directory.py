"""What a kubelet does in its device plugin directory besides listening: it removes sockets, and writes a checkpoint.

Sources: pkg/kubelet/cm/devicemanager/manager.go (CleanupPluginDirectory, writeCheckpoint, readCheckpoint) and
checkpoint/checkpoint.go.
"""

import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from gpu_plugin.runtime.atomic import replace_file

CHECKPOINT = "kubelet_internal_checkpoint"


class Entry(msgspec.Struct, frozen=True):
    """What one container of a pod has of one resource: ids by NUMA node (-1: none known), and the plugin's answer, encoded."""

    uid: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    ids: Mapping[int, Sequence[str]] = msgspec.field(name="DeviceIDs")
    answer: bytes = msgspec.field(name="AllocResp")


class _Data(msgspec.Struct, frozen=True, rename={"entries": "PodDeviceEntries", "registered": "RegisteredDevices"}):
    entries: Sequence[Entry] | None
    registered: Mapping[str, Sequence[str]]


class _Checkpoint(msgspec.Struct, frozen=True, rename="pascal"):
    data: _Data
    checksum: int


def write_checkpoint(directory: Path, entries: Iterable[Entry], registered: Mapping[str, Collection[str]]) -> None:
    """Writes the file by renaming: what pods have, and the healthy device ids of each resource.

    The form is that of 1.20 and later (checkpoint/checkpoint.go: PodDevicesEntry, checkpointData, Data). A kubelet's checksum
    is FNV-1a, 32 bits, of Go's rendering of its structures; here it is that of the data as JSON.
    """
    data = _Data(list(entries) or None, {name: sorted(ids) for name, ids in registered.items()})
    content = msgspec.json.encode(_Checkpoint(data, _checksum(data)))
    replace_file(directory / CHECKPOINT, content, 0o600)


def read_checkpoint(directory: Path) -> tuple[Sequence[Entry], list[str]]:
    """What pods have, and which resources there were. A file that is damaged or missing is an empty one, as to a kubelet."""
    try:
        content = msgspec.json.decode((directory / CHECKPOINT).read_bytes(), type=_Checkpoint)
    except (OSError, ValueError):
        return [], []
    if content.checksum != _checksum(content.data):
        return [], []
    return content.data.entries or [], list(content.data.registered)


def _checksum(data: _Data) -> int:
    value = 0x811C9DC5
    for byte in msgspec.json.encode(data):
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value


def clean(directory: Path) -> None:
    """Removes the sockets directly in `directory`, also through links; files, pipes and folders stay."""
    for entry in list(directory.iterdir()):
        try:
            is_socket = stat.S_ISSOCK(entry.stat().st_mode)
        except OSError:  # a link to nowhere, or gone meanwhile: neither is a socket
            continue
        if is_socket:
            entry.unlink(missing_ok=True)
