"""Whether an MPS daemon that another program runs can be used, such as the mps-control-daemon of NVIDIA's DaemonSet. Pure.

Such a daemon does not hold the lock that `readiness` uses. There are two other sources: its files and the kernel's locks,
which are read every second, and its answer to a query for its thread percentage. A query starts a process and adds five lines
to the daemon's log, so it is rare (`due`).

It is not queried while its program may still be setting its limits (`settled`). A control daemon accepts one client at a time;
a second client is refused, gets an empty answer, or waits forever (seen with driver 535). NVIDIA's mps-control-daemon ends if
its daemon refuses a command.

A running control daemon holds a lock on `control_lock` in its pipe directory (seen with driver 535). Its other files
remain when it ends for any reason.

Of the daemon's limits only the percentage can be verified. NVIDIA's program sets it last, so a daemon with the right percentage
has its memory limits too. A daemon cannot be queried for its GPUs; NVIDIA's serves all GPUs of the node.
"""

import msgspec
from msgspec.structs import replace

from gpu_plugin.config.sharing import MpsLimits
from gpu_plugin.mps.limits import same_threads, thread_percentage
from gpu_plugin.status.remedies import TO_DO

CONFIRM = 30.0  # seconds between two queries of a daemon with a lock, to find a daemon that hangs
LOOK_AGAIN = 3.0  # seconds between two queries of other daemons, which are down or hold no lock
SET_UP = 10.0  # seconds for setting a daemon's limits, if no file .started shows that they are set

Identity = tuple[int, ...]
"""Identifies a file: device, inode, time of creation or last write in nanoseconds of Unix time. Empty if it does not exist."""

_DOWN = "its MPS daemon is down: gpu-plugin mps does not run on this node, and"

_RESTART = (
    "restart the program that runs the daemon, such as the pod of NVIDIA's mps-control-daemon on this node; or end that program "
    "and run gpu-plugin mps in its place (the chart's value mps.enabled)"
)
_GIVE_PROGRAM = (
    "have nvidia-cuda-mps-control where this plugin can run it: install the driver's compute utilities on the node, and mount "
    "the driver's root at --driver-root-ctr-path; or end the program that runs the daemon and run gpu-plugin mps instead (the "
    "chart's value mps.enabled)"
)


class Signs(msgspec.Struct, frozen=True):
    """The state of a daemon's files and lock.

    Attributes:
        control: its socket.
        started: the file .started, which NVIDIA's program makes after it has set the limits; empty if the daemon is newer.
        locked: whether a process holds the lock of a control daemon in the pipe directory.
    """

    control: Identity
    started: Identity = ()
    locked: bool = False


class Answer(msgspec.Struct, frozen=True):
    """The result of a query at the time `asked` (seconds of a steady clock), with the signs just before the query.

    `threads` is the percentage that the daemon returned. Without it, `trouble` says why the daemon cannot be used, or
    `unable` why no query is possible here. `misses` is the number of queries without an answer since the last answer.
    """

    signs: Signs
    asked: float
    threads: float | None = None
    trouble: str = ""
    unable: str = ""
    misses: int = 0


def answer_to_use(new: Answer, last: Answer | None) -> Answer:
    """Return the answer to use: one unanswered query is ignored if the daemon lives and answered before (a busy node)."""
    if last is None or last.threads is None or last.misses or not (new.trouble or new.unable):
        return new
    if new.signs.locked and new.signs.control == last.signs.control:
        return replace(last, signs=new.signs, asked=new.asked, misses=1)
    return new


def settled(signs: Signs, clock: float) -> bool:
    """Return whether the daemon's limits seem to be set. `clock` is Unix time in seconds."""
    return bool(signs.started) or not 0 <= clock - signs.control[2] / 1e9 < SET_UP


def due(signs: Signs, last: Answer | None, now: float) -> bool:
    """Return whether to query the daemon now: at once if its signs have changed since the last query."""
    if last is None or last.signs != signs:
        return True
    steady = signs.locked and not last.misses and not why_down(signs, last)
    return now - last.asked >= (CONFIRM if steady else LOOK_AGAIN)


def why_down(signs: Signs, last: Answer | None) -> str:
    """Return why the daemon cannot be used, from its signs now and its last answer (None: no query yet); empty if it can.

    Its limits have no effect: any client can change them, and one client must not withdraw the devices of all others.
    """
    if last is None or last.signs.control != signs.control:
        return f"{_DOWN} the daemon of another program has not answered yet{TO_DO}wait some seconds; if it stays so, {_RESTART}"
    if last.signs.locked and not signs.locked:
        return f"{_DOWN} the daemon of another program has ended{TO_DO}{_RESTART}"
    if last.unable and not (signs.locked and signs.started):
        missing, remedy = (
            ("it has no file .started next to its pipe directory", _GIVE_PROGRAM)
            if signs.locked
            else ("no process holds the lock of a control daemon in its pipe directory", _RESTART)
        )
        return f"{_DOWN} the daemon of another program cannot be queried ({last.unable}), and {missing}{TO_DO}{remedy}"
    if last.trouble:
        return f"{_DOWN} no daemon of another program can be used: {last.trouble}{TO_DO}{_RESTART}"
    return ""


def doubt(answer: Answer, replicas: int, limits: MpsLimits) -> str:
    """Return why a usable daemon may not have the configured limits; empty if it has the limit of threads.

    The daemon should share each GPU among `replicas` clients within `limits`.
    """
    if answer.unable:
        return f"its MPS daemon counts as up while it holds its lock, but its limits are not verified: {answer.unable}"
    wanted = thread_percentage(replicas, limits)
    if answer.threads is None or same_threads(answer.threads, wanted):
        return ""
    return (
        f"its MPS daemon gives each client {answer.threads:g} % of a GPU's threads, not {wanted:g} %. Either a client changed "
        f"it: restart the daemon. Or its configuration differs: give it the configuration of this plugin ({replicas} replicas), "
        f"or set this resource's limits.activeThreadPercentage to {answer.threads:g}"
    )
