"""The signals by name. A new one is one function in one file, and one line here.

A function takes its latch, an observation and the context, and returns the latch it was given where the observation is not
its business, None once nothing is left to remember, and a new latch otherwise. It falls on evidence and rises on proof:
silence never closes a latch.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gpu_plugin.health.context import Case, Context
from gpu_plugin.health.grades import GRADED
from gpu_plugin.health.hysteresis import LEVEL
from gpu_plugin.health.latch import NOTHING, AnyLatch, Memory
from gpu_plugin.health.observation import (
    ApplicationError,
    DriverEvent,
    EventDelivery,
    Observation,
    Order,
    Sample,
    XidEvent,
)
from gpu_plugin.health.readings import Measured
from gpu_plugin.health.signals import (
    application_errors,
    clocks,
    driver_events,
    ecc,
    events,
    fabric,
    first_look,
    flapping,
    heat,
    lost,
    margin,
    nvlink,
    orders,
    pcie,
    presence,
    recovery_action,
    remapping,
    retired_pages,
    temperature,
    unanswered,
    unrepairable,
    xid,
)
from gpu_plugin.health.totals import Counted
from gpu_plugin.health.xid_advice import REBOOT as _REBOOT
from gpu_plugin.health.xid_advice import RESET as _RESET

Step = Callable[[Any, Observation, Context], AnyLatch | None]
"""(latch, observation, context) → latch."""


class SignalKind(Enum):
    """What a signal goes by."""

    READING = "reading"
    """What a look reads. It is still there to be read while it lasts: an operator who vouches for the GPU overrides it."""
    EVENT = "event"
    """What was told once and is over: an operator who vouches for the GPU has it forgotten."""
    ORDER = "order"
    """The operator's own word, which says nothing of the GPU itself."""
    GUARD = "guard"
    """What the ledger itself holds back, by what it has seen of the GPU and of other signals."""


class OperatorInfluence(Enum):
    """Who has a say in what a signal's verdict comes to."""

    OPERATOR = "operator"
    """The operator: by the policy, and by vouching for the GPU."""
    ENABLED = "enabled"
    """The same; but it counts also where all health checks are disabled, for what it goes by can be enabled by itself."""
    NOBODY = "nobody"
    """Nobody: it tells of a GPU that cannot be served at all."""


class EndsBy(Enum):
    """What ends a signal's latches."""

    BY_ITSELF = "by itself"
    """Its own readings, time, or whoever opened it."""
    RECOVERY = "recovery"
    """Proof of a recovery (`proof.after_recovery`). That asks what the readings of others come to: it is judged after them."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One signal: what it sees, what it remembers, and what is said of it.

    What it is: `step` is its function, `sees` has the kinds of observation that it is shown. `asks` has the fields of a
    Sample that it needs: a faultless look that asked for none of them is not shown to it, and a part that has none of them
    does not support it. `memory` is what a latch of it remembers. `parts` is what tells several latches of one GPU apart
    (`LatchKey.part`), each judged by itself; None: there is one. `say` and `ends` are as those enums have it.

    What people are told: `action` is what they are advised to do, with `{gpu}` for the GPU. `clears` is what closes it, where
    that is no recovery. Both may also be made of the case. `recovery` has the recoveries that end it, where they are others
    than its proof asks for, with `{reset}` for the commands; `shown` is what shows those.

    What a latch of it waits for: `until` is when (Unix seconds) silence ends it, None: not known yet. `answers` is whether
    good looks alone are missing of its recovery. `vouched` is whether an operator's word ends it although nobody else has a say.
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
    vouched: Callable[[Any], bool] | None = None
    until: Callable[[Any], float | None] | None = None
    answers: Callable[[Any], bool] | None = None
    parts: re.Pattern[str] | None = None
    say: OperatorInfluence = OperatorInfluence.OPERATOR
    ends: EndsBy = EndsBy.BY_ITSELF

    @property
    def essential(self) -> bool:
        """Whether its verdict is beyond the say of a policy and of an override: an order is the operator's word already."""
        return self.say is OperatorInfluence.NOBODY or self.kind is SignalKind.ORDER

    def takes_word(self, latch: AnyLatch) -> bool:
        """Whether an operator may vouch for the GPU in spite of this latch."""
        return not self.essential or (self.vouched is not None and self.vouched(latch))

    @property
    def lasts(self) -> bool:
        """Whether it outlives boots: an order that no look ends does."""
        return self.kind is SignalKind.ORDER and Sample not in self.sees

    @property
    def of_process(self) -> bool:
        """Whether it tells of what this process has not seen yet, and holds nothing against the GPU."""
        return not self.sees

    @property
    def numbered(self) -> bool:
        """Whether its latches are told apart by the Xids that they are of."""
        return self.parts is not None and XidEvent in self.sees


_REPLACE = "have the GPU tested and replaced"
_COOL = "check the node's cooling"
_KERNEL_LOG = "look at the kernel's log; reload the driver or reboot the node"
_ENABLED, _NOBODY, _RECOVERY = OperatorInfluence.ENABLED, OperatorInfluence.NOBODY, EndsBy.RECOVERY
_EVENT, _GUARD, _ORDER, _READING = SignalKind.EVENT, SignalKind.GUARD, SignalKind.ORDER, SignalKind.READING


SIGNALS: Mapping[str, Signal] = {
    # By their own readings
    "hung": Signal(unanswered.hung, _READING, _REBOOT, LEVEL, say=_NOBODY, clears="three answers in a row"),
    "unanswered": Signal(
        unanswered.unanswered, _READING, _KERNEL_LOG, unanswered.Answers(), clears="five answers in a row"
    ),
    "temperature": Signal(
        temperature.temperature, _READING, _COOL, Measured(), asks=("temperature",), clears=temperature.cooled
    ),
    "reset-required": Signal(
        lost.reset_required,
        _READING,
        _RESET,
        LEVEL,
        say=_NOBODY,
        clears="three looks in a row at which no reset is required",
    ),
    "slowdown-temperature": Signal(
        heat.slowdown_temperature,
        _READING,
        _COOL,
        heat.Hot(),
        asks=("temperature", "memory_temperature"),
        clears="GPU and memory 5 °C below their limits for two minutes",
    ),
    "margin": Signal(margin.margin, _READING, _COOL, margin.Trusted(), asks=("margin",), clears=margin.cooled),
    "hw-slowdown": Signal(
        clocks.hw_slowdown,
        _READING,
        "check the node's cooling and power supply",
        clocks.SlowMinutes(),
        asks=("clocks_event_reasons",),
        clears="ten minutes in which neither heat nor the power brake holds the clocks down",
    ),
    "sram-threshold": Signal(unrepairable.sram_threshold, _READING, _REPLACE, LEVEL, asks=("sram_threshold",)),
    "remap-failure": Signal(unrepairable.remap_failure, _READING, _REPLACE, LEVEL, asks=("remap_failure",)),
    "unrepairable-memory": Signal(
        unrepairable.unrepairable_memory, _READING, _REPLACE, LEVEL, asks=("unrepairable_memory",)
    ),
    "retired-pages": Signal(
        retired_pages.retired_pages,
        _READING,
        f"{_RESET}; at {retired_pages.REPLACED_AT} pages {_REPLACE}",
        LEVEL,
        asks=("retired_pending", "retired_pages"),
        clears="no retirement that waits for a reset",
    ),
    "driver": Signal(
        presence.driver,
        _READING,
        "load the driver, or bring it and its library to the same version",
        LEVEL,
        say=_NOBODY,
        clears="three looks in a row that the driver answers; it is replaced between gpu-plugin release and gpu-plugin resume",
    ),
    "vanished": Signal(
        presence.vanished,
        _READING,
        "look at the kernel's log and at lspci; bind the driver to the GPU again, or have the GPU reseated",
        LEVEL,
        say=_NOBODY,
        clears="three looks in a row that find it",
    ),
    recovery_action.NAME: Signal(
        recovery_action.recovery_action,
        _READING,
        recovery_action.advice,
        recovery_action.RequestedAction(),
        asks=("recovery_action",),
        clears="three looks in a row at which the driver asks for nothing",
    ),
    "fabric": Signal(
        fabric.fabric,
        _READING,
        "look at the fabric manager (nvidia-fabricmanager, or IMEX and the subnet manager) and at its log",
        GRADED,
        asks=("fabric",),
        clears="three looks in a row at a fabric that is joined and sound",
    ),
    "nvlink": Signal(
        nvlink.nvlink,
        _READING,
        _RESET,
        nvlink.Links(),
        asks=("nvlinks",),
        clears="three looks in a row at which every link is up that ever was",
    ),
    "nvlink-errors": Signal(
        nvlink.nvlink_errors,
        _EVENT,
        "look at nvidia-smi nvlink --errorcounters -i {gpu}, and at the links' cables or bridges",
        Counted(),
        asks=nvlink.COUNTERS,
        clears="an hour without a failed recovery and with few CRC errors",
    ),
    "pcie-width": Signal(
        pcie.pcie_width,
        _READING,
        "have the GPU, its riser or its slot inspected",
        LEVEL,
        asks=("pcie_width", "pcie_max_width"),
        clears="four looks in a row at all its lanes",
    ),
    "events": Signal(
        events.events,
        _READING,
        "look at the log of the plugin and of the kernel; reload the driver where it stays so",
        sees=(EventDelivery, XidEvent, DriverEvent),
        clears="the wait for the driver's events working again",
    ),
    # By proof of a recovery
    "lost": Signal(
        lost.lost,
        _READING,
        _REBOOT,
        lost.GONE,
        (Sample, Order),
        ends=_RECOVERY,
        say=_NOBODY,
        answers=lost.answering,
        recovery=lost.RECOVERY,
        shown=lost.SHOWN,
        vouched=lost.reached,
    ),
    xid.NAME: Signal(
        xid.xid,
        _EVENT,
        xid.advice,
        xid.Occurrences(),
        (Sample, XidEvent),
        until=xid.until,
        parts=re.compile("[0-9]{1,20}"),
        ends=_RECOVERY,
        say=_ENABLED,
    ),
    application_errors.NAME: Signal(
        application_errors.application_errors,
        _EVENT,
        f"see what the pods on it have in common, and whether they run elsewhere; if they do, {_RESET}",
        application_errors.Errors(),
        (Sample, ApplicationError),
        until=application_errors.until,
        ends=_RECOVERY,
    ),
    "ecc-uncorrected": Signal(
        ecc.ecc_uncorrected,
        _READING,
        _RESET,
        asks=("ecc_uncorrected",),
        clears="a count of uncorrected errors that was set back to 0",
        ends=_RECOVERY,
    ),
    "remap-pending": Signal(
        remapping.remap_pending,
        _READING,
        _RESET,
        asks=("remap_pending",),
        clears="no remapping that waits for a reset",
        ends=_RECOVERY,
    ),
    "driver-event": Signal(
        driver_events.driver_event,
        _EVENT,
        _RESET,
        driver_events.Quiet(),
        (Sample, DriverEvent),
        until=driver_events.until,
        parts=re.compile("0x[0-9a-f]{1,16}"),
        ends=_RECOVERY,
    ),
    "pcie-errors": Signal(
        pcie.pcie_errors,
        _EVENT,
        f"have the GPU, its riser or its slot inspected; {_RESET}",
        Counted(),
        asks=pcie.COUNTERS,
        clears="ten minutes without many replays",
        ends=_RECOVERY,
    ),
    # By other means
    orders.CORDON: Signal(
        orders.cordon,
        _ORDER,
        "lift it once new pods may have the GPU",
        sees=(Order,),
        clears=orders.lifting,
    ),
    orders.ANNOTATED: Signal(
        orders.annotated,
        _ORDER,
        "remove it from the annotation once new pods may have the GPU",
        sees=(Order,),
        clears=f"the Node's annotation {orders.ANNOTATION} no longer naming it",
    ),
    orders.MAINTENANCE: Signal(
        orders.maintenance, _ORDER, orders.advice, orders.Release(), (Order, Sample), clears=orders.resuming
    ),
    flapping.NAME: Signal(
        flapping.flapping,
        _GUARD,
        "find out what keeps failing before the GPU is used again",
        flapping.HealthDrops(),
        clears=flapping.clears,
        parts=re.compile(".{1,200}"),
        say=_ENABLED,
    ),
    first_look.NAME: Signal(first_look.first_look, _GUARD, _KERNEL_LOG, sees=(), clears="one good look", say=_NOBODY),
}
"""Signals by name, those first whose word the proofs of others heed."""
