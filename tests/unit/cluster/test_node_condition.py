"""The content of the condition and the taint, and the times of their writes."""

from typing import Any

import pytest

from gpu_plugin.cluster.node_api import Condition
from gpu_plugin.cluster.node_condition import (
    BURST,
    HEARTBEAT,
    LONGEST_MESSAGE,
    PATIENCE,
    PER,
    SPREAD,
    ConditionClock,
    ConditionContent,
    Fitness,
    GpuFitness,
    fitness_of,
    parsed,
    tainted,
    wanted,
)
from gpu_plugin.config.times import rfc3339
from gpu_plugin.devices.gpu_names import called
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.explain import explain
from gpu_plugin.health.observation import Order, Sample, XidEvent
from gpu_plugin.status import gpus
from tests.unit.health.ledgers import LOST, SEEN, A, B, ledger

GPUS = (Gpu(A, 0, pci_bus_id="00000000:1B:00.0"), Gpu(B, 1))
FALLEN, RESET, APPLICATION = XidEvent(79), XidEvent(48), XidEvent(13)
T = 1_760_000_000.0


def after(*seen, unseen=False):
    """Return the fitness of two GPUs after these observations of the first GPU."""
    made = ledger()
    if unseen:
        made.booted("boot-2")
    for each in seen:
        made.observe(A, each, T)
    entries = (gpus.gpu(gpu, explain(made, gpu, T), made.standing(gpu.uuid, None)) for gpu in GPUS)
    return tuple(fitness_of(called(gpu), entry) for gpu, entry in zip(GPUS, entries, strict=True))


def one(fitness, number=0, causes=()):
    return GpuFitness(f"GPU {number}", fitness, (f"why {number}",), causes or (fitness.value,))


@pytest.mark.parametrize(("seen", "fitness", "says"), [
    ((), Fitness.HEALTHY, ()),
    ((FALLEN,), Fitness.UNHEALTHY, ("Xid 79",)),
    ((LOST,), Fitness.UNHEALTHY, ("lost",)),
    ((APPLICATION,), Fitness.HEALTHY, ()),
    ((Order("cordon", "swap the fan"),), Fitness.HELD_BACK, ("swap the fan",)),
    ((Order("annotate"),), Fitness.HELD_BACK, ("annotation",)),
    ((Order("release"),), Fitness.HELD_BACK, ("maintenance",)),
    ((Order("cordon"), FALLEN), Fitness.UNHEALTHY, ("Xid 79",)),
    ((Sample(remap_pending=True), Sample(remap_pending=True), Sample(remap_pending=True)), Fitness.DEGRADED, ("remap",)),
])  # fmt: skip
def test_an_operators_order_is_no_fault(seen, fitness, says):
    first, second = after(*seen)
    assert (first.fitness, second.fitness) == (fitness, Fitness.HEALTHY)
    for words in says:
        assert any(words in why for why in first.why), first
    assert first.name == f"GPU 0 (0000:1b:00.0, {A})"


def test_what_has_not_been_looked_at_is_neither_fit_nor_unfit():
    assert {gpu.fitness for gpu in after(unseen=True)} == {Fitness.UNSEEN}
    assert after(Order("release"), unseen=True)[0].fitness is Fitness.HELD_BACK
    assert after(SEEN, unseen=True)[0].fitness is Fitness.HEALTHY


H, D, B_, U, N = Fitness.HEALTHY, Fitness.DEGRADED, Fitness.HELD_BACK, Fitness.UNHEALTHY, Fitness.UNSEEN


@pytest.mark.parametrize(("fitness", "trouble", "age", "status", "taint"), [
    ((H, H), "", 0, ("True", "AllGPUsHealthy"), False),
    ((H, D), "", 0, ("True", "GPUDegraded"), False),
    ((H, B_), "", 0, ("True", "GPUHeldBack"), False),
    ((D, B_), "", 0, ("True", "GPUDegraded"), False),
    ((U, H), "", 0, ("False", "GPUUnhealthy"), True),
    ((U, N), "", 0, ("False", "GPUUnhealthy"), True),
    ((N, H), "", PATIENCE - 1, None, None),
    ((N, H), "", PATIENCE, ("Unknown", "GPUNotSeen"), None),
    ((N, N), "not loaded", PATIENCE - 1, None, None),
    ((N, N), "not loaded", PATIENCE, ("Unknown", "DriverUnavailable"), None),
    ((U, U), "not loaded", 0, ("False", "GPUUnhealthy"), True),
    ((), "not loaded", PATIENCE, ("Unknown", "DriverUnavailable"), None),
    ((), None, PATIENCE, ("Unknown", "DriverUnavailable"), None),
    ((), "", PATIENCE, None, None),
    ((), "", 0, None, None),
])  # fmt: skip
def test_the_worst_gpu_speaks_and_nothing_is_said_before_it_is_known(fitness, trouble, age, status, taint):
    gpus = [one(each, number) for number, each in enumerate(fitness)]
    said = wanted(gpus, trouble, age)
    assert (said and (said.status, said.reason)) == status
    assert tainted(gpus) is taint


def test_the_message_names_a_few_and_is_bounded():
    gpus = [GpuFitness(f"GPU {number}", U, ("x" * 2000,), ("xid 79",), "reset it") for number in range(16)]
    said: Any = wanted(gpus, "", 0)
    assert len(said.message) <= LONGEST_MESSAGE
    assert said.message.startswith("16 of 16 GPUs are Unhealthy: GPU 0: xxx")
    assert said.message.endswith("; and 12 more")
    first: Any = wanted([GpuFitness("GPU 3", U, ("Xid 79 (fallen)",), ("xid 79",), "reboot the node"), one(H)], "", 0)
    assert first.message == "1 of 2 GPUs is Unhealthy: GPU 3: Xid 79 (fallen) (reboot the node)"


FINE, SICK = (
    ConditionContent("True", "AllGPUsHealthy", "fine"),
    ConditionContent("False", "GPUUnhealthy", "sick", "xid 79"),
)


class Written:
    """A clock, and the conditions that it had written."""

    def __init__(self, known=None):
        self.times = ConditionClock()
        self.times.update(known)
        self.now = 0.0
        self.log = []

    def want(self, wants, at, dice=0.0):
        """Returns the seconds until it is due; 0: it was written."""
        self.now = at
        if due := self.times.due(wants, at, T + at):
            return due
        condition = self.times.next(wants, T + at, dice)
        self.times.written(condition, wants, at)
        self.log.append(condition)
        return 0.0


def test_the_transition_is_of_the_status_alone():
    of = Written()
    of.want(FINE, 0)
    of.want(ConditionContent("True", "GPUDegraded", "hm", "x"), 10)
    of.want(SICK, 20)
    of.want(ConditionContent("False", "GPUUnhealthy", "sick", "xid 79, xid 48"), 30)
    assert [each.last_transition_time for each in of.log] == [rfc3339(T + at) for at in (0, 0, 20)]
    assert of.want(ConditionContent("False", "GPUUnhealthy", "sicker", "xid 79, xid 48"), 40) == 0
    assert of.log[-1].last_transition_time == rfc3339(T + 20)


def test_readings_that_change_are_no_news():
    of = Written()
    of.want(SICK, 0)
    assert of.want(ConditionContent("False", "GPUUnhealthy", "sick at 93 °C", "xid 79"), 10) > 200
    assert len(of.log) == 1


@pytest.mark.parametrize(("dice", "every"), [(0.0, HEARTBEAT), (0.5, HEARTBEAT * (1 + SPREAD / 2))])
def test_the_heartbeat_is_rare_and_spread(dice, every):
    of = Written()
    for second in range(3600):
        of.want(FINE, second, dice)
    assert len(of.log) == -(-3600 // every)
    assert len({each.last_transition_time for each in of.log}) == 1


def test_a_restart_writes_nothing_that_stands_and_keeps_the_transition():
    stands = Condition("GPUHealthy", "False", "GPUUnhealthy", "sick", rfc3339(T - 100), rfc3339(T - 5000))
    of = Written(stands)
    assert of.want(SICK, 0) == pytest.approx(200, abs=1)
    assert of.want(SICK, 201) == 0
    assert of.log[-1].last_transition_time == rfc3339(T - 5000)


def test_what_others_wrote_badly_or_a_clock_that_was_set_back_ends_in_a_heartbeat():
    for beat in ("", "nonsense", rfc3339(T + 9999)):
        assert Written(Condition("GPUHealthy", "True", "AllGPUsHealthy", "fine", beat, "")).want(FINE, 0) == 0
    assert parsed("nonsense") == 0


def test_a_gpu_that_flaps_is_no_storm():
    of = Written()
    for second in range(3600):
        of.want(SICK if second % 2 else FINE, second)
    assert len(of.log) <= BURST + 3600 / PER + 1
