"""Keeps the MPS daemons of a node running, with a task for each resource, so that a failure affects only its resource.

`apply` sets the wanted daemons at any time. Unchanged daemons continue. Other daemons end before new daemons start, since a GPU
has only one daemon.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import anyio
import anyio.abc
import msgspec

from gpu_plugin.devices.mps_paths import CONTROL, shm_directory
from gpu_plugin.mps import directories
from gpu_plugin.mps.compute_modes import ComputeModes
from gpu_plugin.mps.control_daemon import ControlDaemon, end_leftovers
from gpu_plugin.mps.errors import MpsError
from gpu_plugin.mps.limits import GET_THREADS, UNKNOWN, threads_in
from gpu_plugin.mps.pipe import drain_log, follows_links, prepare
from gpu_plugin.mps.plan import MpsDaemon, MpsPlan, MpsResource, plan_daemons
from gpu_plugin.mps.readiness import STALE, StateFile
from gpu_plugin.runtime.backoff import Backoff
from gpu_plugin.runtime.log_lines import LogOnChange
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.threads import begin

log = logging.getLogger(__name__)

_ALIVE = (
    "its process is alive and is not ended, since its clients would lose their work. A client may occupy its control connection "
    "(ss -xp shows which process); if it stays so, restart gpu-plugin mps"
)


_LOCK_INTERVAL = 0.5  # seconds between two tries to get the lock of the MPS root


class Tempo(msgspec.Struct, frozen=True):
    """Durations in seconds.

    A daemon is down after `misses` probes in a row without an answer. Its process is not ended for that reason.
    """

    start: float = 15.0  # from a daemon's start until it answers
    answer: float = 5.0  # to answer a command
    probe: float = 10.0  # between two probes; the exit of a daemon is noticed at once without a probe
    misses: int = 3
    quit: float = 3.0  # for a daemon to quit before it is killed
    # For the driver to restore a compute mode: a GPU that hangs must not delay other GPUs or the exit.
    restore: float = 2.0
    # Until a daemon that went down is started again: the first pause is doubled each time up to the longest.
    first_pause: float = 1.0
    longest_pause: float = 60.0
    stable: float = 60.0  # after a daemon was ready for this time, the next pause is the first pause again


class _Kept(msgspec.Struct):
    """A daemon to keep running, the scope that cancels this, and an event for its end."""

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
        """Store the MPS root and the setter of compute modes.

        `control` returns the control program with its constant arguments; it raises MpsError while there is no program. `shm`
        is the directory in which servers share memory; it must be shm of the MPS root (None: do not check).
        """
        self._root = root
        self._control = control
        self._modes = modes
        self._tempo = tempo or Tempo()
        self._shm = shm
        self._shm_fault = LogOnChange(log, "%s")
        self._warned_of_links = False
        self._states = StateFile(root)
        self._without_limits: set[MpsDaemon] = set()  # whose lack of support for memory limits was logged
        self._plan: MpsPlan | None = None
        self._changed = Pulse()
        self._kept: dict[str, _Kept] = {}
        self._refused: dict[str, str] = {}

    def apply(self, resources: Iterable[MpsResource]) -> None:
        """Set the resources that should each have a daemon from now on. Call it on the event loop's thread."""
        self._plan = plan_daemons(str(self._root), resources)
        for warning in self._plan.warnings:
            log.warning("%s", warning)
        self._changed.ring()

    async def run(self) -> None:
        """Run the wanted daemons until cancelled, then end all daemons and restore all compute modes.

        Raises MpsError if the MPS root cannot be used.
        """
        directories.make_directory(self._root)
        warned = False
        while not self._states.lock():
            if not warned:
                log.warning(
                    "%s is held by another gpu-plugin mps on this node; waiting for it to end", self._states.path
                )
                warned = True
            await anyio.sleep(_LOCK_INTERVAL)
        try:
            await end_leftovers(self._root)
            self._modes.recall()
            async with anyio.create_task_group() as tasks:
                while True:
                    done = self._plan
                    if done is not None:
                        await self._reconcile(tasks, done)
                    if self._plan is done:
                        await self._changed.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await self._modes.restore(self._modes.changed, self._tempo.restore)
            self._states.unlock()

    async def _reconcile(self, tasks: anyio.abc.TaskGroup, plan: MpsPlan) -> None:
        """Stop daemons that are not in the plan or have other settings, then start missing daemons."""
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
            self._states.down(resource)
        for resource, why in plan.refused.items():
            if self._refused.get(resource) != why:
                log.error("%s: no MPS daemon can serve it: %s", resource, why)
            self._states.down(resource, why)
        self._refused = dict(plan.refused)
        for daemon in plan.daemons:
            if daemon.resource not in self._kept:
                kept = self._kept[daemon.resource] = _Kept(daemon)
                tasks.start_soon(self._keep, kept)

    async def _keep(self, kept: _Kept) -> None:
        """Run one resource's daemon and restart it with growing pauses, until it is not wanted any more."""
        daemon, tempo = kept.daemon, self._tempo
        backoff = Backoff(tempo.first_pause, tempo.longest_pause, stable=tempo.stable)
        try:
            with kept.scope:
                self._states.down(daemon.resource, "it is being started")
                while True:
                    began = anyio.current_time()
                    try:
                        why = await self._run_once(daemon)
                    except MpsError as error:
                        why = str(error)
                    except Exception as error:
                        log.exception("%s: running its MPS daemon failed unexpectedly", daemon.resource)
                        why = repr(error)
                    self._states.down(daemon.resource, why)
                    now = anyio.current_time()
                    pause = backoff.failed(now, worked_for=now - began)
                    log.error(
                        "%s: its MPS daemon is down: %s; starting it again in %.2g s", daemon.resource, why, pause
                    )
                    await anyio.sleep(pause)
        finally:
            self._states.down(daemon.resource)
            kept.over.set()

    async def _run_once(self, daemon: MpsDaemon) -> str:
        """Run one daemon from its start to its end, and leave no process of it. Return why it ended.

        Raises MpsError if it cannot be started, or does not work.
        """
        control = ControlDaemon(daemon, self._root, self._control())
        try:
            await end_leftovers(self._root, daemon.resource)
            shm = Path(shm_directory(str(self._root)))
            directories.make(self._root, Path(daemon.pipe), Path(daemon.log), shm)
            self._shm_fault.update(directories.shm_fault(shm, self._shm) if self._shm else "")
            for uuid in daemon.gpus:
                await self._modes.make_exclusive(uuid)
            # A pod with a writable mount, as of NVIDIA's plugin, can leave millions of files. The removal is not cancelled, as
            # the thread would continue and remove the files of the next daemon.
            with anyio.CancelScope(shield=True):
                await begin(lambda: prepare(Path(daemon.pipe)), "mps-pipe").result()
            await control.start()
            return await self._until_exit(control)
        finally:
            self._states.down(daemon.resource, "it is being stopped")
            with anyio.CancelScope(shield=True):
                await control.end(self._tempo.quit)

    def _warn_of_links(self, control: ControlDaemon) -> None:
        """Log once that links in pipe directories can lead daemons elsewhere."""
        if not self._warned_of_links and follows_links(control.pid, Path(control.daemon.pipe)):
            self._warned_of_links = True
            log.warning(
                "MPS daemons follow links in their pipe directories, such as %s: the mount option nosymfollow needs Linux 5.10, "
                "the capability SYS_ADMIN, and a sandbox that allows mount namespaces. Recreate containers with writable mounts "
                "of it, as NVIDIA's plugin makes them",
                control.daemon.pipe,
            )

    async def _until_exit(self, control: ControlDaemon) -> str:
        """Use a started daemon until it exits, which is noticed at once, or cannot be used. Return the reason."""
        why = ""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._serve, control)
                why = await control.exited()
                group.cancel_scope.cancel()
        except* MpsError as errors:
            why = why or str(errors.exceptions[0])
        return why

    async def _serve(self, control: ControlDaemon) -> None:
        """Make the daemon ready, then probe it and restore its limits, for as long as its process is alive.

        A daemon that does not answer is not ended. Any client can occupy its only control connection, and the end of a
        daemon ends the work of all its clients.

        Raises:
            MpsError: it does not listen after its start.
        """
        daemon, tempo = control.daemon, self._tempo
        await self._listening(control)
        self._warn_of_links(control)
        down = LogOnChange(log, f"{daemon.resource}: its MPS daemon is down: %s", level=logging.ERROR)
        unwritten = LogOnChange(
            log,
            f"{daemon.resource}: %s; its clients are still served, but the device plugin counts it as down after {STALE:g} s",
            level=logging.ERROR,
        )
        misses, ready, restoring = 0, False, False
        while True:
            try:
                different = left = await self._differences(control)
                if different:
                    if ready:
                        self._states.count(daemon.resource, limits_restored=1)
                        log.log(
                            logging.DEBUG if restoring else logging.WARNING,
                            "%s: a client has changed the limits of its MPS daemon: %s; restoring them",
                            daemon.resource,
                            different,
                        )
                    await self._set_limits(control)
                    left = await self._differences(control)
                misses, restoring = 0, ready and bool(different)
                why = "" if ready else left
            except MpsError as error:
                misses += 1
                self._states.count(daemon.resource, probes_failed=1)
                drain_log(Path(daemon.pipe))
                why = f"{error}; {_ALIVE}"
                if ready and misses < tempo.misses:
                    log.warning("%s: %s; probing again", daemon.resource, error)
                    why = ""
            down.update(why)
            if why:
                ready = False
                self._states.down(daemon.resource, why)
            elif not misses:
                try:
                    self._states.up(daemon.resource, control.pid, daemon.gpus, daemon.replicas)
                    unwritten.update("")
                except MpsError as error:
                    unwritten.update(str(error))
                if not ready:
                    ready = True
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
        """Set the configured limits. The daemon reports no refusal, so the caller compares the limits afterwards.

        Raises:
            MpsError: it does not answer.
        """
        answer = await control.ask(*control.daemon.limits.commands, patience=self._tempo.answer)
        if UNKNOWN in answer and control.daemon not in self._without_limits:
            self._without_limits.add(control.daemon)
            log.warning("%s: its MPS daemon does not support a limit: %s", control.daemon.resource, answer)

    async def _differences(self, control: ControlDaemon) -> str:
        """Compare the daemon's limits with the configuration; empty if they are the same.

        Raises:
            MpsError: it does not answer. While another client occupies a daemon, the answer is empty.
        """
        limits = control.daemon.limits
        answer = await control.ask(*limits.questions, patience=self._tempo.answer)
        if threads_in(answer) is None:
            raise MpsError(f"its control answers {GET_THREADS!r} with {answer or 'nothing'!r}")
        return limits.differences(answer)

    async def _listening(self, control: ControlDaemon) -> None:
        """Wait until a new daemon answers, or at least listens. It sends no notification.

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
                    if Path(control.daemon.pipe, CONTROL).is_socket():  # noqa: ASYNC240 - one local stat
                        return
                    raise
                await anyio.sleep(min(tempo.probe, 0.1))
            else:
                return
