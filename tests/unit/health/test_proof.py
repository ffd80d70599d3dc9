import pytest
from msgspec.structs import replace
from msgspec.structs import replace as changed

from gpu_plugin.health.latch import CLEAN_SAMPLES, NOTHING, AnyLatch, Latch, LatchKey, Marks, Proof, Recovery, Verdict
from gpu_plugin.health.observation import Facts, Sample
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.proof import after_recovery, recovered
from gpu_plugin.health.signal import Context
from tests.unit.health.ledgers import ERROR, HUNG, LOST, RESET_REQUIRED, energies

MARKS = Marks(energy=5_000, ecc=3, binding=1, counting=0, taken=2.0)
WITHOUT_ENERGY = replace(MARKS, energy=None, taken=None)
OPEN = {
    proof: Latch(NOTHING, Verdict.FATAL, "words", 1.0, proof, recovery=Recovery(MARKS))
    for proof in (Proof.QUIET, Proof.RESET, Proof.REBOOT)
}
recoverable = pytest.mark.parametrize("latch", OPEN.values(), ids=lambda latch: latch.proof.value)


def waiting(marks: Marks) -> AnyLatch:
    """One that a reset closes, told by these marks."""
    return replace(OPEN[Proof.RESET], recovery=Recovery(marks))


def look(latch: AnyLatch | None, *seen: Sample, unfit: bool = False) -> AnyLatch | None:
    """The latch after these observations, one a minute; None as soon as it is proven over."""
    for at, observation in enumerate(seen):
        ctx = Context(2.0 + 60.0 * at, LatchKey("x"), Facts(), HealthPolicy(), unfit=unfit)
        latch = latch and after_recovery(latch, observation, ctx)
    return latch


# What proves


@pytest.mark.parametrize(
    ("sign", "proven"),
    [
        (Sample(counting=0, energy=10), {Proof.QUIET, Proof.RESET}),
        (Sample(counting=0, energy=2_499), {Proof.QUIET, Proof.RESET}),
        (Sample(counting=7, energy=10), set()),
        (Sample(energy=10), set()),
        (Sample(counting=0, energy=2_500), set()),
        (Sample(counting=0, energy=4_999), set()),
        (Sample(counting=0, ecc_uncorrected=0), set()),
        (Sample(counting=0, energy=5_001, ecc_uncorrected=0), set()),
        (Sample(counting=0, binding=2), {Proof.QUIET, Proof.RESET, Proof.REBOOT}),
        (Sample(counting=0, energy=5_000), set()),
        (Sample(counting=0, energy=9_000), set()),
        (Sample(counting=0, ecc_uncorrected=3), set()),
        (Sample(counting=0, ecc_uncorrected=4), set()),
        (Sample(counting=0, binding=1), set()),
        (Sample(), set()),
    ],
)
def test_only_what_a_reset_or_more_sets_back_proves(sign, proven):
    assert {proof for proof, latch in OPEN.items() if look(latch, *[sign] * 10) is None} == proven


@recoverable
def test_nothing_that_was_never_known_proves(latch):
    blank = replace(latch, recovery=Recovery(Marks()))
    assert look(blank, *[Sample(counting=0, energy=1, ecc_uncorrected=0, binding=1)] * 10) is not None


@recoverable
def test_a_boot_that_was_told_of_proves_with_three_looks(latch):
    booted = replace(latch, recovery=Recovery(reset=True, rebound=True))
    assert look(booted, *[Sample()] * 2) is not None
    assert look(booted, *[Sample()] * 3) is None


@pytest.mark.parametrize("proof", [Proof.RMA, Proof.READING, Proof.APPLICATION, Proof.OPERATOR])
def test_no_reset_proves_what_asks_for_something_else(proof):
    held = Latch(NOTHING, Verdict.FATAL, "words", 1.0, proof, recovery=Recovery(MARKS))
    assert look(held, *[Sample(counting=0, energy=1, ecc_uncorrected=0, binding=2)] * 10) is not None


@pytest.mark.parametrize(
    ("sign", "proven"),
    [
        (Sample(counting=0, ecc_uncorrected=0), True),
        (Sample(counting=0, ecc_uncorrected=1), False),
        (Sample(counting=7, ecc_uncorrected=0), False),
        (Sample(counting=0, ecc_uncorrected=0, energy=1), False),
    ],
)
def test_the_count_of_errors_proves_a_reset_only_of_a_part_that_tells_no_energy(sign, proven):
    held = waiting(WITHOUT_ENERGY)
    assert (look(held, sign, *[changed(sign, energy=None)] * 2) is None) is proven


@pytest.mark.parametrize(("seconds", "proven"), [(5.0, False), (400.0, True)])
def test_energy_that_fell_to_more_than_any_gpu_can_have_drawn_since_is_no_reset(seconds, proven):
    held = replace(OPEN[Proof.RESET], recovery=Recovery(Marks(energy=4_000_000_000, counting=0, taken=2.0)))
    seen = Sample(counting=0, energy=700_000_000)
    assert recovered(held.recovery.marks, seen, 2.0 + seconds) is proven


@pytest.mark.parametrize("action", [0, 5])
def test_what_the_driver_asks_for_beside_the_gpu_does_not_stand_against_a_clean_look(action):
    held = look(OPEN[Proof.RESET], *[changed(one, recovery_action=action) for one in energies(10, 20, 30)])
    assert held is None


# Three looks


def test_three_clean_looks_since_the_reset_are_asked_for_and_those_before_do_not_count():
    held = OPEN[Proof.RESET]
    assert look(held, *energies(6_000, 7_000, 8_000, 10, 20)) is not None
    assert look(held, *energies(6_000, 7_000, 8_000, 10, 20, 30)) is None


def test_a_new_binding_begins_the_looks_of_a_reset_anew():
    held = OPEN[Proof.RESET]
    bound = Sample(counting=0, binding=2)
    assert look(held, *energies(10, 20), bound, bound) is not None
    assert look(held, *energies(10, 20), *[bound] * 3) is None


@pytest.mark.parametrize("unclean", [LOST, RESET_REQUIRED, HUNG, ERROR, Sample(counting=0, recovery_action=1)])
def test_a_look_that_is_not_clean_begins_the_row_anew(unclean):
    seen = [*energies(10, 20), unclean, *energies(30, 40)]
    assert look(OPEN[Proof.RESET], *seen) is not None
    assert look(OPEN[Proof.RESET], *seen, *energies(50)) is None


def test_no_look_is_clean_while_another_reading_calls_it_unfit():
    held = look(OPEN[Proof.RESET], *energies(10, *range(11, 40)), unfit=True)
    assert held is not None
    assert held.recovery.reset
    assert look(held, *energies(50, 51)) is not None
    assert look(held, *energies(50, 51, 52)) is None


def test_an_action_of_none_and_one_that_nobody_says_are_both_clean():
    assert (
        look(
            OPEN[Proof.RESET],
            Sample(counting=0, energy=1),
            Sample(counting=0, energy=2, recovery_action=0),
            Sample(counting=0, energy=3, recovery_action=None),
        )
        is None
    )


# What is remembered


def test_a_reset_shows_whatever_was_used_since_the_fault():
    young = waiting(Marks(energy=10, counting=0, taken=2.0))  # the fault came right after the driver was loaded
    assert look(young, *energies(10_000_000, 40_000_000, 600_000, 600_001)) is not None
    assert look(young, *energies(10_000_000, 40_000_000, 600_000, 600_001, 600_002)) is None


def test_a_mark_first_seen_after_the_fault_shows_a_later_reset():
    blank = replace(OPEN[Proof.RESET], recovery=Recovery(Marks()))
    assert look(blank, *energies(1_000, 2_000, 3_000, 4_000)) is not None
    assert look(blank, *energies(1_000, 2_000, 3_000, 4_000, 10, 20, 30)) is None


@pytest.mark.parametrize(
    "odd",
    [
        Sample(counting=7, energy=10),
        Sample(counting=7, energy=9_000),
        Sample(energy=10),
        Sample(counting=7),
        Sample(counting=7, ecc_uncorrected=0, binding=1),
    ],
)
@pytest.mark.parametrize("often", [1, 3])
def test_looks_that_compare_with_nothing_before_lose_no_mark(odd, often):
    """As where persistence mode was refused, or is off for a time: what compares again shows a reset meanwhile."""
    assert look(OPEN[Proof.RESET], *[odd] * often, *energies(6_000, 7_000, 8_000)) is not None
    assert look(OPEN[Proof.RESET], *[odd] * often, *energies(20, 30, 40)) is None
    counts = [changed(odd, energy=None, ecc_uncorrected=0)] * often
    assert look(waiting(WITHOUT_ENERGY), *counts, *[Sample(counting=0, ecc_uncorrected=0)] * 3) is None


def test_what_persistence_mode_counted_compares_no_more_once_the_driver_was_opened_without_it():
    """Closing the driver without persistence mode sets the counters back, which is no reset."""
    without = [Sample(counting=opening, energy=9_000) for opening in (7, 7, 8)]
    assert look(OPEN[Proof.RESET], *without, *energies(*range(20, 50, 10))) is not None
    assert look(OPEN[Proof.RESET], *without, *energies(6_000, 7_000, 8_000, 20, 30, 40)) is None, "a reset since"
    closed = [
        Sample(counting=0, energy=5_000, opening=6),
        Sample(counting=7, energy=10, opening=7),
        *[Sample(counting=0, energy=energy, opening=7) for energy in (20, 30, 40)],
    ]
    assert look(OPEN[Proof.RESET], *closed) is not None
    kept = [changed(one, opening=7) for one in closed]
    assert look(OPEN[Proof.RESET], *kept) is None, "one opening kept the GPU initialised"


def test_a_reset_that_the_next_look_contradicts_was_none():
    much = 10_000_000_000
    held = waiting(Marks(energy=much, counting=0, taken=0.0))
    again = energies(*range(much, much + 10))
    assert look(held, *energies(0), *again) is not None
    assert look(held, *energies(0, 0), *again) is not None
    assert look(held, *energies(5, 10, much, 20), *again) is not None
    assert look(held, *energies(5), *again, *energies(5, 10, 15)) is None, "a reset since"


def test_a_reset_is_over_with_more_energy_than_any_gpu_can_have_drawn_since():
    """Also where the counters of the looks do not compare with each other."""
    held = waiting(Marks(energy=10_000_000_000, counting=0, taken=0.0))
    seen = [*energies(5, 10), *[Sample(counting=7, energy=10_000_000_000 + more) for more in range(9)]]
    assert look(held, *seen) is not None


def test_a_binding_that_is_the_old_one_again_was_no_new_one():
    held = waiting(Marks(binding=1))
    first, second = Sample(counting=0, binding=1), Sample(counting=0, binding=2)
    assert look(held, second, *[first] * 9) is not None
    assert look(held, second, Sample(), *[first] * 9) is not None
    assert look(held, second, *[Sample()] * 9) is not None, "nothing confirms it"
    assert look(held, second, Sample(), second, second) is None


def test_a_count_of_errors_that_is_the_old_one_again_was_not_set_back():
    held = waiting(WITHOUT_ENERGY)
    old, cleared = Sample(counting=0, ecc_uncorrected=3), Sample(counting=0, ecc_uncorrected=0)
    assert look(held, cleared, *[old] * 9) is not None
    assert look(held, cleared, *[old] * 9, *[cleared] * 3) is None


def test_a_contradicted_reset_takes_no_boot_back():
    booted = replace(OPEN[Proof.RESET], recovery=Recovery(Marks(energy=10**10, counting=0), reset=True, rebound=True))
    assert look(booted, *energies(0, 10**10 + 1, 10**10 + 2, 10**10 + 3)) is None


@pytest.mark.parametrize("refused", ["temperature", "energy", "memory_used", "utilization"])
def test_a_look_with_a_core_reading_refused_is_not_clean(refused):
    seen = [changed(one, refused=frozenset({refused})) for one in energies(10, 20, 30, 40)]
    held = look(OPEN[Proof.RESET], *seen)
    assert held is not None
    assert (held.recovery.reset, held.recovery.clean) == (True, 0)
    assert look(held, *energies(50, 60, 70)) is None


def test_counters_of_one_opening_of_the_driver_compare_with_each_other():
    without = [Sample(counting=7, energy=energy) for energy in (9_000, 10, 20, 30)]
    assert look(OPEN[Proof.RESET], *without[:3]) is not None
    assert look(OPEN[Proof.RESET], *without) is None
    assert (
        look(OPEN[Proof.RESET], without[0], Sample(counting=8, energy=10), *energies(9_000, 9_100, 9_200)) is not None
    )


def test_the_time_of_an_energy_goes_with_it():
    """What was drawn is counted from when the mark was read, and not from when the first one was."""
    marks = Marks()
    for at, energy in enumerate((1_000_000_000, 4_000_000_000)):
        marks = marks.after(Sample(counting=0, energy=energy), 1_000.0 * at)
    assert marks.taken == 1_000.0
    assert marks.after(Sample(counting=0), 2_000.0) is marks
    assert not recovered(marks, Sample(counting=0, energy=1_000_000_000), 1_100.0)


def test_marks_that_nobody_knows_what_they_compare_with_compare_with_none():
    assert Marks(energy=5_000).comparing(Marks(energy=10)) == Marks()
    assert not recovered(Marks(energy=5_000, taken=0.0), Sample(energy=10), 1_000.0)


def test_a_look_that_is_not_clean_shows_a_reset_and_does_not_count():
    first = look(OPEN[Proof.RESET], Sample(counting=0, energy=10, recovery_action=1))
    assert first is not None
    assert (first.recovery.reset, first.recovery.clean) == (True, 0)


@pytest.mark.parametrize(
    ("asked", "clean"), [(frozenset({"energy"}), 0), (frozenset({"energy", "recovery_action"}), 1)]
)
def test_the_look_that_shows_a_reset_counts_only_where_the_driver_was_asked_whether_it_asks_for_something(asked, clean):
    ctx = Context(2.0, LatchKey("x"), Facts(says_action=True), HealthPolicy())
    gathered = replace(OPEN[Proof.RESET], recovery=Recovery(MARKS, clean=2))
    held = after_recovery(gathered, Sample(counting=0, energy=10, asked=asked), ctx)
    assert held is not None
    assert (held.recovery.reset, held.recovery.clean) == (True, clean)


def test_looks_without_a_reset_are_soon_no_reason_to_look_again():
    held: AnyLatch | None = OPEN[Proof.RESET]
    for _ in range(CLEAN_SAMPLES):
        held = look(held, Sample())
    assert held is not None
    assert not held.gathering
    assert look(held, Sample()) is held


def test_a_reset_that_was_seen_is_followed_up():
    held = look(OPEN[Proof.RESET], Sample(counting=0, energy=10))
    assert held is not None
    assert held.gathering


def test_a_look_in_which_the_recovery_action_is_unknown_does_not_count():
    """Whether the driver refused it for the moment, or it could not be true."""
    held: AnyLatch | None = OPEN[Proof.RESET]
    ctx = Context(2.0, LatchKey("x"), Facts(says_action=True), HealthPolicy())
    unknown = frozenset({"recovery_action"})
    for energy in range(10, 20):
        held = held and after_recovery(held, Sample(counting=0, energy=energy, unknown=unknown), ctx)
    assert held is not None
    assert held.recovery.reset
    for energy in range(20, 23):
        held = held and after_recovery(held, Sample(counting=0, energy=energy, recovery_action=0), ctx)
    assert held is None


def test_a_look_whose_core_readings_cannot_be_true_is_not_clean():
    bound = Sample(counting=0, binding=2)
    odd = changed(bound, unknown=frozenset({"temperature", "energy"}))
    assert look(OPEN[Proof.RESET], bound, *[odd] * 10) is not None
    assert look(OPEN[Proof.RESET], bound, odd, bound, bound) is not None
    assert look(OPEN[Proof.RESET], bound, odd, *[bound] * 3) is None


def test_the_count_of_errors_proves_nothing_of_a_part_that_reports_its_energy():
    """Also if the driver refuses the energy just when an operator clears the count, or it is unknown in that look."""
    cleared = Sample(counting=0, ecc_uncorrected=0)
    refused = changed(cleared, refused=frozenset({"energy"}))
    after = [changed(cleared, energy=energy) for energy in (9_000, 9_100, 9_200, 9_300)]
    for first in ([refused], [refused] * 3, [cleared]):
        assert look(waiting(WITHOUT_ENERGY), *first, *after) is not None
    assert not recovered(WITHOUT_ENERGY, refused, 3.0)
