"""Which MPS daemons of the node's shared resources can be used: ours by their lock, those of another program by asking them."""

import fcntl
import logging
import os
import stat
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import msgspec

from gpu_plugin.config.settings import Settings
from gpu_plugin.devices.mps_paths import CONTROL, CONTROL_LOCK, STARTED, pipe_directory, resource_directory
from gpu_plugin.devices.sharing import MpsShared
from gpu_plugin.mps import control_program, directories, foreign, readiness
from gpu_plugin.mps.errors import MpsError, NotStartedError
from gpu_plugin.mps.foreign import Answer, Identity, Signs
from gpu_plugin.mps.plan import threads_in
from gpu_plugin.runtime.slow_call import SlowCall
from gpu_plugin.runtime.threads import NoAnswerError, Workers, begin

log = logging.getLogger(__name__)

PATIENCE = 1.0  # seconds for the file system to say how things are
ANSWER = 5.0  # seconds for a daemon to answer

AT_ONCE = 0.25
"""Seconds that a look waits for answers: a daemon in order needs some milliseconds, another is judged by a later look."""

_STATE = "its MPS daemon's state"

_Seen = tuple[str, dict[str, tuple[str, Signs | None]]]
"""The MPS root as it is found here; by resource why its daemon is down, and the signs of another program's."""

_FLOCK = "hhqqi4x"  # struct flock of fcntl(2) on 64-bit Linux: type, whence, start, length, process


class _Foreign(msgspec.Struct):
    """A resource's daemon that another program runs: what it answered last, and the question under way."""

    answer: Answer | None = None
    question: SlowCall[Answer] = msgspec.field(default_factory=lambda: SlowCall(partial(begin, name="mps-question")))


class MpsWatch:
    """Keeps in mind what daemons answered. From the event loop's thread; whatever blocks does so on others."""

    def __init__(self) -> None:
        self._looks = Workers("mps-readiness")
        self._looking: SlowCall[_Seen] = SlowCall(self._looks.begin)
        self._foreign: dict[str, _Foreign] = {}
        self._said: dict[str, str] = {}

    async def look(self, settings: Settings, shared: Sequence[MpsShared]) -> dict[str, str]:
        """Why the MPS daemon of each resource is down, by name; empty where it is up."""
        try:
            root, seen = await self._looking.fresh(partial(_seen, settings.mps_root, shared), PATIENCE)
        except NoAnswerError:
            return {r.name: f"{_STATE} cannot be read in time; does the disk of --mps-root hang?" for r in shared}
        except OSError as error:
            return {r.name: f"{_STATE} cannot be read: {error.strerror}; is --mps-root right?" for r in shared}
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
            answer = self._heard(self._foreign[name])
            found[name] = foreign.why_down(signs, answer, resource.replicas, resource.limits)
            self._tell(name, "" if answer is None or found[name] else answer.unable)
        return found

    def close(self) -> None:
        """Lets the thread that looks end."""
        self._looks.close()

    def _ask(
        self, kept: _Foreign, settings: Settings, root: str, resource: MpsShared, signs: Signs, now: float
    ) -> None:
        answer = self._heard(kept)
        if (began := kept.question.started) is not None:
            if now - began > 2 * ANSWER:
                kept.answer = Answer(signs, now, trouble=f"{control_program.PROGRAM} hangs; nothing can be asked")
        elif foreign.settled(signs, time.time()) and foreign.due(
            signs, answer, resource.replicas, resource.limits, now
        ):
            roots = (settings.driver_root_ctr_path, settings.driver_root)
            pipe = pipe_directory(root, resource.name)
            kept.question.begin(partial(_answer, roots, pipe, signs, now))

    @staticmethod
    def _heard(kept: _Foreign) -> Answer | None:
        """The answer to go by, a question that has ended meanwhile taken into account."""
        if kept.question.back:
            kept.answer = foreign.weighed(kept.question.take().done.result(), kept.answer)
        return kept.answer

    def _tell(self, name: str, unable: str) -> None:
        """Says once that a daemon counts as up without having been asked."""
        if unable and self._said.get(name) != unable:
            log.warning(
                "%s: its MPS daemon is taken to be up for as long as it holds its lock, but its limits are not verified: %s",
                name,
                unable,
            )
        self._said[name] = unable


def _seen(configured: str, shared: Sequence[MpsShared]) -> _Seen:
    """Looks at the daemons of these resources. Blocks. Where gpu-plugin mps runs, no other program's counts.

    Raises OSError where the root cannot be read.
    """
    root = directories.root_here(configured)
    ours = {r.name: readiness.ready(root, r.name, gpus=r.gpus, replicas=r.replicas) for r in shared}
    supervised = readiness.supervised(root)
    return str(root), {
        name: (why, signs_of(str(root), name) if why and not supervised else None) for name, why in ours.items()
    }


def signs_of(root: str, resource: str) -> Signs | None:
    """What can be seen of a daemon that serves a resource; None where none ever has. Blocks."""
    pipe = Path(pipe_directory(root, resource))
    control = _identity(pipe / CONTROL, stat.S_ISSOCK)
    if not control:
        return None
    return Signs(
        control,
        _identity(Path(resource_directory(root, resource), STARTED), stat.S_ISREG),
        _locked(pipe / CONTROL_LOCK),
    )


def _identity(path: Path, kind: Callable[[int], bool]) -> Identity:
    try:
        status = path.lstat()
    except OSError:
        return ()
    return (status.st_dev, status.st_ino, status.st_mtime_ns) if kind(status.st_mode) else ()


def _locked(path: Path) -> bool:
    """Whether a process holds a lock of fcntl(2) on a file. Asks the kernel alone, and takes none for itself."""
    stream = readiness.opened(path)
    if stream is None:
        return False
    with stream:
        question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        with suppress(OSError):  # a file system without locks
            return bool(struct.unpack(_FLOCK, fcntl.fcntl(stream, fcntl.F_GETLK, question))[0] != fcntl.F_UNLCK)
        return False


def _answer(roots: Sequence[str], pipe: str, signs: Signs, now: float) -> Answer:
    try:
        program = control_program.find_program(roots)
        client = control_program.start_client((program,), {"CUDA_MPS_PIPE_DIRECTORY": pipe})
        said = control_program.answer_of(client, control_program.GET_THREADS, ANSWER)
    except NotStartedError as error:
        return Answer(signs, now, unable=str(error))
    except MpsError as error:
        return Answer(signs, now, trouble=str(error))
    threads = threads_in(said)
    trouble = "" if threads is not None else f"its control answers {control_program.GET_THREADS!r} with {said!r}"
    return Answer(signs, now, threads, trouble)
