"""Whether an MPS daemon has the limits of the configuration. Pure.

Any client may change them: the socket `control` is open to all users, and the daemon takes `set_default_...` commands from all
of them (seen with driver 535).
"""

import re

from gpu_plugin.mps.plan import GET_MEMORY, GET_THREADS, SET_MEMORY, UNKNOWN, MpsDaemon, same_threads, threads_in

_MIB = {"M": 1, "G": 1024, "T": 1024 * 1024}
"""Mebibytes by the unit of an answer."""


def questions(daemon: MpsDaemon) -> tuple[str, ...]:
    """Commands whose answers show the daemon's limits: of threads, then of memory for each device that has a limit."""
    return (GET_THREADS, *(f"{GET_MEMORY} {ordinal}" for ordinal, _ in _memory_limits(daemon)))


def differences(daemon: MpsDaemon, answer: str) -> str:
    """Compare the answer to `questions` with the configuration. Return a sentence, empty if the daemon has the limits.

    Memory is answered in whole units, rounded down, such as 79G for 81559M. So a change by less than one unit is not seen. A
    device without a limit has no answer. Daemons of drivers before R495 (CUDA 11.5) do not support memory limits.
    """
    threads = threads_in(answer)
    if threads is None or not same_threads(threads, daemon.threads):
        shown = f"{threads:.1f} %" if threads is not None else repr(answer or "nothing")
        return f"it gives each client {shown} of the threads, not {daemon.threads:g} %"
    if UNKNOWN in answer:
        return ""
    wanted, found = _memory_limits(daemon), answer.split()[1:]
    if len(found) != len(wanted):
        return f"it has not set or kept all of {len(wanted)} memory limits: it answers {' '.join(found) or 'nothing'!r}"
    for (ordinal, mebibytes), answered in zip(wanted, found, strict=True):
        if not _same_memory(mebibytes, answered):
            return f"it limits the memory of device {ordinal} to {answered}, not {mebibytes}M"
    return ""


def _memory_limits(daemon: MpsDaemon) -> list[tuple[str, int]]:
    """Devices of the daemon that have a memory limit, by their ordinals, and the limits in mebibytes."""
    commands = (command.split() for command in daemon.commands)
    return [(words[1], int(words[2].removesuffix("M"))) for words in commands if words[0] == SET_MEMORY]


def _same_memory(mebibytes: int, answered: str) -> bool:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([MGT])B?", answered)
    return found is not None and abs(float(found[1]) * _MIB[found[2]] - mebibytes) < _MIB[found[2]]
