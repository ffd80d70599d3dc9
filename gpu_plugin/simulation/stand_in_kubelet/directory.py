"""What a kubelet does in its device plugin directory besides listening: it removes sockets, and writes a checkpoint.

Sources: pkg/kubelet/cm/devicemanager/manager.go (CleanupPluginDirectory, writeCheckpoint, readCheckpoint) and
checkpoint/checkpoint.go.
"""

import base64
import json
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

CHECKPOINT = "kubelet_internal_checkpoint"


class Entry(msgspec.Struct, frozen=True):
    """What one container of a pod has of one resource: ids by NUMA node (-1: none known), and the plugin's answer, encoded."""

    uid: str
    container: str
    resource: str
    ids: Mapping[int, Sequence[str]]
    answer: bytes = b""


def write_checkpoint(directory: Path, entries: Iterable[Entry], registered: Mapping[str, Collection[str]]) -> None:
    """Writes the file by renaming: what pods have, and the healthy device ids of each resource.

    The form is that of 1.20 and later (checkpoint/checkpoint.go: PodDevicesEntry, checkpointData, Data). A kubelet's checksum
    is FNV-1a, 32 bits, of Go's rendering of its structures; here it is that of the data as JSON.
    """
    data = {
        "PodDeviceEntries": [
            {
                "PodUID": entry.uid,
                "ContainerName": entry.container,
                "ResourceName": entry.resource,
                "DeviceIDs": {str(node): list(ids) for node, ids in entry.ids.items()},
                "AllocResp": base64.b64encode(entry.answer).decode(),
            }
            for entry in entries
        ]
        or None,
        "RegisteredDevices": {name: sorted(ids) for name, ids in registered.items()},
    }
    fresh = directory / f".{CHECKPOINT}"
    fresh.touch(mode=0o600)
    fresh.write_text(json.dumps({"Data": data, "Checksum": _checksum(data)}))
    fresh.replace(directory / CHECKPOINT)


def read_checkpoint(directory: Path) -> tuple[list[Entry], list[str]]:
    """What pods have, and which resources there were. A file that is damaged or missing is an empty one, as to a kubelet."""
    try:
        content = json.loads((directory / CHECKPOINT).read_bytes())
        data = content["Data"]
        if content["Checksum"] != _checksum(data):
            return [], []
        entries = [
            Entry(
                each["PodUID"],
                each["ContainerName"],
                each["ResourceName"],
                {int(node): tuple(ids) for node, ids in each["DeviceIDs"].items()},
                base64.b64decode(each["AllocResp"]),
            )
            for each in data["PodDeviceEntries"] or ()
        ]
        return entries, list(data["RegisteredDevices"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [], []


def _checksum(data: Any) -> int:
    value = 0x811C9DC5
    for byte in json.dumps(data, sort_keys=True).encode():
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
