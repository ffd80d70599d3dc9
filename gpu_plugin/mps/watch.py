"""Reports which MPS daemons of the node's resources can be used. Queries the daemons of other programs."""

import logging
import stat
import time
from collections.abc import Mapping, Sequence
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
# Seconds to wait for answers: a working daemon needs some milliseconds, and a later look gets a later answer.
AT_ONCE = 0.25

_STATE = "its MPS daemon's state"


class _Reading(msgspec.Struct, frozen=True):
    """The files and locks below the MPS root, which is at `root` here.

    `down` has the reason for each resource whose daemon is down; empty if it is up. `others` has the signs of daemons of other
    programs. `counts` is empty if gpu-plugin mps does not run.
    """

    root: str
    down: Mapping[str, str]
    others: Mapping[str, Signs]
    counts: Mapping[str, Counts]


class _Other:
    """A resource's daemon that another program runs: its last answer, and the query under way."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.query: SlowCall[Answer] = SlowCall("mps-question")
        self.logged_doubt = ""

    def ask(self, settings: Settings, pipe: str, signs: Signs, now: float) -> None:
        """Begin a query if the daemon is due for it. A query that hangs is an answer, too."""
        self.update()
        if (began := self.query.started) is not None:
            if now - began > 2 * ANSWER:
                self.answer = Answer(signs, now, trouble=f"{control_program.PROGRAM} hangs; no query is possible")
        elif foreign.settled(signs, time.time()) and foreign.due(signs, self.answer, now):
            roots = (settings.driver_root_ctr_path, settings.driver_root)
            self.query.begin(partial(_answer, roots, pipe, signs, now))

    def update(self) -> None:
        """Store the answer of a finished query."""
        if self.query.back:
            self.answer = foreign.answer_to_use(self.query.take().done.result(), self.answer)

    def why_down(self, resource: MpsShared, signs: Signs) -> str:
        """Return why the daemon is down. Log once that it is up although its limits differ or are unknown."""
        self.update()
        why = foreign.why_down(signs, self.answer)
        doubt = "" if why or self.answer is None else foreign.doubt(self.answer, resource.replicas, resource.limits)
        if doubt and doubt != self.logged_doubt:
            log.warning("%s: %s", resource.name, doubt)
        self.logged_doubt = doubt
        return why


class MpsWatch:
    """Stores the daemons' last answers. Call it on the event loop's thread; blocking calls run on other threads."""

    def __init__(self) -> None:
        self._reading: SlowCall[_Reading] = SlowCall("mps-readiness")
        self._others: dict[str, _Other] = {}
        self.counts: Mapping[str, Counts] = {}
        """The newest counts of gpu-plugin mps, by resource."""

    async def look(self, settings: Settings, shared: Sequence[MpsShared]) -> dict[str, str]:
        """Return for each resource, by name, why its MPS daemon is down; empty if it is up."""
        try:
            read = await self._reading.fresh(partial(_read_state, settings.mps_root, shared), PATIENCE)
        except NoAnswerError:
            return {r.name: f"{_STATE} cannot be read in time; does the disk of --mps-root hang?" for r in shared}
        except OSError as error:
            return {r.name: f"{_STATE} cannot be read: {error.strerror}; is --mps-root right?" for r in shared}
        self.counts = read.counts or self.counts
        self._others = {name: self._others.get(name, _Other()) for name in read.others}
        now = anyio.current_time()
        for name, other in self._others.items():
            other.ask(settings, pipe_directory(read.root, name), read.others[name], now)
        for other in self._others.values():
            await other.query.wait(max(0.0, now + AT_ONCE - anyio.current_time()))
        of_others = {
            r.name: self._others[r.name].why_down(r, read.others[r.name]) for r in shared if r.name in self._others
        }
        return {**read.down, **of_others}


def _read_state(configured: str, shared: Sequence[MpsShared]) -> _Reading:
    """Read the state of these resources' daemons. If gpu-plugin mps runs, daemons of other programs do not count. Blocks.

    Raises OSError if the root cannot be read.
    """
    root = directories.root_here(configured)
    states = readiness.read(root)
    down = {r.name: readiness.why_down(root, states, r.name, r.gpus, r.replicas) for r in shared}
    if states is not None:
        return _Reading(str(root), down, {}, {name: state.counts for name, state in states.items()})
    others = {r.name: signs for r in shared if (signs := signs_of(str(root), r.name)) is not None}
    return _Reading(str(root), down, others, {})


def signs_of(root: str, resource: str) -> Signs | None:
    """Read the signs of a daemon that serves a resource; None if there never was such a daemon. Blocks."""
    pipe = Path(pipe_directory(root, resource))
    control = _identity(pipe / CONTROL, stat.S_IFSOCK)
    if not control:
        return None
    started = _identity(Path(resource_directory(root, resource), STARTED), stat.S_IFREG)
    if started and started[2] < control[2]:  # it is of an earlier daemon
        started = ()
    return Signs(control, started, bool(lock_holder(pipe)))


def _identity(path: Path, kind: int) -> Identity:
    try:
        status = path.lstat()
    except OSError:
        return ()
    return (status.st_dev, status.st_ino, status.st_mtime_ns) if stat.S_IFMT(status.st_mode) == kind else ()


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
