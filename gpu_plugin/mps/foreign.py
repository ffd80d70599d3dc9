"""Whether an MPS daemon that another program runs can be used, such as the mps-control-daemon of NVIDIA's DaemonSet. Pure.

Such a daemon holds no lock of ours. Two things tell of it: what the kernel and the file system say, which is looked at every
second, and what the daemon answers when it is asked for its threads' percentage, which costs a process, and the daemon five
lines of its log, and is therefore asked seldom (`due`).

Nor is it asked while whoever started it may still be setting its limits (`settled`): a control daemon has one client at a time,
and of two at once, one is refused, gets an empty answer, or waits for ever (seen with driver 535). NVIDIA's mps-control-daemon
gives up where a command of its own is refused.

The kernel's word is the lock that a control daemon keeps on `control_lock` in its pipe directory for as long as it lives (seen
with driver 535). Its other files stay when it ends, however it ends.

Of what the daemon was told, only the percentage can be verified. NVIDIA's daemon sets it last, so one that has it has its
memory limits too. Which GPUs the daemon serves cannot be asked; NVIDIA's serves all of the node.
"""

import msgspec
from msgspec.structs import replace

from gpu_plugin.config.sharing import MpsLimits
from gpu_plugin.mps.plan import same_threads, thread_percentage
from gpu_plugin.mps.remedies import ASK_OTHER, RESTART_OTHER, TO_DO, WAIT_FOR_OTHER

CONFIRM = 30.0  # seconds between two questions to a daemon that is up and holds its lock: these find one that hangs
LOOK_AGAIN = 3.0  # seconds between two questions to one that is down, or that holds no lock
SET_UP = 10.0  # seconds that a daemon is given for being told its limits, where no .started tells that it has been

Identity = tuple[int, ...]
"""Which file it is: device, inode, when it was made or written last in nanoseconds of Unix time. Empty where there is none."""


_DOWN = "its MPS daemon is down: gpu-plugin mps does not run on this node, and"


class Signs(msgspec.Struct, frozen=True):
    """What can be seen of a daemon without asking it.

    `control` is its socket, `started` the file .started that NVIDIA's makes once it has told the daemon its limits, `locked`
    whether a process holds the lock of a control daemon in the pipe directory.
    """

    control: Identity
    started: Identity = ()
    locked: bool = False


class Answer(msgspec.Struct, frozen=True):
    """How a question at the time `asked` (seconds of a steady clock) ended, and the signs that were seen just before.

    `threads` is the percentage that the daemon answered. Without one, `trouble` says why it cannot be used, or `unable` why
    it cannot be asked here at all. `misses` counts what it has not answered since it last did.
    """

    signs: Signs
    asked: float
    threads: float | None = None
    trouble: str = ""
    unable: str = ""
    misses: int = 0


def weighed(new: Answer, last: Answer | None) -> Answer:
    """The answer to go by: a daemon that lives, and answered before, may leave one question unanswered, on a busy node."""
    if last is None or last.threads is None or last.misses or not (new.trouble or new.unable):
        return new
    if new.signs.locked and new.signs.control == last.signs.control:
        return replace(last, signs=new.signs, asked=new.asked, misses=1)
    return new


def settled(signs: Signs, clock: float) -> bool:
    """Whether the daemon has been told its limits, as far as can be seen. `clock` is Unix time in seconds.

    A .started that is older than the socket tells of a daemon before this one.
    """
    return _started(signs) or not 0 <= clock - signs.control[2] / 1e9 < SET_UP


def _started(signs: Signs) -> bool:
    return bool(signs.started) and signs.started[2] >= signs.control[2]


def due(signs: Signs, last: Answer | None, now: float) -> bool:
    """Whether the daemon is to be asked (again): at once if its signs are others than when it was asked last."""
    if last is None or last.signs != signs:
        return True
    steady = signs.locked and not last.misses and not why_down(signs, last)
    return now - last.asked >= (CONFIRM if steady else LOOK_AGAIN)


def why_down(signs: Signs, last: Answer | None) -> str:
    """Why the daemon cannot be used by its signs now and its last answer (None: not asked yet); empty where it can.

    Its limits do not matter: any client can change them, and one client must not take the devices from all others.
    """
    if last is None or last.signs.control != signs.control:
        return f"{_DOWN} the daemon of another program has not answered yet{TO_DO}{WAIT_FOR_OTHER}"
    if last.signs.locked and not signs.locked:
        return f"{_DOWN} the daemon of another program has ended{TO_DO}{RESTART_OTHER}"
    if last.unable:
        return _unasked(signs, last.unable)
    if last.trouble or last.threads is None:
        return f"{_DOWN} no daemon of another program can be used: {last.trouble}{TO_DO}{RESTART_OTHER}"
    return ""


def doubt(answer: Answer, replicas: int, limits: MpsLimits) -> str:
    """Why a daemon that can be used may not have the limits of the configuration; empty if it has the limit of threads.

    It is to share each GPU among `replicas` clients, within `limits`.
    """
    if answer.unable:
        return (
            "its MPS daemon is taken to be up for as long as it holds its lock, but its limits are not verified: "
            f"{answer.unable}"
        )
    wanted = thread_percentage(replicas, limits)
    if answer.threads is None or same_threads(answer.threads, wanted):
        return ""
    return (
        f"its MPS daemon gives each client {answer.threads:g} % of a GPU's threads, not {wanted:g} %. Either a client changed "
        f"it: restart the daemon. Or its configuration differs: give it the configuration of this plugin ({replicas} replicas), "
        f"or set this resource's limits.activeThreadPercentage to {answer.threads:g}"
    )


def _unasked(signs: Signs, unable: str) -> str:
    """Why a daemon that cannot be asked here cannot be used: it can where its lock and .started are there."""
    if signs.locked and _started(signs):
        return ""
    missing, remedy = (
        ("there is no file .started of it beside its pipe directory", ASK_OTHER)
        if signs.locked
        else ("no process holds the lock of a control daemon in its pipe directory", RESTART_OTHER)
    )
    return f"{_DOWN} the daemon of another program cannot be asked ({unable}), and {missing}{TO_DO}{remedy}"
