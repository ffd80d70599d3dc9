"""The declaration of a signal, the context of an observation, and the decorator that makes a signal of a function.

The function takes its latch, an observation and the context. It returns the same latch if the observation does not concern it,
None if there is nothing left to store, and a new latch otherwise. A latch opens on evidence and closes on proof: missing
observations never close it.
"""

import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from gpu_plugin.config.choices import HEALTH_SIGNALS, Registry
from gpu_plugin.health.latch import NOTHING, UNMARKED, AnyLatch, LatchKey, Marks, Memory
from gpu_plugin.health.observation import Facts, Sample
from gpu_plugin.health.policy import HealthPolicy


class Context(msgspec.Struct, frozen=True):
    """The context of one observation. `now` is Unix time in seconds, `key` the latch that the signal's function returns.

    `marks` are the GPU's marks before this observation. `first` is True if there was no good look before. `action` is the
    recovery action that the driver last reported (`Sample.recovery_action`). `open` has the GPU's present latches. `unfit` is
    True if a signal that judges by its own readings calls the GPU FATAL. `xids` has the Unix time in seconds of the latest
    occurrence of each recent Xid, including the present observation, by number and by MIG device, "" for the whole GPU.
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
    peers_joined: bool = False  # True if another GPU of the node, of the same model, has joined an NVLink fabric


class Case(msgspec.Struct, frozen=True):
    """An open latch for which advice is computed at Unix time `now`. `gpu` is the GPU's uuid, for commands."""

    key: LatchKey
    latch: AnyLatch
    policy: HealthPolicy
    gpu: str = ""
    now: float = 0.0
    facts: Facts = Facts()


# (latch, observation of a kind in `Signal.sees`, context) → latch
Step = Callable[[Any, Any, Context], AnyLatch | None]


class SignalKind(Enum):
    """The kind of observation that a signal judges."""

    # Readings of a look. A fault shows in them as long as it lasts, so an operator's override makes it DEGRADED at
    # most.
    READING = "reading"
    EVENT = "event"  # An event, which the driver reports once. An operator's override removes the latch.
    ORDER = "order"  # An operator's order, which is no evidence about the GPU itself
    GUARD = "guard"  # The ledger's own hold on a GPU, because of its history or of other signals


class OperatorInfluence(Enum):
    """The influence of the operator on a signal's verdict."""

    FULL = "full"  # The policy, an override and disabled health checks change the verdict
    # As FULL, but the signal also counts if all health checks are disabled, because its causes can be enabled
    # separately.
    ENABLED = "enabled"
    NONE = "none"  # No influence, because the GPU cannot be served at all


class Signal(msgspec.Struct, frozen=True):
    """One signal: its function, the observations that it judges, and its words for people.

    `step` is its function. `sees` has the kinds of observation that the function gets. `asks` has the fields of a Sample that
    it needs. The function does not get a faultless look without a request for these fields, and a part without these fields
    does not support the signal. `memory` is the memory of a new latch. `parts` matches the `LatchKey.part` of its latches if a
    GPU can have several, each judged separately; None if there is a single latch. `influence` is the operator's. `recovers` is
    True if a latch closes by proof of a recovery (`proof.after_recovery`), which depends on the readings of other signals: such
    a signal is judged after the others.

    Words for people: `action` is advice, with `{gpu}` for the GPU. `clears` is the condition that ends a latch without recovery.
    Both can also be functions of the case. `recovery` names the recoveries that close a latch if they differ from the recoveries
    of its proof, and `shown` is a sentence about their evidence.

    `until` returns the Unix time in seconds at which silence closes a latch, None if that is not known yet. `overridable`
    returns True if an operator's override closes a latch although its verdict is essential.
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
    influence: OperatorInfluence = OperatorInfluence.FULL
    recovers: bool = False

    @property
    def essential(self) -> bool:
        """True if neither a policy nor an override changes its verdict. Orders are essential: they are the operator's own."""
        return self.influence is OperatorInfluence.NONE or self.kind is SignalKind.ORDER

    def takes_override(self, latch: AnyLatch) -> bool:
        """Return True if an operator's override has an effect on this latch."""
        return not self.essential or (self.overridable is not None and self.overridable(latch))

    @property
    def lasts(self) -> bool:
        """True if its latches stay after a boot: latches of orders that no look closes."""
        return self.kind is SignalKind.ORDER and Sample not in self.sees

    @property
    def of_process(self) -> bool:
        """True if it is a state of this process, such as a missing first look, and not evidence about the GPU."""
        return not self.sees


# Advice that several signals give
REPLACE = "have the GPU tested and replaced"
COOL = "check the node's cooling"
KERNEL_LOG = "look at the kernel's log; reload the driver or reboot the node"

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


# A decorator that makes the function the step of a signal. It takes the signal's name, and the other fields of
# `Signal`.
signal = _decorator(Signal)
