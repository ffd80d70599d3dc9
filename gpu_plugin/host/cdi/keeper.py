"""The daemon's part that keeps CDI specifications true to the node, and says which devices they serve."""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from gpu_plugin.access import cdi_names
from gpu_plugin.access.cdi.readiness import NOT_YET, CdiReadiness
from gpu_plugin.access.cdi.spec import Spec, faults, gpu_nodes, other_names
from gpu_plugin.host.cdi.directory import OURS, Outcome, SpecDirectory, said
from gpu_plugin.host.cdi.source import Request, SpecSource
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.slow_call import SlowCall
from gpu_plugin.runtime.threads import NoAnswerError, begin, settled

if TYPE_CHECKING:
    from gpu_plugin.access.cdi.build import Built

log = logging.getLogger(__name__)

LOOK_EVERY = 5.0  # seconds between two looks at whether anything on the host has changed
PATIENCE = 10.0  # seconds that one look may take, the writing included, before devices count as out of reach
RECALL_PATIENCE = 1.0  # seconds that the start waits for what an earlier process left
REMOVAL_PATIENCE = 0.5  # seconds that the end waits for the removal of what was written

GPU_FILE = cdi_names.file_name(cdi_names.GPU)


class SpecKeeper:
    """Writes specifications off the event loop, again where the node, the settings or the host's files change."""

    def __init__(
        self,
        source: SpecSource,
        wanted: Callable[[], Callable[[], Request] | None],
        directory: Path,
        changed: Callable[[CdiReadiness], None],
    ) -> None:
        """Takes where specifications come from, what they are for now, and where they go.

        `wanted` gives None while no container is told of devices by CDI name, else how to make the request, which is done
        on a thread; `changed` is told which devices are served:
        none at first, and none again after a time in which nobody looked.
        """
        self._source = source
        self._wanted = wanted
        self._changed = changed
        self._directory = SpecDirectory(directory)
        self._asked = Pulse()
        self._due = True
        self._readiness = CdiReadiness()
        self._looked = False
        self._complaints: frozenset[str] = frozenset()
        self._call: SlowCall[Any] = SlowCall(partial(begin, name="cdi-specs"))

    def ask(self) -> None:
        """Has the specifications brought up to date now. From the event loop's thread."""
        self._due = True
        self._asked.ring()

    async def recall(self) -> None:
        """Tells of devices whose specification an earlier process left and which still holds: pods need not wait for it.

        It holds where every file that it names is still there. Waits a moment at most.
        """
        try:
            left = await self._call.joined(self._left, RECALL_PATIENCE)
        except NoAnswerError:
            log.warning("what CDI specifications there are already could not be read within %g s", RECALL_PATIENCE)
        except Exception as error:  # noqa: BLE001 - the first round tells of it
            log.warning("what CDI specifications there are already cannot be read: %r", error)
        else:
            if left and self._readiness == CdiReadiness():
                self._report(CdiReadiness(gpu_nodes(left), "", others=other_names(left)))

    async def remove(self) -> None:
        """Takes the specifications away, as the last thing that is done with them. Waits a moment at most, cancelled or not."""
        with anyio.CancelScope(shield=True):
            job = begin(self._directory.remove, "cdi-specs-removal")  # waits for what is being written now
            if not await settled(job, REMOVAL_PATIENCE):
                log.warning("CDI specifications may stay in %s: does a disk hang?", self._directory.path)
                return
        outcome = job.done.result()
        for sentence in outcome.refused.values():
            log.warning("a CDI specification stays: %s", sentence)
        log.info("removed from %s: %s", self._directory.path, ", ".join(outcome.changed) or "nothing")

    async def run(self) -> None:
        """Keeps the specifications written until cancelled."""
        while True:
            self._due = False
            request = self._wanted()
            if request is None:
                if self._looked:
                    self._report(CdiReadiness())
                self._looked = False
                await self._wait(None)
                continue
            if self._call.begun:  # what an earlier process left is still being read
                await self._wait_for_call()
                self._call.forget()
            self._looked = True
            self._call.begin(partial(self._round, request))
            await self._take_round()
            await self._wait(LOOK_EVERY)

    async def _wait(self, seconds: float | None) -> None:
        if not self._due:
            await self._asked.wait(seconds)

    async def _wait_for_call(self) -> None:
        """Waits for the call under way, and tells that no device can be used where it takes too long."""
        if not await self._call.wait(PATIENCE):
            trouble = f"its CDI specification could not be made within {PATIENCE:g} s: does a disk hang?"
            self._report(CdiReadiness(trouble=trouble))
            await self._call.wait()

    async def _take_round(self) -> None:
        """Tells of a round's outcome, and that there is none yet where it takes too long."""
        await self._wait_for_call()
        job = self._call.take()
        error = job.done.exception()
        if error is not None:
            text = said(error) if isinstance(error, OSError) else repr(error)
            trouble = f"its CDI specification cannot be made: {text}"
            if not isinstance(error, OSError) and trouble != self._readiness.trouble:
                log.error("making CDI specifications failed unexpectedly", exc_info=error)
            self._report(CdiReadiness(trouble=trouble))
            return
        built, outcome = job.done.result()
        for name in outcome.changed:
            log.info("%s/%s: %s", self._directory.path, name, "written" if name in built.specs else "removed")
        others = [sentence for name, sentence in outcome.refused.items() if name != GPU_FILE]
        self._complain(
            [*built.complaints, *(f"a CDI specification is not what it should be: {each}" for each in others)]
        )
        self._report(readiness(built, outcome.refused))

    def _round(self, request: Callable[[], Request]) -> "tuple[Built, Outcome]":
        built = self._source.build(request())
        return built, self._directory.write(built.specs)

    def _left(self) -> dict[str, Spec]:
        """The specifications that are there already by file name, as far as runtimes take them and all they name is there."""
        found = {}
        for device_class, name in zip(cdi_names.CLASSES, OURS, strict=True):
            spec = self._directory.read(name)
            if spec is None or spec.kind != cdi_names.kind(device_class) or any(faults(spec)):
                continue
            if self._source.holds(spec):
                found[name] = spec
        return found if GPU_FILE in found else {}

    def _complain(self, complaints: Iterable[str]) -> None:
        told = frozenset(complaints)
        for sentence in sorted(told - self._complaints):
            log.warning("%s", sentence)
        self._complaints = told

    def _report(self, state: CdiReadiness) -> None:
        if state == self._readiness:
            return
        if state.trouble not in (self._readiness.trouble, NOT_YET, ""):
            log.error("no device can be given to containers by CDI name: %s", state.trouble)
        elif self._readiness.trouble and not state.trouble:
            log.info("devices can be given to containers by CDI name")
        self._readiness = state
        self._changed(state)


def readiness(built: "Built", refused: Mapping[str, str]) -> CdiReadiness:
    """Which devices can be used by name after specifications were built, and written but for those that were `refused`."""
    written = {name: spec for name, spec in built.specs.items() if name not in refused}
    trouble = built.trouble
    if not trouble and GPU_FILE in refused:
        trouble = f"its CDI specification cannot be written: {refused[GPU_FILE]}"
    if not trouble and GPU_FILE not in built.specs:
        trouble = "its CDI specification has no device"
    return CdiReadiness(gpu_nodes(written), trouble, built.missing, other_names(written))
