"""A kubelet's work on files of its device plugin directory: it removes sockets and writes a checkpoint.

Sources: pkg/kubelet/cm/devicemanager/manager.go (CleanupPluginDirectory, writeCheckpoint, readCheckpoint) and
checkpoint/checkpoint.go.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from demo.stand_in_kubelet.admission import PodAdmission
from demo.stand_in_kubelet.device_table import ResourceState
from demo.stand_in_kubelet.journal import EventKind, Journal
from demo.stand_in_kubelet.pod_resources import PodResourcesService, listing
from demo.stand_in_kubelet.pods import Entry

CHECKPOINT = "kubelet_internal_checkpoint"


class _Data(msgspec.Struct, frozen=True, rename={"entries": "PodDeviceEntries", "registered": "RegisteredDevices"}):
    entries: Sequence[Entry] | None
    registered: Mapping[str, Sequence[str]]


class _Checkpoint(msgspec.Struct, frozen=True, rename="pascal"):
    data: _Data
    checksum: int


def read_checkpoint(directory: Path) -> tuple[Sequence[Entry], list[str]]:
    """Return the devices of pods and the names of the resources. As in a kubelet, both are empty for a bad or missing file."""
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
    """Remove the sockets, and links to sockets, directly in `directory`. Keep files, pipes and folders."""
    for entry in list(directory.iterdir()):
        if entry.is_socket():
            entry.unlink(missing_ok=True)


class CheckpointKeeper:
    """Writes the checkpoint of one kubelet, over all its restarts."""

    def __init__(
        self, directory: Path, journal: Journal, admission: PodAdmission, pod_resources: PodResourcesService
    ) -> None:
        self._directory = directory
        self._journal = journal
        self._admission = admission
        self._pod_resources = pod_resources
        self._written: frozenset[tuple[str, str]] = frozenset()
        self._lists_when_written = 0
        self._repeated_after = 0

    def write(self, tables: Mapping[str, ResourceState]) -> None:
        """Replace the file by a rename. It has the devices of pods, and the healthy device ids of each resource.

        The format is the format of kubelets since 1.20 (checkpoint/checkpoint.go: PodDevicesEntry, checkpointData, Data). A
        kubelet's checksum is FNV-1a, 32 bits, of Go's text form of its structures. Here it is FNV-1a of the data as JSON.
        """
        healthy = {name: sorted(state.healthy) for name, state in tables.items()}
        data = _Data(self._admission.entries() or None, healthy)
        fresh = self._directory / f".{CHECKPOINT}"
        fresh.touch(mode=0o600)
        fresh.write_bytes(msgspec.json.encode(_Checkpoint(data, _checksum(data))))
        fresh.replace(self._directory / CHECKPOINT)
        self.note()

    def note(self) -> None:
        """Record which devices the file contains, and how many PodResources lists were answered before it was written."""
        entries = self._admission.entries()
        self._lists_when_written = self._pod_resources.lists
        self._written = frozenset((e.resource, each) for e in entries for ids in e.ids.values() for each in ids)

    def wants_list(self, tables: Mapping[str, ResourceState]) -> bool:
        """Return True if an unchanged list from a plugin has a purpose: a real kubelet writes the checkpoint at each list.

        The list has a purpose in two cases:
        - The file contains devices, and PodResources was never called since the start, or it was called since the file was
          written and does not report some of these devices. At that call the kubelet removed ended pods.
        - A device is unhealthy (it may wait for the end of its pod), and a stream was opened or a pod was admitted or rejected
          since the last call of this method: the plugin cannot know whether the file has that change.

        Any other unchanged list only costs the kubelet a write of the file.
        """
        lists = self._pod_resources.lists
        listed = {
            (resource, identifier)
            for pod in self._admission.active().values()
            for devices in listing(pod).containers.values()
            for resource, identifier, _ in devices
        }
        if self._written and (not lists or (lists != self._lists_when_written and self._written - listed)):
            return True
        causes = (EventKind.STREAM_OPENED, EventKind.ADMITTED, EventKind.REJECTED)
        caused = sum(event.kind in causes for event in self._journal.events)
        new, self._repeated_after = caused > self._repeated_after, caused
        return new and any(table.unhealthy for table in tables.values())
