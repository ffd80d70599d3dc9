"""Keeps the MPS daemons of a node running: a task for each resource, whose trouble is its own.

A resource is ready while its supervisor holds the lock that `readiness` looks at. What is wanted is given by `apply` at any
time: daemons that are wanted as they are run on, the others end before new ones start, since a GPU has one daemon.
"""

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import msgspec

from gpu_plugin.devices.mps_paths import CONTROL, shm_directory
from gpu_plugin.mps import directories, readiness
from gpu_plugin.mps.compute_modes import ComputeModes
from gpu_plugin.mps.control_daemon import ControlDaemon, end_leftovers
from gpu_plugin.mps.errors import MpsError
from gpu_plugin.mps.limits import differences, questions
from gpu_plugin.mps.pipe import drain_log, follows_links, prepare
from gpu_plugin.mps.plan import GET_THREADS, UNKNOWN, MpsDaemon, MpsPlan, MpsResource, plan_daemons, threads_in
from gpu_plugin.mps.readiness import Counts, Mark, ReadyMark
from gpu_plugin.runtime.backoff import ON_NODE, Backoff
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.threads import begin, settled

log = logging.getLogger(__name__)

_ALIVE = (
    "its process is alive and is not ended, since its clients would lose their work. A client may occupy its control connection "
    "(ss -xp shows which process); if it stays so, restart gpu-plugin mps"
)


class Tempo(msgspec.Struct, frozen=True):
    """How long things may take, in seconds.

    A daemon is down when `misses` probes in a row were not answered. Its process is not ended for that.
    """

    start: float = 15.0  # from its start until its control answers
    answer: float = 5.0  # for a command
    probe: float = 10.0  # between two probes; that a daemon exits is seen at once, without one
    misses: int = 3
    quit: float = 3.0  # for a daemon to quit before it is killed
    # For the driver to restore a compute mode: a GPU that hangs holds up neither others nor the exit.
    restore: float = 2.0
    # Until a daemon that went down is started again: the first, doubled each time, up to the longest.
    first_pause: float = 1.0
    longest_pause: float = 60.0
    forget: float = 60.0  # a daemon that was ready for so long begins with the first pause again


class _Kept(msgspec.Struct):
    """A daemon that is kept running, and how to end that."""

    daemon: MpsDaemon
    scope: anyio.CancelScope = msgspec.field(default_factory=anyio.CancelScope)
    over: anyio.Event = msgspec.field(default_factory=anyio.Event)


class Supervisor:
    """Runs the MPS daemons of one node under one root."""

    def __init__(
        self,
        root: Path,
        control: Callable[[], Sequence[str]],
        modes: ComputeModes,
        tempo: Tempo | None = None,
        shm: Path | None = None,
    ) -> None:
        """Takes the MPS root and what sets compute modes.

        `control` gives the control program with the arguments it always gets; it raises MpsError while there is none. `shm`
        is where the servers look for shared memory, which must be that of the MPS root; None: do not verify that.
        """
        self._root = root
        self._control = control
        self._modes = modes
        self._tempo = tempo or Tempo()
        self._shm = shm
        self._said = ""
        self._warned_of_links = False
        self._counts: dict[str, Counts] = {}
        self._descriptor: int | None = None
        self._unlimited: set[MpsDaemon] = set()
        """Daemons that know no memory limits, which was logged."""
        self._plan: MpsPlan | None = None
        self._changed = Pulse()
        self._kept: dict[str, _Kept] = {}
        self._refused: dict[str, str] = {}

    def apply(self, resources: Iterable[MpsResource]) -> None:
        """From now on these resources are wanted, each with a daemon of its own. From the event loop's thread."""
        self._plan = plan_daemons(str(self._root), resources)
        for warning in self._plan.warnings:
            log.warning("%s", warning)
        self._changed.ring()

    async def run(self) -> None:
        """Keeps running what is wanted until cancelled; then ends every daemon and restores every compute mode.

        Raises MpsError where the MPS root cannot be used.
        """
        async with self._sole_supervisor():
            await end_leftovers(self._root)
            self._modes.recall()
            try:
                async with anyio.create_task_group() as tasks:
                    while True:
                        done = self._plan
                        if done is not None:
                            await self._reconcile(tasks, done)
                        if self._plan is done:
                            await self._changed.wait()
            finally:
                for resource in self._refused:
                    self._mark(resource).down()
                with anyio.CancelScope(shield=True):
                    await self._modes.restore(self._modes.changed, self._tempo.restore)
                self._modes.close()

    @asynccontextmanager
    async def _sole_supervisor(self) -> AsyncIterator[None]:
        """Holds the lock of the MPS root, once whoever has it lets go."""
        directories.make_directory(self._root)
        path = self._root / readiness.SUPERVISOR
        descriptor = readiness.lock(path)
        if descriptor is None:
            log.warning("%s is held by another gpu-plugin mps on this node; waiting for it to end", path)
            job = begin(lambda: readiness.wait_for_lock(path), "mps-lock")
            try:
                await settled(job)
            except BaseException:
                job.done.add_done_callback(_let_go)  # it may still get the lock, with nobody left to want it
                raise
            descriptor = job.done.result()
        self._descriptor = descriptor
        readiness.write_counts(descriptor, {})
        try:
            yield
        finally:
            self._descriptor = None
            os.close(descriptor)

    async def _reconcile(self, tasks: anyio.abc.TaskGroup, plan: MpsPlan) -> None:
        """Stops daemons that the plan lacks or has with other settings, then starts those that are missing."""
        wanted = {daemon.resource: daemon for daemon in plan.daemons}
        ending = [kept for resource, kept in self._kept.items() if kept.daemon != wanted.get(resource)]
        for kept in ending:
            log.info("%s: its MPS daemon has outdated settings; stopping it", kept.daemon.resource)
            kept.scope.cancel()
        for kept in ending:
            await kept.over.wait()
            del self._kept[kept.daemon.resource]
        in_use = {uuid for daemon in plan.daemons for uuid in daemon.gpus}
        await self._modes.restore(self._modes.changed - in_use, self._tempo.restore)
        for resource in self._refused.keys() - plan.refused.keys() - wanted.keys():
            self._mark(resource).down()
        for resource, why in plan.refused.items():
            if self._refused.get(resource) != why:
                log.error("%s: no MPS daemon can serve it: %s", resource, why)
            self._mark(resource).down(why)
        self._refused = dict(plan.refused)
        for daemon in plan.daemons:
            if daemon.resource not in self._kept:
                kept = self._kept[daemon.resource] = _Kept(daemon)
                self._count(daemon.resource)
                tasks.start_soon(self._keep, kept)

    def _mark(self, resource: str) -> ReadyMark:
        return ReadyMark(self._root / resource)

    async def _keep(self, kept: _Kept) -> None:
        """Runs one resource's daemon again and again, ever more slowly, until it is not wanted any more."""
        daemon, tempo = kept.daemon, self._tempo
        mark = self._mark(daemon.resource)
        backoff = Backoff(tempo.first_pause, tempo.longest_pause, ON_NODE, stable=tempo.forget)
        try:
            with kept.scope:
                mark.down("it is being started")
                while True:
                    began = anyio.current_time()
                    try:
                        why = await self._run_once(daemon, mark)
                    except MpsError as error:
                        why = str(error)
                    except Exception as error:
                        log.exception("%s: running its MPS daemon failed unexpectedly", daemon.resource)
                        why = repr(error)
                    mark.down(why)
                    now = anyio.current_time()
                    pause = backoff.failed(now, random.random(), now - began)  # noqa: S311 - spreads retries
                    log.error(
                        "%s: its MPS daemon is down: %s; starting it again in %.2g s",
                        daemon.resource,
                        why,
                        pause,
                    )
                    await anyio.sleep(pause)
        finally:
            mark.down()
            kept.over.set()

    async def _run_once(self, daemon: MpsDaemon, mark: ReadyMark) -> str:
        """One daemon from its start to its end; gives why it ended. Nothing of it is left then.

        Raises MpsError where it cannot be started, or does not do its work.
        """
        control = ControlDaemon(daemon, self._root, self._control())
        try:
            await end_leftovers(self._root, daemon.resource)
            shm = Path(shm_directory(str(self._root)))
            directories.make(self._root, Path(daemon.pipe), Path(daemon.log), shm)
            self._warn_of(directories.shm_fault(shm, self._shm) if self._shm else "")
            for uuid in daemon.gpus:
                await self._modes.make_exclusive(uuid)
            # A pod with a writable mount of an earlier version can leave millions of files. Nothing interrupts this: it
            # would go on, and remove the files of the next daemon.
            preparing = begin(lambda: prepare(Path(daemon.pipe)), "mps-pipe")
            with anyio.CancelScope(shield=True):
                await settled(preparing)
            preparing.done.result()
            await control.start()
            return await self._until_exit(control, mark)
        finally:
            mark.down("it is being stopped")
            with anyio.CancelScope(shield=True):
                await control.end(self._tempo.quit)

    def _warn_of(self, fault: str) -> None:
        if fault and fault != self._said:
            log.warning("%s", fault)
        self._said = fault

    def _warn_of_links(self, control: ControlDaemon) -> None:
        """Log once that links in pipe directories can lead daemons elsewhere."""
        if not self._warned_of_links and follows_links(control.pid, Path(control.daemon.pipe)):
            self._warned_of_links = True
            log.warning(
                "MPS daemons follow links in their pipe directories, such as %s: the mount option nosymfollow needs Linux 5.10, "
                "the capability SYS_ADMIN, and a sandbox that allows mount namespaces. Recreate containers that a version with "
                "writable mounts of it has started",
                control.daemon.pipe,
            )

    async def _until_exit(self, control: ControlDaemon, mark: ReadyMark) -> str:
        """Serves with a started daemon until it exits, which is seen at once, or cannot be used. Returns why that is so."""
        why = ""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._serve, control, mark)
                why = await control.exited()
                group.cancel_scope.cancel()
        except* MpsError as errors:
            why = why or str(errors.exceptions[0])
        return why

    async def _serve(self, control: ControlDaemon, mark: ReadyMark) -> None:
        """Make the daemon ready, then probe it and restore its limits, for as long as its process is alive.

        A daemon that does not answer is not ended. Any client can occupy its only control connection, and the end of a
        daemon ends the work of all its clients.

        Raises:
            MpsError: it does not listen after its start.
        """
        daemon, tempo = control.daemon, self._tempo
        await self._listening(control)
        self._warn_of_links(control)
        since, misses, ready, restoring, down, unwritten = time.time(), 0, False, False, "", ""
        while True:
            try:
                different = left = await self._differences(control)
                if different:
                    if ready:
                        self._log_restoring(daemon.resource, different, again=restoring)
                    await self._set_limits(control)
                    left = await self._differences(control)
                misses, restoring = 0, ready and bool(different)
                why = "" if ready else left
            except MpsError as error:
                misses += 1
                self._count(daemon.resource, probes_failed=1)
                drain_log(Path(daemon.pipe))
                why = f"{error}; {_ALIVE}"
                if ready and misses < tempo.misses:
                    log.warning("%s: %s; probing again", daemon.resource, error)
                    why = ""
            if why:
                ready = False
                mark.down(why)
                if down != (down := why):
                    log.error("%s: its MPS daemon is down: %s", daemon.resource, why)
            elif not misses:
                try:
                    self._confirm(control, mark, since)
                except MpsError as error:
                    if unwritten != (unwritten := str(error)):
                        log.error(  # noqa: TRY400 - a sentence
                            "%s: %s; its clients are still served, but the device plugin counts it as down after %g s",
                            daemon.resource,
                            error,
                            readiness.STALE,
                        )
                else:
                    unwritten = ""
                if not ready:
                    ready, down = True, ""
                    log.info(
                        "%s: MPS daemon ready (process %d): %d GPUs, %d clients each",
                        daemon.resource,
                        control.pid,
                        len(daemon.gpus),
                        daemon.replicas,
                    )
            directories.trim_logs(Path(daemon.log))
            await anyio.sleep(tempo.probe)

    async def _set_limits(self, control: ControlDaemon) -> None:
        """Set the configured limits. The daemon refuses a limit without a word, so the caller compares them afterwards.

        Raises:
            MpsError: it does not answer.
        """
        answer = await control.ask(*control.daemon.commands, patience=self._tempo.answer)
        if UNKNOWN in answer and control.daemon not in self._unlimited:
            self._unlimited.add(control.daemon)
            log.warning("%s: its MPS daemon sets no such limit: %s", control.daemon.resource, answer)

    async def _differences(self, control: ControlDaemon) -> str:
        """Compare the daemon's limits with the configuration; empty if they are the same.

        Raises:
            MpsError: it does not answer. An empty answer is that of a daemon that another client occupies.
        """
        asked = questions(control.daemon)
        answer = await control.ask(*asked, patience=self._tempo.answer)
        if threads_in(answer) is None:
            raise MpsError(f"its control answers {asked[0]!r} with {answer or 'nothing'!r}")
        return differences(control.daemon, answer)

    def _log_restoring(self, resource: str, different: str, *, again: bool) -> None:
        """Count that a client has changed limits, and log it, unless the probe before this one did so too (`again`)."""
        self._count(resource, limits_restored=1)
        level = logging.DEBUG if again else logging.WARNING
        log.log(level, "%s: a client has changed the limits of its MPS daemon: %s; restoring them", resource, different)

    def _count(self, resource: str, *, limits_restored: int = 0, probes_failed: int = 0) -> None:
        before = self._counts.get(resource, Counts())
        self._counts[resource] = Counts(before.limits_restored + limits_restored, before.probes_failed + probes_failed)
        if self._descriptor is not None:
            readiness.write_counts(self._descriptor, self._counts)

    async def _listening(self, control: ControlDaemon) -> None:
        """Wait until a daemon that was just started answers, or at least listens; nothing tells when.

        Raises:
            MpsError: it has not made its socket in time.
        """
        tempo = self._tempo
        until = anyio.current_time() + tempo.start
        while True:
            try:
                await control.ask(GET_THREADS, patience=min(tempo.answer, max(0.1, until - anyio.current_time())))
            except MpsError:
                if anyio.current_time() >= until:
                    if directories.is_socket(Path(control.daemon.pipe, CONTROL)):
                        return
                    raise
                await anyio.sleep(min(tempo.probe, 0.1))
            else:
                return

    @staticmethod
    def _confirm(control: ControlDaemon, mark: ReadyMark, since: float) -> None:
        daemon = control.daemon
        mark.up(
            Mark(pid=control.pid, since=since, replicas=daemon.replicas, gpus=daemon.gpus, confirmed=time.monotonic())
        )


def _let_go(got: "asyncio.Future[int]") -> None:
    """Closes a lock file that was got too late."""
    if not got.cancelled() and got.exception() is None:
        os.close(got.result())
