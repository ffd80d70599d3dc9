"""The proof of a recovery: signs of a reset or a new binding, and the clean looks that must follow."""

import pytest
from msgspec.structs import replace

from gpu_plugin.health.latch import CLEAN_SAMPLES, NOTHING, AnyLatch, Latch, LatchKey, Marks, Proof, Recovery, Verdict
from gpu_plugin.health.observation import Facts, Sample
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.proof import after_recovery, recovered
from gpu_plugin.health.signal import Context
from tests.unit.health.ledgers import ERROR, HUNG, LOST, RESET_REQUIRED, energies

MARKS = Marks(energy=5_000, ecc=3, binding=1, counting=0, taken=2.0)
WITHOUT_ENERGY = replace(MARKS, energy=None, taken=None)
MUCH = 10_000_000_000


def waiting(marks: Marks = MARKS, proof: Proof = Proof.RESET, *, booted: bool = False) -> AnyLatch:
    """Return an open latch that this proof closes, with these marks."""
    return Latch(NOTHING, Verdict.FATAL, "words", 1.0, proof, recovery=Recovery(marks, reset=booted, rebound=booted))


def look(latch: AnyLatch | None, *seen: Sample, unfit: bool = False, says_action: bool = False) -> AnyLatch | None:
    """Return the latch after these looks, one a minute; None if it is proven over."""
    for at, sample in enumerate(seen):
        facts = Facts(says_action=says_action)
        ctx = Context(2.0 + 60.0 * at, LatchKey("x"), facts, HealthPolicy(), unfit=unfit)
        latch = latch and after_recovery(latch, sample, ctx)
    return latch


def at(energy: int | None = None, counting: int | None = 0, **more) -> Sample:
    return Sample(counting=counting, energy=energy, **more)


BOUND, ODD_BOUND = at(binding=2), at(binding=2, unknown=frozenset({"temperature", "energy"}))
OLD, CLEARED = at(ecc_uncorrected=3), at(ecc_uncorrected=0)
LATER = energies(6_000, 7_000, 8_000)
BY_RESET, BY_BINDING = {Proof.QUIET, Proof.RESET}, {Proof.QUIET, Proof.RESET, Proof.REBOOT}


@pytest.mark.parametrize(
    ("sign", "proofs"),
    [
        (at(10), BY_RESET),
        (at(2_499), BY_RESET),  # less than half of the energy before
        (at(2_500), set()),
        (at(4_999), set()),
        (at(5_000), set()),
        (at(9_000), set()),
        (at(10, counting=7), set()),  # the counters are not comparable
        (at(10, counting=None), set()),
        (at(5_001, ecc_uncorrected=0), set()),
        (CLEARED, set()),  # the part reports its energy
        (OLD, set()),
        (at(ecc_uncorrected=4), set()),
        (BOUND, BY_BINDING),
        (at(binding=1), set()),
        (Sample(), set()),
    ],
)
def test_a_sign_and_clean_looks_prove_some_recoveries(sign, proofs):
    assert {proof for proof in Proof if look(waiting(proof=proof), *[sign] * 10) is None} == proofs
    blank = waiting(Marks())
    assert look(blank, *[sign] * 10) is not None, "nothing was known before"


@pytest.mark.parametrize(
    ("marks", "seen", "proven"),
    [
        # The count of errors proves a reset of a part that reports no energy
        (WITHOUT_ENERGY, [CLEARED] * 3, True),
        (WITHOUT_ENERGY, [at(ecc_uncorrected=1)] * 3, False),
        (WITHOUT_ENERGY, [at(counting=7, ecc_uncorrected=0)] * 3, False),
        (WITHOUT_ENERGY, [at(1, ecc_uncorrected=0), CLEARED, CLEARED], False),
        (WITHOUT_ENERGY, [CLEARED, *[OLD] * 9], False),
        (WITHOUT_ENERGY, [CLEARED, *[OLD] * 9, *[CLEARED] * 3], True),
        *[
            (WITHOUT_ENERGY, [*first, *[at(energy, ecc_uncorrected=0) for energy in (9_000, 9_100, 9_200)]], False)
            for first in ([replace(CLEARED, refused=frozenset({"energy"}))] * 3, [CLEARED])
        ],
        # Looks before the sign do not count, and a new binding starts them again
        (MARKS, [*LATER, *energies(10, 20)], False),
        (MARKS, [*LATER, *energies(10, 20, 30)], True),
        (MARKS, [*energies(10, 20), BOUND, BOUND], False),
        (MARKS, [*energies(10, 20), *[BOUND] * 3], True),
        # Looks with a fault or a request are not clean
        *[
            (MARKS, [*energies(10, 20), unclean, *energies(*after)], len(after) == 3)
            for unclean in (LOST, RESET_REQUIRED, HUNG, ERROR, at(recovery_action=1))
            for after in ((30, 40), (30, 40, 50))
        ],
        *[(MARKS, [replace(one, recovery_action=action) for one in energies(10, 20, 30)], True) for action in (0, 5)],
        (MARKS, [at(1), at(2, recovery_action=0), at(3, recovery_action=None)], True),
        (MARKS, [BOUND, *[ODD_BOUND] * 10], False),
        (MARKS, [BOUND, ODD_BOUND, BOUND, BOUND], False),
        (MARKS, [BOUND, ODD_BOUND, *[BOUND] * 3], True),
        # Marks that were first seen after the fault, or right after the driver was loaded
        (Marks(energy=10, counting=0, taken=2.0), energies(10_000_000, 40_000_000, 600_000, 600_001), False),
        (Marks(energy=10, counting=0, taken=2.0), energies(10_000_000, 40_000_000, 600_000, 600_001, 600_002), True),
        (Marks(), energies(1_000, 2_000, 3_000, 4_000), False),
        (Marks(), energies(1_000, 2_000, 3_000, 4_000, 10, 20, 30), True),
        # One opening of the driver without persistence mode
        (MARKS, [at(energy, counting=7) for energy in (9_000, 10, 20)], False),
        (MARKS, [at(energy, counting=7) for energy in (9_000, 10, 20, 30)], True),
        (MARKS, [at(9_000, counting=7), at(10, counting=8), *energies(9_000, 9_100, 9_200)], False),
        # Closing the driver without persistence mode sets the counters back, which is no reset
        (MARKS, [*[at(9_000, counting=opening) for opening in (7, 7, 8)], *energies(20, 30, 40)], False),
        (MARKS, [*[at(9_000, counting=opening) for opening in (7, 7, 8)], *LATER, *energies(20, 30, 40)], True),
        # The next look contradicts the reset
        (Marks(energy=MUCH, counting=0, taken=0.0), energies(0, *range(MUCH, MUCH + 10)), False),
        (Marks(energy=MUCH, counting=0, taken=0.0), energies(0, 0, *range(MUCH, MUCH + 10)), False),
        (Marks(energy=MUCH, counting=0, taken=0.0), energies(5, 10, MUCH, 20, *range(MUCH, MUCH + 10)), False),
        (Marks(energy=MUCH, counting=0, taken=0.0), energies(5, *range(MUCH, MUCH + 10), 5, 10, 15), True),
        (
            Marks(energy=MUCH, counting=0, taken=0.0),
            [*energies(5, 10), *[at(MUCH + more, counting=7) for more in range(9)]],
            False,
        ),
        (Marks(binding=1), [BOUND, *[at(binding=1)] * 9], False),
        (Marks(binding=1), [BOUND, Sample(), *[at(binding=1)] * 9], False),
        (Marks(binding=1), [BOUND, *[Sample()] * 9], False),
        (Marks(binding=1), [BOUND, Sample(), BOUND, BOUND], True),
    ],
)
def test_a_recovery_needs_a_sign_that_stays_and_three_clean_looks(marks, seen, proven):
    assert (look(waiting(marks), *seen) is None) is proven


@pytest.mark.parametrize("proof", [Proof.QUIET, Proof.RESET, Proof.REBOOT])
def test_a_boot_proves_with_three_looks(proof):
    booted = waiting(Marks(), proof, booted=True)
    assert look(booted, *[Sample()] * 2) is not None
    assert look(booted, *[Sample()] * 3) is None
    booted = waiting(Marks(energy=MUCH, counting=0), proof, booted=True)
    assert look(booted, *energies(0, MUCH + 1, MUCH + 2, MUCH + 3)) is None, "no look contradicts a boot"


@pytest.mark.parametrize(("seconds", "proven"), [(5.0, False), (400.0, True)])
def test_an_energy_that_the_gpu_can_have_drawn_since_is_no_reset(seconds, proven):
    marks = Marks(energy=4_000_000_000, counting=0, taken=2.0)
    assert recovered(marks, at(700_000_000), 2.0 + seconds) is proven


def test_no_look_is_clean_while_another_reading_is_fatal():
    held = look(waiting(), *energies(10, *range(11, 40)), unfit=True)
    assert held is not None
    assert held.recovery.reset
    assert look(held, *energies(50, 51)) is not None
    assert look(held, *energies(50, 51, 52)) is None


@pytest.mark.parametrize(
    "odd",
    [
        at(10, counting=7),
        at(9_000, counting=7),
        at(10, counting=None),
        at(counting=7),
        at(counting=7, ecc_uncorrected=0),
    ],
)
@pytest.mark.parametrize("often", [1, 3])
def test_looks_whose_counters_are_not_comparable_lose_no_mark(odd, often):
    """For example while persistence mode is off."""
    assert look(waiting(), *[odd] * often, *LATER) is not None
    assert look(waiting(), *[odd] * often, *energies(20, 30, 40)) is None
    counts = [replace(odd, energy=None, ecc_uncorrected=0)] * often
    assert look(waiting(WITHOUT_ENERGY), *counts, *[CLEARED] * 3) is None


def test_one_opening_of_the_driver_keeps_the_counters_of_persistence_mode():
    for last, proven in ((7, False), (6, True)):
        seen = [
            at(5_000, opening=6),
            at(10, counting=7, opening=last),
            *[at(energy, opening=last) for energy in (20, 30, 40)],
        ]
        assert (look(waiting(), *seen) is None) is proven


@pytest.mark.parametrize("refused", ["temperature", "energy", "memory_used", "utilization"])
def test_a_look_with_a_refused_core_reading_shows_a_reset_and_is_not_clean(refused):
    for unclean in ({"refused": frozenset({refused})}, {"recovery_action": 1}):
        held = look(waiting(), *[replace(one, **unclean) for one in energies(10, 20, 30, 40)])
        assert held is not None
        assert (held.recovery.reset, held.recovery.clean) == (True, 0)
    assert look(held, *energies(50, 60, 70)) is None


@pytest.mark.parametrize(
    ("unanswered", "clean"),
    [
        ({"unknown": frozenset({"recovery_action"})}, 0),
        ({"asked": frozenset({"energy"})}, 0),
        ({"asked": frozenset({"energy", "recovery_action"})}, 1),
    ],
)
def test_a_look_counts_only_if_the_driver_was_asked_for_its_request(unanswered, clean):
    held = look(waiting(), at(10, **unanswered), says_action=True)
    assert held is not None
    assert (held.recovery.reset, held.recovery.clean) == (True, clean)
    for energy in range(20, 30):
        held = look(held, at(energy, unknown=frozenset({"recovery_action"})), says_action=True)
    assert held is not None
    assert look(held, *[at(energy, recovery_action=0) for energy in (30, 31, 32)], says_action=True) is None


def test_the_time_of_an_energy_is_stored_with_it():
    marks = Marks()
    for number, energy in enumerate((1_000_000_000, 4_000_000_000)):
        marks = marks.after(at(energy), 1_000.0 * number)
    assert marks.taken == 1_000.0
    assert marks.after(at(), 2_000.0) is marks
    assert not recovered(marks, at(1_000_000_000), 1_100.0)
    unknown = Marks(energy=5_000, taken=0.0)  # of an unknown opening
    assert unknown.comparing(Marks(energy=10)) == Marks()
    assert not recovered(unknown, at(10, counting=None), 1_000.0)
    assert not recovered(WITHOUT_ENERGY, replace(CLEARED, refused=frozenset({"energy"})), 3.0)


def test_only_a_reset_that_was_seen_asks_for_more_looks():
    held = look(waiting(), *[Sample()] * CLEAN_SAMPLES)
    assert held is not None
    assert not held.gathering
    assert look(held, Sample()) is held
    seen = look(waiting(), at(10))
    assert seen is not None
    assert seen.gathering
