"""How signals open, stay open and close: one table of signals, each with a bad look, a good look and their numbers."""

from typing import NamedTuple

import pytest
from msgspec.structs import replace

from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.observation import (
    DriverEvent,
    EventDelivery,
    Fabric,
    Facts,
    Fault,
    Observation,
    Order,
    Sample,
    XidEvent,
)
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signals import SIGNALS
from tests.unit.health.ledgers import (
    ERROR,
    H200,
    HUNG,
    LOST,
    RESET_REQUIRED,
    UNLOADED,
    VANISHED,
    energies,
)
from tests.unit.health.shipped import SHIPPED
from tests.unit.health.watching import GPU, UNGUARDED, Watched

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL
GOOD, UNREAD = Sample(temperature=40), Sample()
FAULTS = [LOST, HUNG, ERROR, RESET_REQUIRED, VANISHED, UNLOADED]


def asks(action: int) -> Sample:
    return Sample(counting=0, recovery_action=action)


def links(*up: bool) -> Sample:
    return Sample(nvlinks=up)


def fabric(state: int, status: int = 0, summary: int = 0) -> Sample:
    return Sample(nvlinks=(True, True), fabric=Fabric(state, status, summary=summary))


def pages(count: int, *, pending: bool) -> Sample:
    return Sample(retired_pages=count, retired_pending=pending, binding=1)


class Rule(NamedTuple):
    """A signal that its own readings close.

    It opens at the `enter`th bad look in a row, and closes at the `leave`th good look in a row, `every` seconds apart.
    `before` is seen first. `overridden` is the verdict after an operator's override.
    """

    signal: str
    bad: Observation
    good: Observation
    verdict: Verdict
    enter: int = 1
    leave: int = 3
    every: float = 5.0
    before: tuple[Observation, ...] = ()
    overridden: Verdict = DEGRADED
    policy: HealthPolicy = UNGUARDED

    def watched(self) -> Watched:
        """Return the GPU before its first bad look."""
        gpu = Watched(self.signal, H200, self.policy)
        gpu.see(*self.before)
        return gpu

    def opened(self) -> Watched:
        """Return the GPU with its signal open."""
        gpu = self.watched()
        assert gpu.see(*[self.bad] * self.enter, every=self.every) is self.verdict
        return gpu


UP = links(True, True)
JOINED = fabric(state=3, summary=1)
MARGIN = (Sample(margin=55),)
RULES = {
    "hung": Rule("hung", HUNG, GOOD, FATAL, overridden=FATAL),
    "reset-required": Rule("reset-required", RESET_REQUIRED, GOOD, FATAL, overridden=FATAL),
    "vanished": Rule("vanished", VANISHED, GOOD, FATAL, enter=2, overridden=FATAL),
    "driver": Rule("driver", UNLOADED, GOOD, FATAL, overridden=FATAL),
    "temperature": Rule(
        "temperature", Sample(temperature=94), Sample(temperature=83), FATAL, enter=2, leave=6, every=60
    ),
    "slowdown-temperature": Rule(
        "slowdown-temperature", Sample(temperature=89), Sample(temperature=84), DEGRADED, enter=4, leave=3, every=60
    ),
    "slowdown-temperature of memory": Rule(
        "slowdown-temperature",
        Sample(temperature=50, memory_temperature=95),
        Sample(temperature=50, memory_temperature=90),
        DEGRADED,
        enter=4,
        leave=3,
        every=60,
    ),
    "margin near shutdown": Rule(
        "margin", Sample(margin=-6), Sample(margin=3), FATAL, enter=2, leave=6, every=60, before=MARGIN
    ),
    "margin at slowdown": Rule(
        "margin", Sample(margin=-2), Sample(margin=3), DEGRADED, enter=4, leave=3, every=60, before=MARGIN
    ),
    "hw-slowdown": Rule(
        "hw-slowdown",
        Sample(clocks_event_reasons=0x40),
        Sample(clocks_event_reasons=0),
        DEGRADED,
        enter=11,
        leave=11,
        every=60,
    ),
    "pcie-width": Rule(
        "pcie-width",
        Sample(pcie_width=8, pcie_max_width=16),
        Sample(pcie_width=16, pcie_max_width=16),
        DEGRADED,
        enter=4,
        leave=4,
    ),
    "nvlink": Rule("nvlink", links(True, False), UP, DEGRADED, enter=2, before=(UP,)),
    "fabric being joined": Rule("fabric", fabric(state=2), JOINED, FATAL, enter=2, before=(JOINED,)),
    "fabric that failed": Rule("fabric", fabric(state=3, status=999), JOINED, FATAL, enter=2, before=(JOINED,)),
    "fabric unhealthy": Rule("fabric", fabric(state=3, summary=2), JOINED, FATAL, enter=2, before=(JOINED,)),
    "fabric limited": Rule("fabric", fabric(state=3, summary=3), JOINED, DEGRADED, enter=2, before=(JOINED,)),
    "recovery-action reset": Rule("recovery-action", asks(1), asks(0), FATAL),
    "recovery-action reboot": Rule("recovery-action", asks(2), asks(0), FATAL),
    "recovery-action drain": Rule("recovery-action", asks(3), asks(0), FATAL),
    "recovery-action IMEX": Rule("recovery-action", asks(5), asks(0), DEGRADED),
    "remap-pending": Rule("remap-pending", Sample(remap_pending=True), Sample(remap_pending=False), DEGRADED, leave=1),
    "retired-pages pending": Rule("retired-pages", pages(3, pending=True), pages(3, pending=False), DEGRADED, leave=1),
    "events": Rule("events", EventDelivery("Unknown Error"), EventDelivery(), DEGRADED, leave=1),
}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
SLOW = {name: rule for name, rule in RULES.items() if rule.enter > 1 and name != "hw-slowdown"}
LOOKS = {name: rule for name, rule in RULES.items() if isinstance(rule.bad, Sample)}


@rules
def test_bad_looks_open_a_signal_once(rule):
    gpu = rule.watched()
    assert gpu.see(*[rule.bad] * (rule.enter - 1), every=rule.every) is OK
    assert gpu.see(rule.bad) is rule.verdict
    assert (gpu.latch.since, gpu.overall) == (gpu.now - 5, rule.verdict)
    assert gpu.see(*[rule.bad] * 50) is rule.verdict
    assert [(change.before, change.verdict) for change in gpu.changes] == [(OK, rule.verdict)]
    assert not gpu.ledger.suspicious(GPU)


@pytest.mark.parametrize("rule", SLOW.values(), ids=SLOW)
@pytest.mark.parametrize("between", ["good", *FAULTS[:3], UNREAD])
def test_a_row_of_bad_looks_starts_again_after_any_other_look(rule, between):
    gpu, row = rule.watched(), [rule.bad] * (rule.enter - 1)
    assert gpu.see(*row, rule.good if between == "good" else between, *row) is OK
    assert gpu.see(rule.bad) is rule.verdict
    assert rule.watched().see(*[*row, rule.good] * 20) is OK


@rules
def test_good_looks_in_a_row_close_a_signal(rule):
    gpu = rule.opened()
    good = [rule.good] * (rule.leave - 1)
    assert gpu.see(*good, every=rule.every) is rule.verdict
    assert gpu.see(rule.good) is OK
    assert gpu.see(*[rule.bad] * rule.enter, every=rule.every) is rule.verdict
    assert gpu.see(*[*good, rule.bad] * 20, every=rule.every) is rule.verdict
    assert len(gpu.changes) == 3


@pytest.mark.parametrize("rule", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("between", [*FAULTS, "bad", "unread"])
def test_good_looks_start_again_after_any_other_look(rule, between):
    other = {"bad": rule.bad, "unread": rule.bad if rule.bad.fault else UNREAD}.get(between, between)
    gpu, good = rule.opened(), [rule.good] * (rule.leave - 1)
    assert gpu.see(*[other] * 20) is rule.verdict, "it proves nothing"
    assert gpu.see(*good, other, *good, every=rule.every) is rule.verdict
    assert gpu.see(rule.good) is OK


@pytest.mark.parametrize("rule", LOOKS.values(), ids=LOOKS)
def test_events_leave_a_signal_of_looks_as_it_is(rule):
    others = [XidEvent(31), DriverEvent(0x8), EventDelivery("x"), Order("uncordon")]
    assert rule.watched().see(*others) is OK
    gpu, good = rule.opened(), [rule.good] * (rule.leave - 1)
    gpu.see(*good, every=rule.every)
    assert gpu.see(*others, every=0.0) is rule.verdict
    assert gpu.see(rule.good) is OK


@pytest.mark.parametrize("rule", LOOKS.values(), ids=LOOKS)
def test_other_looks_open_nothing(rule):
    gpu = Watched(rule.signal, H200)
    others = [fault for fault in FAULTS if rule.bad.fault != fault.fault]
    assert set(gpu.steps(*[rule.good] * 20, *[UNREAD] * 20, *others * 5)) == {OK}
    assert rule.signal in ("margin", "nvlink", "hw-slowdown") or gpu.stored is None


@rules
def test_a_restart_keeps_the_verdict_and_good_looks_start_again(rule):
    gpu, good = rule.opened(), [rule.good] * (rule.leave - 1)
    gpu.see(*good, every=rule.every)
    assert gpu.restart() is rule.verdict
    assert gpu.see(*good, every=rule.every) is rule.verdict
    assert gpu.see(rule.good) is OK


@rules
def test_an_override_lasts_until_the_signal_closes(rule):
    gpu = rule.opened()
    assert gpu.override() is rule.overridden
    assert set(gpu.steps(*[rule.bad] * 20)) == {rule.overridden}
    assert gpu.restart() is rule.overridden
    assert gpu.see(*[rule.good] * rule.leave, every=rule.every) is OK
    assert gpu.see(*[rule.bad] * rule.enter, every=rule.every) is rule.verdict


@rules
def test_a_policy_changes_the_verdict_unless_the_signal_is_essential(rule):
    essential = SIGNALS[rule.signal].essential
    for verdict in (OK, DEGRADED, FATAL):
        policy = HealthPolicy(flap_hold=0, signals={rule.signal: verdict})
        gpu = rule._replace(policy=policy, verdict=rule.verdict if essential else verdict).opened()
        assert gpu.overall is rule.verdict if essential else gpu.overall >= verdict
    rule._replace(policy=HealthPolicy(flap_hold=0, judging=False), verdict=rule.verdict if essential else OK).opened()


# Signals that a reset closes


class Evidence(NamedTuple):
    """A signal that `seen` opens, and that a reset and three clean looks close."""

    signal: str
    seen: Observation
    verdict: Verdict
    overridden: Verdict = OK
    facts: Facts = Facts()

    def opened(self) -> Watched:
        """Return the GPU with its signal open, and its energy at 5 J."""
        gpu = Watched(self.signal, self.facts, SHIPPED)
        gpu.see(*energies(5_000))
        assert gpu.see(self.seen) is self.verdict
        return gpu


EVENTS = {0x800: FATAL, 0x2000: FATAL, 0x4000: FATAL, 0x400: DEGRADED, 0x1000: DEGRADED, 0x200: DEGRADED, 0x2: DEGRADED}
RESETS = {
    "lost": Evidence("lost", LOST, FATAL, overridden=FATAL),
    "xid 48": Evidence("xid", XidEvent(48), FATAL),
    "xid 119": Evidence("xid", XidEvent(119), FATAL),
    "xid 74": Evidence("xid", XidEvent(74), DEGRADED),
    **{f"event {kind:#x}": Evidence("driver-event", DriverEvent(kind), EVENTS[kind]) for kind in EVENTS},
}
resets = pytest.mark.parametrize("evidence", RESETS.values(), ids=RESETS)


@resets
def test_a_reset_and_three_clean_looks_close_a_signal(evidence):
    gpu = evidence.opened()
    since = gpu.latch.since
    assert gpu.see(*energies(*range(5_001, 5_100))) is evidence.verdict, "without a reset"
    assert (gpu.latch.since, len(gpu.changes)) == (since, 1)
    assert gpu.steps(*energies(10, 20, 30)) == [evidence.verdict, evidence.verdict, OK]


@resets
@pytest.mark.parametrize("between", [HUNG, ERROR, RESET_REQUIRED, asks(1), "evidence"])
def test_after_a_look_with_a_fault_the_clean_looks_start_again(evidence, between):
    gpu = evidence.opened()
    if between != "evidence":
        assert gpu.see(*energies(10, 20), between, *energies(30, 40)) >= evidence.verdict
        assert gpu.see(*[asks(0)] * 3, *energies(50, 60, 70)) is OK
        return
    assert gpu.see(*energies(10, 20), evidence.seen, *energies(*range(30, 60))) is evidence.verdict
    assert gpu.steps(*energies(5, 6, 7)) == [evidence.verdict, evidence.verdict, OK], "after another reset"


@resets
def test_a_reset_counts_over_a_restart_and_a_restart_is_none(evidence):
    gpu = evidence.opened()
    gpu.see(*energies(*range(5_001, 5_010)))
    assert gpu.restart() is evidence.verdict
    assert gpu.see(*energies(*range(5_010, 5_030))) is evidence.verdict
    assert gpu.restart() is evidence.verdict
    assert gpu.steps(*energies(10, 20, 30)) == [evidence.verdict, evidence.verdict, OK], "while no process ran"
    gpu = evidence.opened()
    gpu.see(*energies(10))
    gpu.restart()
    assert gpu.steps(*energies(20, 30, 40))[-2:] == [evidence.verdict, OK], "before the restart"


@resets
def test_an_override_lasts_until_the_next_evidence(evidence):
    gpu = evidence.opened()
    assert gpu.override() is evidence.overridden
    if evidence.overridden is OK:
        assert gpu.see(*energies(5_001)) is OK
        assert gpu.see(evidence.seen) is evidence.verdict


@resets
def test_a_boot_and_three_good_looks_close_a_signal(evidence):
    gpu = evidence.opened()
    gpu.ledger.booted("next")
    *held, last = gpu.steps(GOOD, GOOD, GOOD)
    assert last is OK
    assert evidence.verdict is DEGRADED or held == [FATAL, FATAL]


@resets
def test_other_observations_do_not_open_a_signal(evidence):
    gpu = Watched(evidence.signal, evidence.facts, SHIPPED)
    others = [replace(GOOD, energy=at) for at in range(5)] + [fault for fault in FAULTS if fault is not evidence.seen]
    assert set(gpu.steps(*others * 3, EventDelivery("x"), Order("uncordon"))) == {OK}


def test_each_fault_of_a_look_opens_its_own_signal():
    for fault in FAULTS:
        gpu = Watched("unanswered")
        gpu.see(*[fault] * 12)
        opened = {key.signal for key, _, _ in gpu.ledger.standing(GPU)}
        assert opened == {"unanswered" if fault.fault is Fault.ERROR else fault.fault.value}
