"""When a kubelet writes its checkpoint, and which lists it is worth sending again for."""

from collections.abc import Callable, Mapping
from pathlib import Path

from gpu_plugin.simulation.stand_in_kubelet.admission import PodAdmission
from gpu_plugin.simulation.stand_in_kubelet.device_table import ResourceState
from gpu_plugin.simulation.stand_in_kubelet.directory import write_checkpoint
from gpu_plugin.simulation.stand_in_kubelet.journal import EventKind, Journal
from gpu_plugin.simulation.stand_in_kubelet.pod_resources import PodResourcesService, listing


class CheckpointKeeper:
    """The checkpoint of one kubelet, over all its restarts."""

    def __init__(
        self,
        directory: Path,
        journal: Journal,
        admission: PodAdmission,
        pod_resources: PodResourcesService,
        tables: Callable[[], Mapping[str, ResourceState]],
    ) -> None:
        self._directory = directory
        self._journal = journal
        self._admission = admission
        self._pod_resources = pod_resources
        self._tables = tables
        self._written: frozenset[tuple[str, str]] = frozenset()
        self._lists_when_written = 0
        self._repeated_after = 0

    def write(self) -> None:
        """Writes what pods have, and the healthy devices of each resource."""
        healthy = {name: state.healthy for name, state in self._tables().items()}
        write_checkpoint(self._directory, self._admission.entries(), healthy)
        self.note()

    def note(self) -> None:
        """Remembers what the file has by now."""
        entries = self._admission.entries()
        self._lists_when_written = self._pod_resources.lists
        self._written = frozenset((e.resource, each) for e in entries for ids in e.ids.values() for each in ids)

    def wants_list(self, tables: Mapping[str, ResourceState]) -> bool:
        """Whether an unchanged list has a purpose, which is that the file is written: a real kubelet does that for each.

        It has one while the file names what PodResources does not, since it was asked, which is when a kubelet forgets pods that
        have ended, or never was. And while a device is unhealthy, which may wait for its pod's end, once after each stream's
        beginning and each admission: a plugin cannot know whether the file has them already. Any other tells nobody anything,
        and costs the kubelet a file.
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
