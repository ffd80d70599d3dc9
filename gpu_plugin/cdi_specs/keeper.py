"""The daemon's part that keeps CDI specifications true to the node, and says which devices they serve."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from gpu_plugin.access.cdi import names
from gpu_plugin.access.cdi.build import Built
from gpu_plugin.access.cdi.readiness import CdiReadiness
from gpu_plugin.access.cdi.spec import Spec
from gpu_plugin.cdi_specs.directory import SpecDirectory
from gpu_plugin.cdi_specs.source import Request, SpecSource
from gpu_plugin.pulse import Pulse
from gpu_plugin.threads import Job, begin, settled

log = logging.getLogger(__name__)

LOOK_EVERY = 5.0
"""Seconds between two looks at whether anything on the host has changed."""

PATIENCE = 10.0
"""Seconds that one look may take, the writing included, before devices count as out of reach."""

RECALL_PATIENCE = 1.0
"""Seconds that the start waits for what an earlier process left."""

GPU_FILE = names.file_name(names.GPU)


class SpecKeeper:
    """Writes specifications off the event loop, again where the node, the settings or the host's files change."""

    def __init__(
        self,
        source: SpecSource,
        wanted: Callable[[], Request | None],
        directory: Callable[[], Path],
        changed: Callable[[CdiReadiness], None],
    ) -> None:
        """Takes where specifications come from, what they are for now, and where they go.

        `wanted` gives None while no container is told of devices by CDI name; `changed` is told which devices are served.
        """
        self._source = source
        self._wanted = wanted
        self._place = directory
        self._changed = changed
        self._directory = SpecDirectory(directory())
        self._asked = Pulse()
        self._due = True
        self._told = CdiReadiness()
        self._said: frozenset[str] = frozenset()

    def ask(self) -> None:
        """Has the specifications brought up to date now. From the event loop's thread."""
        self._due = True
        self._asked.ring()

    async def recall(self) -> None:
        """Tells of devices whose specification an earlier process left and which still holds: pods need not wait for it.

        It holds where every file that it names is still there. Waits a moment at most.
        """
        job = begin(self._left, "cdi-specs")
        if await settled(job, RECALL_PATIENCE) and job.done.exception() is None:
            left = job.done.result()
            if left is not None and self._told == CdiReadiness():
                self._tell(CdiReadiness(frozenset(device.name for device in left.devices), ""))

    def remove(self) -> None:
        """Takes the specifications away, as the last thing that is done with them. Blocks for a moment."""
        try:
            removed = self._directory.remove()
        except OSError as error:
            log.warning("CDI specifications stay in %s: %s", self._directory.path, error)
        else:
            log.info("removed from %s: %s", self._directory.path, ", ".join(removed) or "nothing")

    async def run(self) -> None:
        """Keeps the specifications written until cancelled."""
        while True:
            self._due = False
            request = self._wanted()
            if request is None:
                await self._wait(None)
                continue
            if self._directory.path != self._place():
                self._directory = SpecDirectory(self._place())
            job = begin(lambda asked=request: self._round(asked), "cdi-specs")  # type: ignore[misc]
            await self._take(job)
            await self._wait(LOOK_EVERY)

    async def _wait(self, seconds: float | None) -> None:
        if not self._due:
            await self._asked.wait(seconds)

    async def _take(self, job: "Job[tuple[Built, list[str], str]]") -> None:
        """Tells of a round's outcome, and that there is none yet where it takes too long."""
        if not await settled(job, PATIENCE):
            self._tell(
                CdiReadiness(
                    trouble=f"its CDI specification could not be made within {PATIENCE:g} s: does a disk hang?"
                )
            )
            await settled(job)
        error = job.done.exception()
        if error is not None:
            if not isinstance(error, OSError):
                log.error("making CDI specifications failed unexpectedly", exc_info=error)
            self._tell(CdiReadiness(trouble=f"its CDI specification cannot be made: {error}"))
            return
        built, written, refused = job.done.result()
        for name in written:
            there = name in built.specs
            log.log(logging.INFO, "%s/%s: %s", self._directory.path, name, "written" if there else "removed")
        self._complain(built.complaints)
        self._tell(readiness(built, refused))

    def _round(self, request: Request) -> tuple[Built, list[str], str]:
        """Builds and writes once. Returns what was built, the files that changed, and why one was not written."""
        built = self._source.build(request)
        try:
            return built, self._directory.write(built.specs), ""
        except OSError as error:
            return built, [], f"its CDI specification cannot be written: {error.filename}: {error.strerror}"

    def _left(self) -> Spec | None:
        """The specification of GPUs that is there already, if all it names is too."""
        spec = self._directory.read(GPU_FILE)
        if spec is None:
            return None
        edits = [spec.container_edits, *(device.container_edits for device in spec.devices)]
        paths = {mount.host_path for each in edits for mount in each.mounts}
        paths |= {node.host_path or node.path for each in edits for node in each.device_nodes}
        paths |= {hook.path for each in edits for hook in each.hooks}
        return spec if all(map(self._source.exists, paths)) else None

    def _complain(self, complaints: Iterable[str]) -> None:
        told = frozenset(complaints)
        for sentence in sorted(told - self._said):
            log.warning("%s", sentence)
        self._said = told

    def _tell(self, state: CdiReadiness) -> None:
        if state == self._told:
            return
        if state.trouble != self._told.trouble and state.trouble:
            log.error("no device can be given to containers by CDI name: %s", state.trouble)
        elif self._told.trouble and not state.trouble:
            log.info("devices can be given to containers by CDI name")
        self._told = state
        self._changed(state)


def readiness(built: Built, refused: str) -> CdiReadiness:
    """Which devices can be used by name after specifications were built, and written unless that was `refused`."""
    spec = built.specs.get(GPU_FILE)
    there = frozenset(device.name for device in spec.devices) if spec else frozenset[str]()
    trouble = built.trouble or refused
    if not trouble and spec is None:
        trouble = "its CDI specification has no device"
    return CdiReadiness(there, trouble, built.missing)
