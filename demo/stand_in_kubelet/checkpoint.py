"""The kubelet's files in its device plugin directory: it removes sockets at its start, and writes a checkpoint.

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
    """Read the devices of pods, and the resources. As in a kubelet, a damaged or missing file counts as an empty file."""
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
    """Remove the sockets directly in `directory`, also through links. Files, pipes and folders stay."""
    for entry in list(directory.iterdir()):
        if entry.is_socket():
            entry.unlink(missing_ok=True)


class CheckpointKeeper:
    """The checkpoint of one kubelet, over all its restarts."""

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
        """Write the file and rename it into place: the devices of pods, and the healthy device ids of each resource.

        The format is used from 1.20 on (checkpoint/checkpoint.go: PodDevicesEntry, checkpointData, Data). A kubelet's
        checksum is the 32-bit FNV-1a of Go's text for its structures; here it is the 32-bit FNV-1a of the data as JSON.
        """
        healthy = {name: sorted(state.healthy) for name, state in tables.items()}
        data = _Data(self._admission.entries() or None, healthy)
        fresh = self._directory / f".{CHECKPOINT}"
        fresh.touch(mode=0o600)
        fresh.write_bytes(msgspec.json.encode(_Checkpoint(data, _checksum(data))))
        fresh.replace(self._directory / CHECKPOINT)
        self.note()

    def note(self) -> None:
        """Store the present content of the file, for `wants_list`."""
        entries = self._admission.entries()
        self._lists_when_written = self._pod_resources.lists
        self._written = frozenset((e.resource, each) for e in entries for ids in e.ids.values() for each in ids)

    def wants_list(self, tables: Mapping[str, ResourceState]) -> bool:
        """Return whether an unchanged list has a purpose: to have the file written, as a real kubelet does for each list.

        It has a purpose while the file has devices that PodResources does not report: a kubelet drops ended pods when
        PodResources is called, or PodResources was never called. It also has a purpose once after each start of a stream and
        each admission while a device is unhealthy, since that device may wait for the end of its pod, and a plugin cannot know
        whether the file has them already. Other lists have no effect but the cost of writing the file.
        """
        lists = self._pod_resources.lists
        listed = {
            (resource, identifier)
            for pod in self._admission.active().values()
            for devices in listing(pod).values()
            for resource, identifier, _ in devices
        }
        if self._written and (not lists or (lists != self._lists_when_written and self._written - listed)):
            return True
        causes = (EventKind.STREAM_OPENED, EventKind.ADMITTED, EventKind.REJECTED)
        caused = sum(event.kind in causes for event in self._journal.events)
        new, self._repeated_after = caused > self._repeated_after, caused
        return new and any(table.unhealthy for table in tables.values())
