"""The signals by name. A new one is one function in one file, and one line here.

A function takes its latch, an observation and the context, and returns the latch it was given where the observation is not
its business, None once nothing is left to remember, and a new latch otherwise. It falls on evidence and rises on proof:
silence never closes a latch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpu_plugin.health.context import Context
from gpu_plugin.health.facts import Facts
from gpu_plugin.health.latch import Latch
from gpu_plugin.health.observation import (
    ApplicationError,
    DriverEvent,
    EventDelivery,
    Observation,
    Order,
    Sample,
    XidEvent,
)
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signals import (
    application_errors,
    clocks,
    driver_events,
    ecc,
    events,
    fabric,
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
from gpu_plugin.health.xids import REBOOT as _REBOOT
from gpu_plugin.health.xids import RESET as _RESET

Step = Callable[[Latch | None, Observation, Context], Latch | None]
"""(latch, observation, context) → latch."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One signal. `sees` are the kinds of observation that it is shown.

    `action` is what an operator is advised to do, in a few words in which `ID` stands for the GPU, or makes them of the latch;
    the commands of a reset are told with what closes it.

    `proves` tells that it waits for proof of a recovery: it is judged after those that go by their own readings.
    `essential`: it tells of a GPU that cannot be served at all, or of the operator's own order; no policy and no override
    changes that. `event`: its evidence is an event that is over, which an override therefore forgets, while that of
    others is still there to be read and is overridden for as long as it stays.
    `clears` says in a few words what closes it, where that is its own readings, or makes them of the GPU and the policy.
    `remembers`: its latch is worth keeping over a restart although it is not open, for it holds a count or a baseline.
    `asks` are the fields of a Sample that it needs: where the part has none of them, the signal is not supported there.
    """

    step: Step
    action: str | Callable[[Latch], str]
    sees: tuple[type, ...] = (Sample,)
    proves: bool = False
    essential: bool = False
    event: bool = False
    asks: tuple[str, ...] = ()
    clears: str | Callable[[Facts, HealthPolicy], str] = ""
    remembers: bool = False


_REPLACE = "have the GPU tested and replaced"
_COOL = "see to the node's cooling"

SIGNALS: Mapping[str, Signal] = {
    # By their own readings
    "hung": Signal(unanswered.hung, _REBOOT, essential=True, clears="three answers in a row"),
    "unanswered": Signal(
        unanswered.unanswered,
        "look at the kernel's log; reload the driver or reboot the node",
        clears="five answers in a row",
    ),
    "temperature": Signal(temperature.temperature, _COOL, asks=("temperature",), clears=temperature.cooled),
    "reset-required": Signal(
        lost.reset_required, _RESET, essential=True, clears="three looks in a row at which no reset is required"
    ),
    "slowdown-temperature": Signal(
        heat.slowdown_temperature,
        _COOL,
        asks=("temperature", "memory_temperature"),
        clears="GPU and memory 5 °C below their limits for two minutes",
    ),
    "margin": Signal(
        margin.margin,
        _COOL,
        asks=("margin",),
        clears=margin.cooled,
        remembers=True,
    ),
    "hw-slowdown": Signal(
        clocks.hw_slowdown,
        "see to the node's cooling and power supply",
        asks=("clocks_event_reasons",),
        clears="ten minutes in which neither heat nor the power brake holds the clocks down",
    ),
    "sram-threshold": Signal(unrepairable.sram_threshold, _REPLACE, asks=("sram_threshold",)),
    "remap-failure": Signal(unrepairable.remap_failure, _REPLACE, asks=("remap_failure",)),
    "unrepairable-memory": Signal(unrepairable.unrepairable_memory, _REPLACE, asks=("unrepairable_memory",)),
    "retired-pages": Signal(
        retired_pages.retired_pages,
        f"{_RESET}; at {retired_pages.REPLACED_AT} pages {_REPLACE}",
        asks=("retired_pending", "retired_pages"),
        clears="no retirement that waits for a reset",
    ),
    "driver": Signal(
        presence.driver,
        "load the driver, or bring it and its library to the same version",
        essential=True,
        clears="three looks in a row that the driver answers; it is replaced between gpu-plugin release and gpu-plugin resume",
    ),
    "first-look": Signal(
        presence.first_look,
        "look at the kernel's log; reload the driver or reboot the node",
        essential=True,
        clears="one good look",
    ),
    "vanished": Signal(
        presence.vanished,
        "look at the kernel's log and at lspci; bind the driver to the GPU again, or have the GPU reseated",
        essential=True,
        clears="three looks in a row that find it",
    ),
    "recovery-action": Signal(
        recovery_action.recovery_action,
        recovery_action.advice,
        asks=("recovery_action",),
        clears="three looks in a row at which the driver asks for nothing",
    ),
    "fabric": Signal(
        fabric.fabric,
        "look at the fabric manager (nvidia-fabricmanager, or IMEX and the subnet manager) and at its log",
        asks=("fabric",),
        clears="three looks in a row at a fabric that is joined and sound",
    ),
    "nvlink": Signal(
        nvlink.nvlink,
        _RESET,
        asks=("nvlinks",),
        clears="three looks in a row at which every link is up that ever was",
        remembers=True,
    ),
    "nvlink-errors": Signal(
        nvlink.nvlink_errors,
        "look at nvidia-smi nvlink --errorcounters -i ID, and at the links' cables or bridges",
        event=True,
        asks=("nvlink_failed_recoveries", "nvlink_crc_errors"),
        clears="an hour without a failed recovery and with few CRC errors",
    ),
    "pcie-width": Signal(
        pcie.pcie_width,
        "have the GPU, its riser or its slot looked at",
        asks=("pcie_width", "pcie_max_width"),
        clears="four looks in a row at all its lanes",
    ),
    "events": Signal(
        events.events,
        "look at the log of the plugin and of the kernel; reload the driver where it stays so",
        (EventDelivery, XidEvent, DriverEvent),
        clears="the wait for the driver's events working again",
    ),
    # By proof of a recovery
    "lost": Signal(lost.lost, _REBOOT, proves=True, essential=True),
    "xid": Signal(xid.xid, _RESET, (Sample, XidEvent), proves=True, event=True),
    "application-errors": Signal(
        application_errors.application_errors,
        f"see what the pods on it have in common, and whether they run elsewhere; if they do, {_RESET}",
        (Sample, ApplicationError),
        proves=True,
        event=True,
        remembers=True,
    ),
    "ecc-uncorrected": Signal(
        ecc.ecc_uncorrected,
        _RESET,
        proves=True,
        asks=("ecc_uncorrected",),
        clears="a count of uncorrected errors that was set back to 0",
    ),
    "remap-pending": Signal(
        remapping.remap_pending,
        _RESET,
        proves=True,
        asks=("remap_pending",),
        clears="no remapping that waits for a reset",
    ),
    "driver-event": Signal(driver_events.driver_event, _RESET, (Sample, DriverEvent), proves=True, event=True),
    "pcie-errors": Signal(
        pcie.pcie_errors,
        f"have the GPU, its riser or its slot looked at; {_RESET}",
        proves=True,
        event=True,
        asks=("pcie_fatal_errors", "pcie_replays"),
        clears="ten minutes without many replays",
    ),
    # By other means
    "cordon": Signal(orders.cordon, "lift it once new pods may have the GPU", (Order,), essential=True),
    "maintenance": Signal(orders.maintenance, "resume it once the work on it is done", (Order, Sample), essential=True),
    "flapping": Signal(
        flapping.flapping, "find out what keeps failing before the GPU is used again", event=True, remembers=True
    ),
}
"""Signals by name, those first whose word the proofs of others heed."""

OPERATORS = frozenset({"cordon", "maintenance"})
"""Signals that say nothing of the GPU itself."""

SEVERAL = frozenset({"driver-event", "xid", "flapping"})
"""Signals that keep several latches of one GPU, told apart by their `part`. They alone are told which, in `Context.key`."""
