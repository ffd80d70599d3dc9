"""Keeps the CDI specifications up to date with the node, and publishes which devices they serve."""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from msgspec.structs import replace

from gpu_plugin.containers import cdi_names
from gpu_plugin.containers.cdi.readiness import NOT_YET, CdiReadiness
from gpu_plugin.containers.cdi.spec import Spec, faults, gpu_nodes, other_names
from gpu_plugin.containers.cdi.written import own_faults
from gpu_plugin.containers.cdi_files.directory import OURS, Outcome, SpecDirectory, not_ours, said
from gpu_plugin.containers.cdi_files.files import NameConflicts
from gpu_plugin.containers.cdi_files.source import SpecSource, UnsafeSpecError, Wanted
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.threads import NoAnswerError, SlowCall, begin

if TYPE_CHECKING:
    from gpu_plugin.containers.cdi.build import Built

log = logging.getLogger(__name__)

LOOK_EVERY = 5.0  # seconds between two checks for changes on the host
PATIENCE = 10.0  # seconds that one round may take, the writing included, before devices become unusable
RECALL_PATIENCE = 1.0  # seconds that the start waits for the files of an earlier process
REMOVAL_PATIENCE = 0.5  # seconds that the end waits for the removal of our files

MAX_CONFLICTS = 3  # the most refused devices that get their own sentence

GPU_FILE = cdi_names.file_name(cdi_names.GPU)


class SpecKeeper:
    """Writes specifications on a thread, and writes them again if the node, the settings or the host's files change."""

    def __init__(self, source: SpecSource, directory: Path, changed: Callable[[CdiReadiness], None]) -> None:
        """Keep the source of the specifications, and their directory.

        `changed` receives the devices that are served: no devices at first, and no devices again after a time without
        CDI strategies.
        """
        self._source = source
        self._wanted: Wanted | None = None
        self._changed = changed
        self._directory = SpecDirectory(directory)
        self._conflicts = NameConflicts(directory)
        self._asked = Pulse()
        self._due = True
        self._readiness = CdiReadiness()
        self._looked = False
        self._complaints: frozenset[str] = frozenset()
        self._call: SlowCall[Any] = SlowCall("cdi-specs")

    def follow(self, wanted: Wanted | None) -> None:
        """Start a round with these inputs now. None: no strategy uses CDI names. For the event loop's thread."""
        self._wanted = wanted
        self._due = True
        self._asked.ring()

    async def recall(self) -> None:
        """Publish the devices of an earlier process's specification if it is still valid, so that pods need not wait.

        It is valid if every file that it names still exists and is safe. Waits for RECALL_PATIENCE at most.
        """
        try:
            left = await self._call.joined(self._left, RECALL_PATIENCE)
        except NoAnswerError:
            log.warning("the existing CDI specifications could not be read within %g s", RECALL_PATIENCE)
        except Exception as error:  # noqa: BLE001 - the first round reports it
            log.warning("the existing CDI specifications cannot be read: %r", error)
        else:
            if GPU_FILE in left and self._readiness == CdiReadiness():
                self._report(CdiReadiness(gpu_nodes(left), "", others=other_names(left)))

    async def remove(self) -> None:
        """Remove the specifications at the end. Waits for REMOVAL_PATIENCE at most, cancelled or not."""
        with anyio.CancelScope(shield=True):
            job = begin(self._directory.remove, "cdi-specs-removal")  # waits for a write under way
            if not await job.wait(REMOVAL_PATIENCE):
                log.warning("CDI specifications may stay in %s: does a disk hang?", self._directory.path)
                return
        outcome = job.done.result()
        foreign = (not_ours(self._directory.path / name) for name in outcome.foreign)
        for sentence in (*outcome.refused.values(), *foreign):
            log.warning("a CDI specification stays: %s", sentence)
        log.info("removed from %s: %s", self._directory.path, ", ".join(outcome.changed) or "nothing")

    async def run(self) -> None:
        """Keep the specifications up to date until cancelled."""
        while True:
            self._due = False
            wanted = self._wanted
            if wanted is None:
                if self._looked:
                    self._report(CdiReadiness())
                self._looked = False
                await self._wait(None)
                continue
            if self._call.begun:  # the files of an earlier process are still being read
                await self._wait_for_call()
                self._call.forget()
            self._looked = True
            self._call.begin(partial(self._round, wanted))
            await self._take_round()
            await self._wait(LOOK_EVERY)

    async def _wait(self, seconds: float | None) -> None:
        if not self._due:
            await self._asked.wait(seconds)

    async def _wait_for_call(self) -> None:
        """Wait for the call under way. If it takes too long, publish that no device can be used."""
        if not await self._call.wait(PATIENCE):
            trouble = f"its CDI specification could not be made within {PATIENCE:g} s: does a disk hang?"
            self._report(CdiReadiness(trouble=trouble))
            await self._call.wait()

    async def _take_round(self) -> None:
        """Wait for a round and publish its result."""
        await self._wait_for_call()
        job = self._call.take()
        error = job.done.exception()
        if error is not None:
            known = isinstance(error, (OSError, UnsafeSpecError))
            text = said(error) if isinstance(error, OSError) else str(error) if known else repr(error)
            trouble = f"its CDI specification cannot be made: {text}"
            if not known and trouble != self._readiness.trouble:
                log.error("making CDI specifications failed unexpectedly", exc_info=error)
            self._report(CdiReadiness(trouble=trouble))
            return
        built, outcome, conflicts = job.done.result()
        for name in outcome.changed:
            log.info("%s/%s: %s", self._directory.path, name, "written" if name in built.specs else "removed")
        others = [sentence for name, sentence in outcome.refused.items() if name != GPU_FILE]
        others += [not_ours(self._directory.path / name) for name in outcome.foreign]
        others += [
            f"{self._directory.path / name}: the new one is invalid and was not written: {why}"
            for name, why in outcome.invalid.items()
            if name != GPU_FILE
        ]
        self._complain(
            [*built.complaints, *(f"a CDI specification is missing, outdated or left over: {each}" for each in others)]
        )
        self._report(readiness(built, outcome, conflicts))

    def _round(self, wanted: Wanted) -> "tuple[Built, Outcome, Mapping[str, str]]":
        built = self._source.build(wanted.request())
        outcome = self._directory.write(built.specs)
        conflicts = self._conflicts.find()
        shared = (*self._directory.complaints(), *list(conflicts.values())[:MAX_CONFLICTS])
        if shared:
            built = replace(built, complaints=(*built.complaints, *shared))
        return built, outcome, conflicts

    def _left(self) -> dict[str, Spec]:
        """Return our specifications in the directory, by file name, that are valid and whose paths all exist and are safe."""
        found = {}
        for device_class, name in zip(cdi_names.CLASSES, OURS, strict=True):
            spec = self._directory.read(name)
            if spec is None or spec.kind != cdi_names.kind(device_class) or any(faults(spec)) or any(own_faults(spec)):
                continue
            if self._source.holds(spec):
                found[name] = spec
        return found

    def _complain(self, complaints: Iterable[str]) -> None:
        present = frozenset(complaints)
        for sentence in sorted(present - self._complaints):
            log.warning("%s", sentence)
        self._complaints = present

    def _report(self, state: CdiReadiness) -> None:
        if state == self._readiness:
            return
        if state.trouble not in (self._readiness.trouble, NOT_YET, ""):
            log.error("no device can be given to containers by CDI name: %s", state.trouble)
        elif self._readiness.trouble and not state.trouble:
            log.info("devices can be given to containers by CDI name")
        self._readiness = state
        self._changed(state)


def readiness(built: "Built", outcome: Outcome, conflicts: Mapping[str, str] = {}) -> CdiReadiness:
    """Return the devices that can be used by name after specifications were built and written with this outcome.

    `conflicts` has, by qualified name, why runtimes refuse a device. If a new specification could not be written, the devices of
    its old file cannot be used, since the old file describes an earlier state of the node.
    """
    failed = {**outcome.refused, **outcome.invalid}
    written = {name: spec for name, spec in built.specs.items() if name not in failed}
    trouble = built.trouble
    if not trouble and GPU_FILE in outcome.refused:
        trouble = f"its CDI specification cannot be written: {outcome.refused[GPU_FILE]}"
    if not trouble and GPU_FILE in outcome.invalid:
        trouble = f"its CDI specification is invalid and was not written: {outcome.invalid[GPU_FILE]}"
    if not trouble and GPU_FILE not in built.specs:
        trouble = "its CDI specification has no device"
    kind = f"{cdi_names.kind(cdi_names.GPU)}="
    refused = {name.removeprefix(kind): why for name, why in conflicts.items() if name.startswith(kind)}
    nodes = {name: paths for name, paths in gpu_nodes(written).items() if name not in refused}
    others = other_names(written).difference(conflicts)
    return CdiReadiness(nodes, trouble, {**built.missing, **refused}, others, built.complaints)
