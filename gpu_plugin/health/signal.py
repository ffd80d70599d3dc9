"""The declaration of a signal, the surroundings of what it is shown, and the decorator that makes one of a function.

The function takes its latch, an observation and the context, and returns the latch it was given where the observation is not
its business, None once nothing is left to remember, and a new latch otherwise. It falls on evidence and rises on proof:
silence never closes a latch.
"""

import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from gpu_plugin.config.choices import HEALTH_SIGNALS, Registry
from gpu_plugin.health.latch import NOTHING, UNMARKED, AnyLatch, LatchKey, Marks, Memory
from gpu_plugin.health.observation import Facts, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy


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
    peers_joined: bool = False
    """Whether another GPU of the node, of the same model, has joined an NVLink fabric."""


class Case(msgspec.Struct, frozen=True):
    """An open latch of which somebody wants to know what to do, at Unix time `now`; `gpu` is the uuid that commands name."""

    key: LatchKey
    latch: AnyLatch
    policy: HealthPolicy
    gpu: str = ""
    now: float = 0.0
    facts: Facts = Facts()


Step = Callable[[Any, Any, Context], AnyLatch | None]
"""(latch, observation of one of the kinds that the signal sees, context) → latch."""


class SignalKind(Enum):
    """The kind of observation that a signal goes by."""

    READING = "reading"
    """Readings of a look. A fault is still there to be read while it lasts: an operator's override makes it DEGRADED at most."""
    EVENT = "event"
    """An event that is reported once: an operator's override has it forgotten."""
    ORDER = "order"
    """The operator's own word, which says nothing of the GPU itself."""
    GUARD = "guard"
    """The ledger's own hold on a GPU, by what it has seen of the GPU and of other signals."""


class OperatorInfluence(Enum):
    """Who has a say in what a signal's verdict comes to."""

    OPERATOR = "operator"
    """The operator: by the policy, and by an override."""
    ENABLED = "enabled"
    """The operator; but it counts also where all health checks are disabled, for what it goes by can be enabled by itself."""
    NOBODY = "nobody"
    """Nobody: it tells of a GPU that cannot be served at all."""


class Signal(msgspec.Struct, frozen=True):
    """One signal: what it sees, what it remembers, and what is said of it.

    What it is: `step` is its function, `sees` has the kinds of observation that it is shown. `asks` has the fields of a
    Sample that it needs: a faultless look that asked for none of them is not shown to it, and a part that has none of them
    does not support it. `memory` is what a latch of it remembers. `parts` is what tells several latches of one GPU apart
    (`LatchKey.part`), each judged by itself; None: there is one. `say` is as that enum has it. `recovers` is whether its latches
    end by proof of a recovery (`proof.after_recovery`). That asks what the readings of others come to: it is judged after them.

    What people are told: `action` is what they are advised to do, with `{gpu}` for the GPU. `clears` is what closes it, where
    that is no recovery. Both may also be made of the case. `recovery` has the recoveries that end it, where they are others
    than its proof asks for, with `{reset}` for the commands; `shown` is what shows those.

    What a latch of it waits for: `until` is when (Unix seconds) silence ends it, None: not known yet. `overridable` is whether
    an operator's override ends it although its verdict is essential.
    """

    step: Step
    kind: SignalKind
    action: str | Callable[[Case], str]
    memory: Memory = NOTHING
    sees: tuple[type, ...] = (Sample,)
    asks: tuple[str, ...] = ()
    clears: str | Callable[[Case], str] = ""
    recovery: str = ""
    shown: str = ""
    overridable: Callable[[Any], bool] | None = None
    until: Callable[[Any], float | None] | None = None
    parts: re.Pattern[str] | None = None
    say: OperatorInfluence = OperatorInfluence.OPERATOR
    recovers: bool = False

    @property
    def essential(self) -> bool:
        """Whether its verdict is beyond the say of a policy and of an override: an order is the operator's word already."""
        return self.say is OperatorInfluence.NOBODY or self.kind is SignalKind.ORDER

    def takes_override(self, latch: AnyLatch) -> bool:
        """Whether an operator's override has an effect on this latch."""
        return not self.essential or (self.overridable is not None and self.overridable(latch))

    @property
    def lasts(self) -> bool:
        """Whether its latches outlive boots: an order that no look ends does."""
        return self.kind is SignalKind.ORDER and Sample not in self.sees

    @property
    def of_process(self) -> bool:
        """Whether it is about what this process has not seen yet, and holds nothing against the GPU."""
        return not self.sees

    @property
    def numbered(self) -> bool:
        """Whether its latches are told apart by the Xids that they are of."""
        return self.parts is not None and XidEvent in self.sees


REPLACE = "have the GPU tested and replaced"
COOL = "check the node's cooling"
KERNEL_LOG = "look at the kernel's log; reload the driver or reboot the node"
"""Advice that several signals give."""

DEFINED: Registry[Signal] = Registry(
    "health signal",
    HEALTH_SIGNALS,
    "HEALTH_SIGNALS in gpu_plugin/config/choices.py",
    "a file of gpu_plugin/health/signals",
)

F = TypeVar("F", bound=Step)
P = ParamSpec("P")


def _decorator(of: Callable[Concatenate[Step, P], Signal]) -> Callable[Concatenate[str, P], Callable[[F], F]]:
    def signal(name: str, /, *args: P.args, **kwargs: P.kwargs) -> Callable[[F], F]:
        def defined(step: F) -> F:
            DEFINED.enter(name, of(step, *args, **kwargs), step)
            return step

        return defined

    return signal


signal = _decorator(Signal)
"""A decorator: the function is the step of the signal of the name given first; the rest is as `Signal` has it."""
