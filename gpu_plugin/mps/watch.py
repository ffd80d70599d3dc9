"""Reports which MPS daemons of the node's resources can be used: ours by a lock, those of other programs by queries."""

import logging
import stat
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import anyio
import msgspec

from gpu_plugin.config.settings import Settings
from gpu_plugin.devices.mps_paths import CONTROL, STARTED, pipe_directory, resource_directory
from gpu_plugin.devices.sharing import MpsShared
from gpu_plugin.mps import control_program, directories, foreign, readiness
from gpu_plugin.mps.errors import MpsError, NotStartedError
from gpu_plugin.mps.foreign import Answer, Identity, Signs
from gpu_plugin.mps.limits import GET_THREADS, threads_in
from gpu_plugin.mps.pipe import lock_holder
from gpu_plugin.mps.readiness import Counts
from gpu_plugin.runtime.threads import NoAnswerError, SlowCall

log = logging.getLogger(__name__)

PATIENCE = 1.0  # seconds for reading the files and locks
ANSWER = 5.0  # seconds for a daemon to answer

AT_ONCE = 0.25
"""Seconds to wait for answers: a working daemon needs some milliseconds, and a later look gets a later answer."""

_STATE = "its MPS daemon's state"

_Reading = tuple[str, dict[str, tuple[str, Signs | None]], dict[str, Counts]]
"""The MPS root's path here; by resource why its daemon is down, and the signs of another program's daemon; the counts."""


class _Foreign(msgspec.Struct):
    """A resource's daemon that another program runs: its last answer, and the query under way."""

    answer: Answer | None = None
    question: SlowCall[Answer] = msgspec.field(default_factory=lambda: SlowCall("mps-question"))


class MpsWatch:
    """Stores the daemons' last answers. Call it on the event loop's thread; blocking calls run on other threads."""

    def __init__(self) -> None:
        self._looking: SlowCall[_Reading] = SlowCall("mps-readiness")
        self._foreign: dict[str, _Foreign] = {}
        self._logged_doubts: dict[str, str] = {}
        self.counts: dict[str, Counts] = {}
        """The newest counts of gpu-plugin mps, by resource."""

    async def look(self, settings: Settings, shared: Sequence[MpsShared]) -> dict[str, str]:
        """Return for each resource, by name, why its MPS daemon is down; empty if it is up."""
        try:
            root, seen, counts = await self._looking.fresh(partial(_read_state, settings.mps_root, shared), PATIENCE)
        except NoAnswerError:
            return {r.name: f"{_STATE} cannot be read in time; does the disk of --mps-root hang?" for r in shared}
        except OSError as error:
            return {r.name: f"{_STATE} cannot be read: {error.strerror}; is --mps-root right?" for r in shared}
        self.counts = counts or self.counts
        found = {name: why for name, (why, _) in seen.items()}
        others = {r.name: (r, signs) for r in shared if (signs := seen[r.name][1]) is not None}
        self._foreign = {name: self._foreign.get(name, _Foreign()) for name in others}
        now = anyio.current_time()
        for resource, signs in others.values():
            self._ask(self._foreign[resource.name], settings, root, resource, signs, now)
        until = now + AT_ONCE
        for kept in self._foreign.values():
            await kept.question.wait(max(0.0, until - anyio.current_time()))
        for name, (resource, signs) in others.items():
            answer = self._last_answer(self._foreign[name])
            found[name] = foreign.why_down(signs, answer)
            self._warn(
                name, "" if answer is None or found[name] else foreign.doubt(answer, resource.replicas, resource.limits)
            )
        return found

    def _ask(
        self, kept: _Foreign, settings: Settings, root: str, resource: MpsShared, signs: Signs, now: float
    ) -> None:
        answer = self._last_answer(kept)
        if (began := kept.question.started) is not None:
            if now - began > 2 * ANSWER:
                kept.answer = Answer(signs, now, trouble=f"{control_program.PROGRAM} hangs; no query is possible")
        elif foreign.settled(signs, time.time()) and foreign.due(signs, answer, now):
            roots = (settings.driver_root_ctr_path, settings.driver_root)
            pipe = pipe_directory(root, resource.name)
            kept.question.begin(partial(_answer, roots, pipe, signs, now))

    @staticmethod
    def _last_answer(kept: _Foreign) -> Answer | None:
        """Store the answer of a finished query, and return the answer to use."""
        if kept.question.back:
            kept.answer = foreign.answer_to_use(kept.question.take().done.result(), kept.answer)
        return kept.answer

    def _warn(self, name: str, doubt: str) -> None:
        """Log once that a daemon counts as up although its limits differ from the configuration or are unknown."""
        if doubt and self._logged_doubts.get(name) != doubt:
            log.warning("%s: %s", name, doubt)
        self._logged_doubts[name] = doubt


def _read_state(configured: str, shared: Sequence[MpsShared]) -> _Reading:
    """Read the state of these resources' daemons. Blocks. If gpu-plugin mps runs, daemons of other programs do not count.

    Raises OSError if the root cannot be read.
    """
    root = directories.root_here(configured)
    ours = {r.name: readiness.ready(root, r.name, gpus=r.gpus, replicas=r.replicas) for r in shared}
    supervised = readiness.supervised(root)
    found = {name: (why, signs_of(str(root), name) if why and not supervised else None) for name, why in ours.items()}
    return str(root), found, readiness.read_counts(root)


def signs_of(root: str, resource: str) -> Signs | None:
    """Read the signs of a daemon that serves a resource; None if there never was such a daemon. Blocks."""
    pipe = Path(pipe_directory(root, resource))
    control = _identity(pipe / CONTROL, stat.S_ISSOCK)
    if not control:
        return None
    return Signs(
        control,
        _identity(Path(resource_directory(root, resource), STARTED), stat.S_ISREG),
        bool(lock_holder(pipe)),
    )


def _identity(path: Path, kind: Callable[[int], bool]) -> Identity:
    try:
        status = path.lstat()
    except OSError:
        return ()
    return (status.st_dev, status.st_ino, status.st_mtime_ns) if kind(status.st_mode) else ()


def _answer(roots: Sequence[str], pipe: str, signs: Signs, now: float) -> Answer:
    try:
        program = control_program.find_program(roots)
        client = control_program.start_client((program,), {"CUDA_MPS_PIPE_DIRECTORY": pipe})
        answer = control_program.answer_of(client, GET_THREADS, ANSWER)
    except NotStartedError as error:
        return Answer(signs, now, unable=str(error))
    except MpsError as error:
        return Answer(signs, now, trouble=str(error))
    threads = threads_in(answer)
    trouble = "" if threads is not None else f"its control answers {GET_THREADS!r} with {answer!r}"
    return Answer(signs, now, threads, trouble)
