"""The surroundings of an observation: a signal's third argument."""

from collections.abc import Mapping

import msgspec

from gpu_plugin.health.facts import Facts
from gpu_plugin.health.latch import UNMARKED, AnyLatch, LatchKey, Marks
from gpu_plugin.health.policy import HealthPolicy

_UNKNOWN = Facts()


class Context(msgspec.Struct, frozen=True):
    """One observation's surroundings. `now` is Unix time in seconds; `key` which latch is asked for.

    `marks` are the GPU's before this observation, `first` whether no good look at it came before; `action` is what the driver
    last said that it asks for (`Sample.recovery_action`). `open` are its latches as they are now; `unfit` whether a signal
    that judges by its own readings calls it FATAL now. `xids` says when (Unix seconds) each Xid of the last minutes came last on
    it, by number and by the MIG device that it was about, "" for the whole GPU; one that is told of now is among them.
    """

    now: float
    key: LatchKey
    facts: Facts
    policy: HealthPolicy
    marks: Marks = UNMARKED
    first: bool = False
    action: int | None = None
    open: Mapping[LatchKey, AnyLatch] = {}
    unfit: bool = False
    xids: Mapping[tuple[int, str], float] = {}


class Case(msgspec.Struct, frozen=True):
    """An open latch of which somebody wants to know what to do, at Unix time `now`; `gpu` is the uuid that commands name."""

    key: LatchKey
    latch: AnyLatch
    policy: HealthPolicy
    gpu: str = ""
    now: float = 0.0
    facts: Facts = _UNKNOWN
