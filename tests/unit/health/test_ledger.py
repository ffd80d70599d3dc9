from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_plugin.health.latch import CLEAN_SAMPLES, Limits, Verdict
from gpu_plugin.health.ledger import Evidence, HealthLedger, Transition
from gpu_plugin.health.observation import Observation, Sample, XidEvent
from gpu_plugin.health.signals import SIGNALS
from gpu_plugin.health.xids import XidPolicy

BOUNDED = settings(max_examples=100, deadline=None)
LIMITS = Limits(shutdown=95, slowdown=89)
A, B = "GPU-aaaa", "GPU-bbbb"
LOST = Sample(fault="lost", detail="the GPU is lost")
HUNG = Sample(fault="hung", detail="no answer for 30 s")


def ledger(*uuids: str) -> HealthLedger:
    """A ledger that watches these GPUs."""
    made = HealthLedger(XidPolicy())
    for uuid in uuids or (A, B):
        made.watch(uuid, LIMITS)
    return made


def reasons(of: HealthLedger) -> dict[str, str]:
    """Why each of the two GPUs is not handed out."""
    return {uuid: of.reason(uuid) for uuid in (A, B)}


def hear(to: HealthLedger, *seen: Observation, uuid: str = A, start: float = 1_000.0) -> list[Transition]:
    """Every verdict that these observations of a GPU, one a second, change."""
    return [change for at, observation in enumerate(seen) for change in to.observe(uuid, observation, start + at)]


def restarted(from_: HealthLedger, *uuids: str) -> HealthLedger:
    """A new ledger that was told what the other one wrote down."""
    new = ledger(*uuids)
    new.replay(from_.evidence())
    return new


def test_a_gpu_is_healthy_until_there_is_evidence():
    fresh = ledger()
    assert (fresh.verdict(A), fresh.reason(A), fresh.evidence()) == (Verdict.OK, "", ())
    assert reasons(fresh) == {A: "", B: ""}


def test_a_gpu_that_is_not_watched_is_never_heard_of():
    fresh = ledger(A)
    assert hear(fresh, XidEvent(79), uuid=B) == []
    assert (fresh.verdict(B), reasons(fresh)) == (Verdict.OK, {A: "", B: ""})


def test_one_gpus_fault_is_that_gpus_alone():
    both = ledger()
    hear(both, XidEvent(79))
    assert both.verdict(A) is Verdict.FATAL
    assert reasons(both) == {A: "Xid 79 (GPU has fallen off the bus)", B: ""}


def test_a_reason_names_every_fault_the_oldest_first():
    one = ledger()
    hear(one, HUNG, XidEvent(119), LOST)
    assert one.reason(A) == "no answer for 30 s; Xid 119 (GSP RPC timeout); the GPU is lost"


def test_a_fault_that_the_driver_has_no_words_for_still_has_a_reason():
    one = ledger()
    hear(one, Sample(fault="lost"))
    assert one.verdict(A) is Verdict.FATAL
    assert one.reason(A) == "lost"


def test_evidence_still_being_gathered_is_no_reason_and_not_written_down():
    one = ledger()
    hear(one, Sample(temperature=94), Sample(fault="error", detail="x"))
    assert (one.verdict(A), one.reason(A), one.evidence()) == (Verdict.OK, "", ())


def test_new_limits_keep_what_is_known():
    one = ledger()
    hear(one, XidEvent(79))
    one.watch(A, Limits())
    assert one.verdict(A) is Verdict.FATAL


def test_new_limits_hold_from_then_on():
    one = ledger()
    one.watch(A, Limits(shutdown=50))
    hear(one, Sample(temperature=48), Sample(temperature=48))
    assert one.reason(A) == "48 °C, the GPU shuts down at 50 °C"


def test_only_an_xid_that_the_policy_calls_harmless_is_an_applications():
    one = ledger()
    assert one.application_xid(XidEvent(31))
    assert not one.application_xid(XidEvent(79))
    assert not one.application_xid(Sample())


# Transitions


def test_each_change_of_a_verdict_is_told_once_with_its_cause():
    one = ledger()
    words = "Xid 48 (double-bit ECC error)"
    seen: list[Observation] = [
        Sample(energy=5_000),
        XidEvent(48),
        XidEvent(48),
        *(Sample(energy=at) for at in (1, 2, 3, 4)),
    ]
    assert hear(one, *seen) == [
        Transition(A, "xid", Verdict.FATAL, Verdict.OK, words, 1_001.0),
        Transition(A, "xid", Verdict.OK, Verdict.FATAL, words, 1_001.0),
    ]


def test_signals_change_each_for_itself():
    one = ledger()
    assert [change.signal for change in hear(one, HUNG, LOST, XidEvent(79), Sample(), Sample(), Sample())] == [
        "unanswered",
        "lost",
        "xid",
        "lost",  # its energy was never known, so three answers are proof
        "unanswered",
    ]
    assert one.verdict(A) is Verdict.FATAL


# Restarts


def faulty() -> HealthLedger:
    """A ledger with every signal open on one GPU and one on another."""
    one = ledger()
    hear(one, Sample(temperature=95, energy=7_000), Sample(temperature=95, energy=7_100), XidEvent(48), LOST, HUNG)
    hear(one, HUNG, uuid=B)
    assert {entry.signal for entry in one.evidence() if entry.uuid == A} == set(SIGNALS)
    return one


def test_a_restart_changes_no_verdict_no_reason_and_no_evidence():
    before = faulty()
    after = restarted(before)
    assert reasons(after) == reasons(before)
    assert after.evidence() == before.evidence()


def test_being_told_twice_changes_nothing():
    before = faulty()
    after = restarted(before)
    after.replay(before.evidence())
    after.replay(reversed(before.evidence()))
    assert reasons(after) == reasons(before)
    assert after.evidence() == before.evidence()


def test_faults_of_one_moment_are_told_in_the_same_order_after_a_restart():
    before = ledger()
    for seen in (XidEvent(48), HUNG, LOST):
        before.observe(A, seen, 1_000.0)
    assert restarted(before).reason(A) == before.reason(A)


def test_what_is_known_by_now_is_not_overwritten_by_what_was_written_down():
    now = ledger()
    hear(now, XidEvent(79))
    now.replay([Evidence(A, "xid", "FATAL", "Xid 48", 1.0)])
    assert now.reason(A) == "Xid 79 (GPU has fallen off the bus)"


def test_what_was_written_down_holds_though_new_evidence_is_being_gathered():
    now = ledger()
    hear(now, Sample(temperature=94, fault="error", detail="x"))
    now.replay(
        [Evidence(A, "temperature", "FATAL", "too hot", 1.0), Evidence(A, "unanswered", "FATAL", "no answer", 2.0)]
    )
    assert now.reason(A) == "too hot; no answer"


@pytest.mark.parametrize(
    ("entry", "verdict"),
    [
        (Evidence(A, "xid", "FATAL", "x", 1.0), Verdict.FATAL),
        (Evidence(A, "xid", "DEGRADED", "x", 1.0), Verdict.DEGRADED),
        (Evidence(A, "xid", "OK", "x", 1.0), Verdict.OK),
        (Evidence(A, "xid", "a word of a later version", "x", 1.0), Verdict.FATAL),
        (Evidence(A, "a signal of a later version", "FATAL", "x", 1.0), Verdict.OK),
        (Evidence("GPU-gone", "xid", "FATAL", "x", 1.0), Verdict.OK),
    ],
)
def test_what_another_version_wrote_down(entry, verdict):
    one = ledger()
    one.replay([entry])
    assert one.verdict(A) is verdict
    assert one.verdict(B) is Verdict.OK
    assert bool(one.reason(A)) is (verdict is Verdict.FATAL)


@pytest.mark.parametrize("opening", [[XidEvent(48)], [LOST]])
def test_a_reset_while_we_were_away_is_proof_and_a_restart_alone_is_not(opening):
    before = ledger()
    hear(before, Sample(energy=9_000), *opening)
    same, reset = restarted(before), restarted(before)
    hear(same, *(Sample(energy=9_000 + at) for at in range(10)))
    hear(reset, *(Sample(energy=at) for at in range(CLEAN_SAMPLES)))
    assert (same.verdict(A), reset.verdict(A)) == (Verdict.FATAL, Verdict.OK)


def test_a_reset_that_was_seen_is_remembered_over_a_restart():
    before = ledger()
    hear(before, Sample(energy=9_000), XidEvent(48), Sample(energy=1))
    after = restarted(before)
    hear(after, Sample(energy=2), Sample(energy=3), Sample(energy=4))
    assert after.verdict(A) is Verdict.OK


# Whatever happens

temperatures = st.sampled_from([None, 20, 83, 84, 89, 92, 93, 95, 120])
samples = st.builds(
    Sample,
    temperature=temperatures,
    energy=st.none() | st.integers(0, 50),
    fault=st.sampled_from(["", "", "", "", "lost", "reset-required", "hung", "error"]),
    detail=st.sampled_from(["", "some words"]),
)
observations = samples | st.sampled_from([13, 31, 48, 79, 95]).map(XidEvent)
timed = st.lists(st.tuples(observations, st.floats(-10, 1000)), max_size=40)


def play(to: HealthLedger, story: list[tuple[Observation, float]], uuid: str = A) -> None:
    now = 1_000_000.0
    for seen, pause in story:
        now += pause
        to.observe(uuid, seen, now)


@BOUNDED
@given(timed)
def test_a_gpu_is_never_healthier_than_its_worst_open_fault(story):
    one = ledger()
    now = 1_000_000.0
    open_: dict[str, Verdict] = {}
    for seen, pause in story:
        now += pause
        for change in one.observe(A, seen, now):
            assert change.before is open_.get(change.signal, Verdict.OK)
            assert change.verdict is not change.before
            open_[change.signal] = change.verdict
        assert one.verdict(A) is max(open_.values(), default=Verdict.OK)
        assert bool(one.reason(A)) is (one.verdict(A) is Verdict.FATAL)
        assert {entry.signal for entry in one.evidence()} == {name for name, v in open_.items() if v is not Verdict.OK}


@BOUNDED
@given(timed, st.sampled_from([48, 79, 119]), timed)
def test_a_fatal_xid_stays_fatal_without_a_reset(before, xid, after):
    one = ledger()
    play(one, before)
    one.observe(A, XidEvent(xid), 1_000_000.0)
    energy = 50  # at least all that was seen before
    for seen, pause in after:
        if isinstance(seen, Sample) and seen.energy is not None:
            energy += seen.energy
            play(one, [(replace(seen, energy=energy), pause)])
        else:
            play(one, [(seen, pause)])
        assert one.verdict(A) is Verdict.FATAL
        assert f"Xid {xid}" in one.reason(A)


@BOUNDED
@given(st.lists(st.none() | st.integers(0, 50), max_size=30), st.sampled_from([XidEvent(48), LOST]))
def test_recovery_takes_energy_that_went_back_and_three_good_samples(energies, opening):
    one = ledger()
    hear(one, Sample(energy=25), opening)
    last, reset = 25, False
    for good, energy in enumerate(energies, 1):
        if energy is not None:
            reset, last = reset or energy < last, energy
        hear(one, Sample(energy=energy))
        healthy = reset and good >= CLEAN_SAMPLES
        assert one.verdict(A) is (Verdict.OK if healthy else Verdict.FATAL)
        if healthy:
            break


@BOUNDED
@given(timed, timed, st.randoms(use_true_random=False))
def test_a_gpus_health_never_depends_on_another(story, others, random):
    alone, together = ledger(A), ledger(A, B)
    rest = list(others)
    now = 1_000_000.0
    for seen, pause in story:
        now += pause
        while rest and random.random() < 0.5:
            together.observe(B, rest.pop()[0], now)
        assert together.observe(A, seen, now) == alone.observe(A, seen, now)
        assert (together.verdict(A), together.reason(A)) == (alone.verdict(A), alone.reason(A))
    assert [entry for entry in together.evidence() if entry.uuid == A] == list(alone.evidence())


@BOUNDED
@given(timed, timed)
def test_a_restart_at_any_moment_changes_no_verdict(story, others):
    one = ledger()
    now = 1_000_000.0
    for at, (seen, pause) in enumerate(story):
        now += pause
        one.observe(A, seen, now)
        if at < len(others):
            one.observe(B, others[at][0], now)
        again = restarted(one)
        assert reasons(again) == reasons(one)
        assert [again.verdict(uuid) for uuid in (A, B)] == [one.verdict(uuid) for uuid in (A, B)]
        assert again.evidence() == one.evidence()
        assert restarted(again).evidence() == one.evidence()
