"""One ledger and its GPUs: what is told of a change, whom evidence reaches, orders, boots, restarts."""

import pytest
from msgspec.structs import replace

from gpu_plugin.devices.node import Thresholds
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.latch import CLEAN_SAMPLES, LatchKey, Proof, Transition, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import (
    ApplicationError,
    DriverEvent,
    EventDelivery,
    Facts,
    Fault,
    Observation,
    Order,
    Sample,
    XidEvent,
)
from gpu_plugin.health.policy import HealthPolicy, describe
from gpu_plugin.health.record import REMEMBER_XIDS, GpuRecord
from gpu_plugin.health.signals import SIGNALS
from tests.unit.health.ledgers import (
    ERROR,
    GUARDED,
    H200,
    HUNG,
    LOST,
    RESET_REQUIRED,
    SEEN,
    UNGUARDED,
    A,
    B,
    energies,
    hear,
    ledger,
)

OK, APP, DEGRADED, FATAL = Verdict.OK, Verdict.APP, Verdict.DEGRADED, Verdict.FATAL
GOOD = Sample(temperature=40)
SLICES = {(1, 0): "MIG-1", (2, 0): "MIG-2", (3, 0): "MIG-3a", (3, 1): "MIG-3b"}
ALL = frozenset(SLICES.values())
XID_48 = "Xid 48 (double-bit ECC error)"


def reasons(of: HealthLedger) -> dict[str, str]:
    """Why each of the two GPUs is withheld."""
    return {uuid: of.reason(uuid) for uuid in (A, B)}


def restarted(from_: HealthLedger, *uuids: str) -> HealthLedger:
    """A new ledger that was told what the other one wrote down."""
    new = ledger(*uuids, policy=from_.policy)
    new.replay(from_.evidence())
    return new


def divided(slices: dict[tuple[int, int], str] = SLICES) -> HealthLedger:
    """A ledger of one GPU in MIG mode, and one that is not."""
    made = ledger(B)
    made.watch(A, H200, slices)
    made.observe(A, SEEN, 0.0)
    return made


def hit(of: HealthLedger) -> set[str]:
    """Which MIG devices of the GPU are unfit, and "" where the whole GPU is."""
    return {device for device in {"", *ALL} if of.verdict(A, device) is FATAL}


def test_a_gpu_is_healthy_until_there_is_evidence():
    fresh = ledger()
    assert (fresh.verdict(A), fresh.reason(A), fresh.evidence()) == (OK, "", ())
    assert reasons(fresh) == {A: "", B: ""}


@pytest.mark.parametrize(
    "seen", [GOOD, XidEvent(79), DriverEvent(0x800), EventDelivery("x"), Order("cordon"), ApplicationError(31), LOST]
)
def test_a_gpu_that_is_not_watched_is_never_heard_of(seen):
    fresh = ledger(A)
    assert hear(fresh, seen, uuid=B) == []
    assert (fresh.verdict(B), fresh.standing(B), fresh.unfit(B), fresh.suspicious(B)) == (OK, [], (), False)
    assert fresh.override(B) == ()
    assert fresh.facts(B) == Facts()
    assert reasons(fresh) == {A: "", B: ""}


@pytest.mark.parametrize("other", [XidEvent(31), DriverEvent(0x8), EventDelivery("x"), Order("resume")])
def test_what_is_no_look_neither_proves_nor_disproves_a_recovery(other):
    one = ledger()
    hear(one, *energies(5_000_000), XidEvent(48), *energies(10, 20), other)
    assert XID_48 in one.reason(A)
    hear(one, *energies(30), start=2_000.0)
    assert XID_48 not in one.reason(A)


def test_one_gpus_fault_is_that_gpus_alone():
    both = ledger()
    hear(both, XidEvent(79))
    assert both.verdict(A) is FATAL
    assert reasons(both) == {A: "Xid 79 (GPU has fallen off the bus)", B: ""}


def test_a_reason_names_every_fault_once_the_oldest_first():
    one = divided()
    hear(one, HUNG, XidEvent(119), LOST, XidEvent(48, 1, 0), XidEvent(48))
    assert one.reason(A, "MIG-1") == f"no answer for 30 s; {name(119)}; the GPU is lost; {XID_48}"


def name(xid: int) -> str:
    return describe(xid, GUARDED.xids.judge(xid).name)


def test_a_fault_that_the_driver_has_no_words_for_still_has_a_reason():
    one = ledger()
    hear(one, Sample(fault=Fault.LOST))
    assert one.reason(A) == "lost"


def test_evidence_still_being_gathered_is_no_reason_and_written_down_as_such():
    one = ledger()
    hear(one, Sample(temperature=94), ERROR)
    assert (one.verdict(A), one.reason(A)) == (OK, "")
    assert [(entry.signal, entry.verdict) for entry in one.evidence()] == [("unanswered", "OK")]
    assert one.suspicious(A)
    assert not one.suspicious(B)


def test_what_is_worth_a_look_is_no_reason():
    one = ledger()
    hear(one, ERROR, ERROR, ERROR)
    assert (one.verdict(A), one.reason(A)) == (DEGRADED, "")


def test_new_facts_keep_what_is_known_and_hold_from_then_on():
    one = ledger()
    hear(one, XidEvent(79))
    one.watch(A, Facts(Thresholds(shutdown=50)))
    hear(one, Sample(temperature=48), Sample(temperature=48))
    assert one.reason(A) == f"{name(79)}; 48 °C at its peak, shutdown threshold 50 °C"


def test_the_operators_word_on_a_signal_counts_at_once_and_for_what_is_open():
    one = ledger()
    hear(one, Sample(temperature=94), Sample(temperature=94))
    one.policy = replace(GUARDED, signals={"temperature": DEGRADED})
    assert one.verdict(A) is DEGRADED
    one.policy = replace(GUARDED, signals={"temperature": OK})
    assert one.verdict(A) is OK
    one.policy = GUARDED
    assert one.verdict(A) is FATAL


def test_what_another_policy_makes_of_open_faults_is_told_as_changes():
    one = ledger()
    hear(one, Sample(temperature=94), Sample(temperature=94))
    (milder,) = one.judge_by(replace(GUARDED, signals={"temperature": DEGRADED}))
    assert (milder.signal, milder.before, milder.verdict, milder.standing) == ("temperature", FATAL, DEGRADED, DEGRADED)
    assert one.judge_by(one.policy) == ()
    (harsher,) = one.judge_by(GUARDED)
    assert (harsher.before, harsher.verdict, harsher.standing) == (DEGRADED, FATAL, FATAL)


# Transitions


def test_each_change_of_a_verdict_is_told_once_with_its_cause():
    one = ledger()
    seen: list[Observation] = [Sample(counting=0, energy=5_000), XidEvent(48), XidEvent(48), *energies(1, 2, 3, 4)]
    began, over = hear(one, *seen)
    assert began == Transition(
        A,
        "xid",
        FATAL,
        OK,
        XID_48,
        1_001.0,
        xid=48,
        action="reset the GPU when no pod has it",
        xid_name="double-bit ECC error",
        standing=FATAL,
        part="48",
    )
    assert over == replace(began, verdict=OK, before=FATAL, action="", standing=OK)


def test_signals_change_each_for_itself_and_a_gpu_recovers_with_the_last():
    one = ledger()
    changes = hear(one, GOOD, HUNG, RESET_REQUIRED, Order("cordon"), GOOD, GOOD, GOOD, Order("uncordon"))
    assert [(change.signal, change.verdict, change.standing) for change in changes] == [
        ("hung", FATAL, FATAL),
        ("reset-required", FATAL, FATAL),
        ("cordon", FATAL, FATAL),
        ("hung", OK, FATAL),
        ("reset-required", OK, FATAL),
        ("cordon", OK, OK),
    ]
    assert [change.standing for change in hear(one, HUNG, GOOD, GOOD, GOOD)] == [FATAL, OK]


def test_a_change_against_one_slice_says_which():
    one = divided()
    (change,) = hear(one, XidEvent(46, 1, 0))
    assert (change.uuid, change.device, change.xid, change.standing) == (A, "MIG-1", 46, FATAL)


def test_what_the_policy_ignores_changes_nothing():
    one = ledger(policy=replace(GUARDED, signals={"hung": OK, "temperature": OK}))
    assert hear(one, Sample(temperature=94), Sample(temperature=94)) == []
    assert [change.signal for change in hear(one, HUNG)] == ["hung"]  # it cannot be served, whatever anybody says


# Whom an event reaches


@pytest.mark.parametrize(
    ("event", "reached"),
    [
        (XidEvent(46), {"", *ALL}),
        (XidEvent(46, 1, 0), {"MIG-1"}),
        (XidEvent(46, 2, 0), {"MIG-2"}),
        (XidEvent(46, 3, 0), {"MIG-3a"}),
        (XidEvent(46, 3, 1), {"MIG-3b"}),
        (XidEvent(46, 3), {"MIG-3a", "MIG-3b"}),
        (XidEvent(46, 3, 7), {"MIG-3a", "MIG-3b"}),  # a compute instance lies within its GPU instance
        (XidEvent(46, 9, 0), {"", *ALL}),
        (XidEvent(46, 0, 0), {"", *ALL}),
        (XidEvent(46, None, 0), {"", *ALL}),
        (XidEvent(79, 1, 0), {"", *ALL}),  # the hardware behind it is one for all
        (DriverEvent(0x800), {"", *ALL}),
        (LOST, {"", *ALL}),
        (Order("cordon"), {"", *ALL}),
    ],
)
def test_evidence_reaches_whom_it_is_about_and_no_other(event, reached):
    one = divided()
    hear(one, event)
    assert hit(one) == reached
    assert one.verdict(B) is OK
    assert hit(restarted_divided(one)) == reached


def restarted_divided(from_: HealthLedger) -> HealthLedger:
    new = divided()
    new.replay(from_.evidence())
    return new


@pytest.mark.parametrize("event", [XidEvent(46, 0, 0), XidEvent(46, 0xFF, 0xFF), XidEvent(46)])
def test_instances_of_a_gpu_without_any_are_the_gpu(event):
    one = ledger()
    hear(one, event)
    assert reasons(one) == {A: name(46), B: ""}


def test_a_reset_of_the_gpu_proves_for_its_slices():
    one = divided()
    hear(one, Sample(counting=0, energy=5_000), XidEvent(46, 1, 0), XidEvent(46, 2, 0), *energies(10, 20))
    assert hit(one) == {"MIG-1", "MIG-2"}
    changes = hear(one, *energies(30))
    assert {(change.device, change.verdict) for change in changes} == {("MIG-1", OK), ("MIG-2", OK)}
    assert hit(one) == set()


def test_cutting_a_gpu_anew_mends_nothing():
    one = divided()
    hear(one, Sample(counting=0, energy=5_000), XidEvent(46, 1, 0))
    one.watch(A, H200, {(2, 0): "MIG-2", (5, 0): "MIG-5"})
    assert {device: one.reason(A, device) for device in ("", "MIG-1", "MIG-2", "MIG-5")} == dict.fromkeys(
        ("", "MIG-1", "MIG-2", "MIG-5"), name(46)
    )
    one.watch(A, H200, SLICES)
    assert hit(one) == {"MIG-1"}
    one.watch(A, H200)
    hear(one, *energies(1, 2, 3))
    one.watch(A, H200, SLICES)
    assert hit(one) == set()


def test_kinds_of_driver_events_are_kept_apart():
    one = ledger()
    hear(one, DriverEvent(0x800), DriverEvent(0x2000), DriverEvent(0x8))
    assert [(key.signal, key.part) for key, _, _ in one.standing(A)] == [
        ("driver-event", "0x800"),
        ("driver-event", "0x2000"),
    ]


# Proof


def test_an_event_after_a_reset_that_nobody_saw_is_not_proven_by_it():
    """The looks of before the reset are older than the event, and what they showed proves nothing."""
    one = ledger()
    hear(one, Sample(counting=0, energy=5_000), XidEvent(48))
    after = restarted(one)  # meanwhile the GPU was reset, and then it failed again before it was looked at
    hear(after, XidEvent(48), *energies(*range(10, 40)))
    assert after.verdict(A) is FATAL
    hear(after, *energies(1, 2, 3))
    assert after.verdict(A) is OK


def test_a_look_that_the_driver_refuses_the_energy_does_not_renew_the_marks_of_an_earlier_process():
    one = ledger()
    hear(one, Sample(counting=0, energy=5_000), XidEvent(48))
    after = restarted(one)  # meanwhile the GPU was reset, and then it failed again
    hear(after, Sample(counting=0, refused=frozenset({"energy"})), XidEvent(48), *energies(*range(10, 40)))
    assert after.verdict(A) is FATAL


@pytest.mark.parametrize("event", [XidEvent(48), DriverEvent(0x800)])
def test_an_event_after_a_reset_needs_another_reset(event):
    one = ledger(policy=UNGUARDED)
    hear(one, Sample(counting=0, energy=5_000), event, *energies(10, 20), event, *energies(*range(30, 60)))
    assert one.verdict(A) is FATAL
    hear(one, *energies(5, 6))
    assert one.verdict(A) is FATAL
    hear(one, *energies(7))
    assert one.verdict(A) is OK


def test_an_event_after_maintenance_is_not_proven_by_what_was_done_before_it():
    one = ledger()
    hear(one, Sample(counting=0, energy=5_000), XidEvent(48), Order("release"), Order("resume"), XidEvent(119))
    hear(one, *energies(10, 20, 30, 40))
    assert one.reason(A) == name(119)


def test_a_reset_in_maintenance_proves():
    one = ledger()
    hear(one, Sample(counting=0, energy=5_000), XidEvent(48), Order("release"), Order("resume"), *energies(10, 20))
    assert one.reason(A) == XID_48
    hear(one, *energies(30))
    assert one.reason(A) == ""


def test_no_look_proves_a_recovery_while_another_reading_is_fatal():
    one = ledger()
    hear(
        one,
        Sample(counting=0, energy=5_000),
        XidEvent(48),
        Sample(counting=0, temperature=94, energy=10),
        Sample(counting=0, temperature=94, energy=20),
    )
    assert one.unfit(A) == ("temperature",)
    hear(one, *[Sample(counting=0, temperature=90, energy=at) for at in range(30, 40)])
    assert one.verdict(A) is FATAL
    assert "Xid 48" in one.reason(A)
    hear(one, Order("cordon"), *[Sample(counting=0, temperature=40, energy=at) for at in range(40, 45)], every=200)
    assert one.reason(A) == "cordoned"  # an order says nothing of the GPU, and holds up no proof


# An operator's word


def test_what_an_operator_vouches_for_is_handed_out_again():
    one = ledger()
    hear(one, XidEvent(48), DriverEvent(0x800), Sample(temperature=94), Sample(temperature=94))
    assert one.verdict(A) is FATAL
    changes = one.override(A)
    assert {(change.signal, change.verdict) for change in changes} == {
        ("xid", OK),
        ("driver-event", OK),
        ("temperature", DEGRADED),
    }
    assert (one.verdict(A), one.reason(A)) == (DEGRADED, "")
    assert one.override(A) == ()
    assert restarted(one).verdict(A) is DEGRADED


def test_what_still_reads_badly_counts_again_once_it_went_away_and_came_back():
    one = ledger(policy=replace(UNGUARDED, temperature_recovery=0, signals={"slowdown-temperature": OK}))
    hot, cool = [Sample(temperature=94)] * 2, [Sample(temperature=40)]
    hear(one, *hot)
    one.override(A)
    hear(one, *hot * 20)
    assert one.verdict(A) is DEGRADED
    hear(one, *cool)
    assert one.verdict(A) is OK
    hear(one, *hot)
    assert one.verdict(A) is FATAL


def test_an_operator_can_vouch_for_what_is_fatal_by_the_policy_alone():
    one = ledger(policy=replace(UNGUARDED, signals={"unanswered": FATAL}))
    hear(one, *[ERROR] * 3)
    assert one.verdict(A) is FATAL
    assert one.unfit(A) == ("unanswered",)
    one.override(A)
    assert one.verdict(A) is DEGRADED


def test_an_event_after_an_operator_vouched_counts():
    one = ledger()
    hear(one, XidEvent(48))
    one.override(A)
    hear(one, XidEvent(48))
    assert one.verdict(A) is FATAL


@pytest.mark.parametrize(
    "seen", [LOST, HUNG, RESET_REQUIRED, Sample(fault=Fault.DRIVER), Order("cordon"), Order("release")]
)
def test_no_word_of_an_operator_helps_a_gpu_that_cannot_be_served_or_is_kept_back(seen):
    one = ledger()
    hear(one, seen)
    evidence = one.evidence()
    assert one.override(A) == ()
    assert one.verdict(A) is FATAL
    assert one.evidence() == tuple(entry for entry in evidence if entry.verdict == "FATAL")  # counts are forgotten


def test_a_part_that_an_operator_vouches_for_is_sound_once_it_reads_so():
    one = ledger(policy=UNGUARDED)
    hear(one, *[Sample(remap_failure=True)] * 3)
    assert one.verdict(A) is FATAL
    hear(one, *[Sample(remap_failure=False)] * 20)
    assert one.verdict(A) is FATAL
    one.override(A)
    assert one.verdict(A) is DEGRADED
    hear(one, *[Sample(remap_failure=True)] * 3)
    assert one.verdict(A) is DEGRADED
    hear(one, *[Sample(remap_failure=False)] * 3)
    assert one.verdict(A) is OK


def test_in_a_storm_of_many_xids_those_of_the_last_minutes_are_remembered():
    known, last = GpuRecord(Facts()), 2 * REMEMBER_XIDS
    for number, at in ((1, 0.0), (2, last - REMEMBER_XIDS), *((number, last) for number in range(100, 200))):
        assert known.note_xid(number, ("",), at)
    assert {number for number, _ in known.xids} == {2, *range(100, 200)}


# A new boot under a process that lives on


def test_after_a_boot_three_good_looks_are_proof_enough():
    one = divided()
    hear(one, XidEvent(79), XidEvent(46, 1, 0), LOST)
    assert one.booted("boot-2") == ()
    assert one.verdict(A) is FATAL
    hear(one, GOOD, GOOD)
    assert one.verdict(A) is FATAL
    hear(one, GOOD)
    assert one.evidence() == ()
    assert hit(one) == set()


def test_after_a_boot_what_was_seen_before_it_proves_nothing_for_what_comes():
    one = ledger()
    hear(one, Sample(counting=0, energy=5_000))
    one.booted("boot-2")
    hear(one, XidEvent(48), *energies(*range(10, 30)))
    assert one.verdict(A) is FATAL


def test_good_looks_of_before_a_boot_do_not_count_towards_those_after_it():
    one = ledger()
    hear(one, RESET_REQUIRED, GOOD, GOOD)
    one.booted("boot-2")
    hear(one, GOOD, GOOD)
    assert one.verdict(A) is FATAL
    hear(one, GOOD)
    assert one.verdict(A) is OK


def test_a_boot_ends_what_an_operator_vouched_for():
    one = ledger()
    hear(one, *[Sample(sram_threshold=True)] * 3)
    one.override(A)
    assert one.verdict(A) is DEGRADED
    (change,) = one.booted("boot-2")
    assert (change.signal, change.verdict, change.before) == ("sram-threshold", FATAL, DEGRADED)
    hear(one, *[Sample(sram_threshold=False)] * 3)
    assert one.verdict(A) is OK


def test_a_cordon_outlives_a_boot_and_a_release_does_not():
    one = ledger()
    hear(one, Order("cordon"), Order("release"))
    one.booted("boot-2")
    assert one.reason(A) == "cordoned"
    hear(one, *[GOOD] * 5)
    assert one.reason(A) == "cordoned"
    assert {entry.boot_id for entry in one.evidence()} == {"boot-2"}


def test_the_same_boot_is_no_news():
    one = ledger()
    hear(one, Sample(counting=0, energy=5_000), XidEvent(48), *[GOOD] * 5)
    revision = one.revision
    one.booted("boot-1")
    hear(one, *[GOOD] * 5)
    assert one.verdict(A) is FATAL
    assert one.revision == revision


# Names


def test_what_was_held_against_a_made_up_name_goes_with_the_gpu():
    one = ledger("index-0", B, policy=UNGUARDED)
    hear(one, XidEvent(79), uuid="index-0")
    one.rename("index-0", A)
    assert (one.verdict(A), one.verdict("index-0"), one.verdict(B)) == (FATAL, OK, OK)
    assert [entry.uuid for entry in one.evidence()] == [A]


@pytest.mark.parametrize(("first", "second"), [(A, "index-0"), ("index-0", A)])
def test_of_two_names_the_worse_is_kept(first, second):
    one = ledger("index-0", A)
    hear(one, *[ERROR] * 10, uuid=first)
    hear(one, ERROR, uuid=second)
    one.rename("index-0", A)
    assert (one.verdict(A), one.verdict("index-0")) == (FATAL, OK)


def test_a_name_that_was_never_used_is_nobodys():
    one = ledger()
    one.rename("index-0", A)
    assert one.evidence() == ()


# Restarts


def faulty() -> HealthLedger:
    """A ledger with many signals open on one GPU and one on another."""
    one = ledger()
    hear(one, Sample(temperature=95, energy=7_000), Sample(temperature=95, energy=7_100), XidEvent(48), LOST, HUNG)
    hear(one, DriverEvent(0x400), Order("cordon"), Order("release"), RESET_REQUIRED, *[ERROR] * 4, XidEvent(31))
    hear(one, *[Sample(fault=Fault.VANISHED)] * 2, Sample(fault=Fault.DRIVER), EventDelivery("no answer"))
    hear(one, HUNG, uuid=B)
    return one


def test_a_restart_changes_no_verdict_no_reason_and_no_evidence():
    before = faulty()
    assert len({entry.signal for entry in before.evidence()}) == 14
    after = restarted(before)
    assert reasons(after) == reasons(before)
    assert after.evidence() == before.evidence()


def test_being_told_twice_changes_nothing():
    before = faulty()
    after = restarted(before)
    after.replay(before.evidence())
    after.replay(reversed(before.evidence()))
    assert after.evidence() == before.evidence()


def test_faults_of_one_moment_are_told_in_the_same_order_after_a_restart():
    before = ledger()
    for seen in (XidEvent(48), HUNG, LOST):
        before.observe(A, seen, 1_000.0)
    assert restarted(before).reason(A) == before.reason(A)


def test_what_is_known_by_now_is_not_overwritten_by_what_was_written_down():
    now = ledger()
    hear(now, LOST)
    now.replay([Evidence("boot-1", A, "lost", "FATAL", "earlier words", 1.0)])
    assert now.reason(A) == "the GPU is lost"


def test_what_was_written_down_holds_though_new_evidence_is_being_gathered():
    now = ledger()
    hear(now, Sample(temperature=94), ERROR)
    now.replay(
        [
            Evidence("boot-1", A, "temperature", "FATAL", "too hot", 1.0),
            Evidence("boot-1", A, "unanswered", "FATAL", "no answer", 2.0),
        ]
    )
    assert now.reason(A) == "too hot; no answer"


@pytest.mark.parametrize(
    ("entry", "verdict"),
    [
        (Evidence("", A, "xid", "FATAL", "x", 1.0, part="48"), FATAL),
        (Evidence("", A, "xid", "DEGRADED", "x", 1.0, part="48"), DEGRADED),
        (Evidence("", A, "xid", "OK", "x", 1.0, part="48"), OK),
        (Evidence("", A, "xid", "a word of a later version", "x", 1.0, part="48"), FATAL),
        (Evidence("", A, "xid", "FATAL", "x", 1.0), OK),
        (Evidence("", A, "xid", "FATAL", "x", 1.0, part="forty-eight"), OK),
        (Evidence("", A, "a signal of a later version", "FATAL", "x", 1.0), OK),
        (Evidence("", A, "hung", "FATAL", "x", 1.0, part="of a later version", device="MIG-1"), FATAL),
        (Evidence("", "GPU-gone", "hung", "FATAL", "x", 1.0), OK),
    ],
)
def test_what_another_version_wrote_down(entry, verdict):
    one = ledger()
    one.replay([entry])
    assert one.verdict(A) is verdict
    assert one.verdict(B) is OK
    assert bool(one.reason(A)) is (verdict is FATAL)
    hear(one, *[GOOD] * CLEAN_SAMPLES)
    if entry.signal == "hung":
        assert one.verdict(A) is OK


@pytest.mark.parametrize("opening", [[XidEvent(48)], [LOST]])
def test_a_reset_while_we_were_away_is_proof_and_a_restart_alone_is_not(opening):
    before = ledger()
    hear(before, Sample(counting=0, energy=9_000), *opening)
    same, reset = restarted(before), restarted(before)
    hear(same, *energies(*range(9_000, 9_010)))
    hear(reset, *energies(*range(CLEAN_SAMPLES)))
    assert (same.verdict(A), reset.verdict(A)) == (FATAL, OK)


def test_a_reset_that_was_seen_is_remembered_over_a_restart():
    before = ledger()
    hear(before, Sample(counting=0, energy=9_000), XidEvent(48), Sample(counting=0, energy=1))
    after = restarted(before)
    hear(after, *energies(2, 3))
    assert after.verdict(A) is FATAL
    hear(after, *energies(4))
    assert after.verdict(A) is OK


@pytest.mark.parametrize(
    ("seen", "news"),
    [
        ([GOOD] * 3, 0),
        ([ERROR] * 2, 2),
        ([ERROR] * 3, 3),
        ([ERROR] * 9, 9),  # how many it were is what counts
        ([XidEvent(48)] * 50, 2),  # a minute passes, and when it was last is worth writing down
        ([XidEvent(13)] * 50, 2),
        ([XidEvent(31)] * 50, 52),  # with which others mean more: to the second
        ([Order("cordon")] * 3, 1),
        ([HUNG, GOOD, GOOD], 1),
        (
            [
                Sample(counting=0, energy=900),
                XidEvent(48),
                Sample(counting=0, energy=950),
                Sample(counting=0, energy=1_000),
            ],
            2,
        ),
        (  # each doubling is worth writing down, of the GPU and of the latch
            [Sample(counting=0, energy=900), XidEvent(48), Sample(counting=0, energy=1_500)],
            4,
        ),
        ([Sample(counting=0, energy=900), XidEvent(48), Sample(counting=0, energy=10)], 3),
        ([Sample(counting=0, energy=900), XidEvent(48), *[Sample(counting=0, energy=10)] * 2], 5),
        ([Sample(counting=0, binding=1), XidEvent(48), Sample(counting=0, binding=2)], 3),
        ([Sample(counting=0, binding=1), XidEvent(48), *[Sample(counting=0, binding=2)] * 2], 5),
        ([Sample(counting=0, ecc_uncorrected=1), XidEvent(48)], 3),
    ],
)
def test_what_must_outlive_the_process_is_news_and_nothing_else(seen, news):
    one = ledger(policy=UNGUARDED)
    before = one.revision
    hear(one, *seen)
    assert one.revision - before == news


def test_a_kill_forgets_little_of_what_a_reset_is_seen_by():
    """Only what was news was written down: a reset still shows until a quarter of the energy was used again."""
    one = ledger()
    hear(one, Sample(counting=0, energy=100), XidEvent(48))
    written, revision = one.evidence(), one.revision
    for energy in range(200, 900_000, 1_000):
        hear(one, Sample(counting=0, energy=energy))
        if one.revision != revision:
            written, revision = one.evidence(), one.revision
    killed = ledger()
    killed.replay(written)
    hear(killed, *energies(200_000, 200_100, 200_200))
    assert killed.verdict(A) is OK


@pytest.mark.parametrize(
    ("seen", "apart", "then", "after", "verdict"),
    [
        ([XidEvent(92)] * 2, 16 * 3600, GOOD, 23 * 3600, DEGRADED),  # for a day after the last one
        ([XidEvent(74)] * 9, 3600, XidEvent(74), 3600, FATAL),  # the tenth within a day
        ([ApplicationError(31, frozenset({f"ns/{pod}"})) for pod in "abcdef"], 90, GOOD, 590, DEGRADED),
    ],
)
def test_a_kill_forgets_neither_how_often_nor_when_it_was_last(seen, apart, then, after, verdict):
    """Only what was news was written down: what stands lasts as long, and what comes means as much, as without the kill."""
    one = ledger()
    now, written, revision = 1e6, one.evidence(), one.revision
    for event in seen:
        now += apart
        one.observe(A, event, now)
        if one.revision != revision:
            written, revision = one.evidence(), one.revision
    killed = ledger()
    killed.replay(written)
    for each in (one, killed):
        each.observe(A, then, now + after)
        assert each.verdict(A) is verdict


def test_an_order_of_the_latches_never_matters_to_the_evidence():
    one, other = ledger(), ledger()
    for seen in (HUNG, LOST, XidEvent(48), XidEvent(119)):
        one.observe(A, seen, 1.0)
    for seen in (XidEvent(119), XidEvent(48), LOST, HUNG):
        other.observe(A, seen, 1.0)
    assert one.evidence() == other.evidence()


def test_every_latch_that_stands_is_of_a_known_signal_and_names_its_proof():
    for key, latch, verdict in faulty().standing(A):
        assert key.signal in SIGNALS
        assert latch.proof in Proof
        assert verdict is not OK
        assert isinstance(key, LatchKey)


def test_disabled_health_checks_leave_what_cannot_be_served():
    one = ledger(policy=HealthPolicy(GUARDED.xids, judging=False))
    hear(one, Sample(temperature=94), Sample(temperature=94))
    assert one.verdict(A) is OK
    hear(one, LOST)
    assert one.reason(A) == "the GPU is lost"


@pytest.mark.parametrize("count_by", ["an operator", "a dip of the energy"])
def test_a_counter_that_merely_steps_back_launders_no_xid(count_by):
    """`nvidia-smi -p 0` clears the volatile count of errors, and energy may dip by a reading: neither is a reset."""
    one = ledger()
    start = Sample(counting=0, energy=9_000_000_000, ecc_uncorrected=2, binding=1)
    hear(one, start, XidEvent(95), XidEvent(119), XidEvent(48))
    count, less = (0, 0) if count_by == "an operator" else (2, 1)
    for at in range(20):
        hear(one, replace(start, energy=9_000_000_000 - less + 500 * at, ecc_uncorrected=count), start=2_000.0 + at)
    assert {key.part for key, _, verdict in one.standing(A) if verdict is FATAL} == {"95", "119", "48"}
    counted = {key.signal for key, _, _ in one.standing(A)} - {"xid"}
    assert counted == ({"ecc-uncorrected"} if count else set()), "the count is over, and nothing else"


@pytest.mark.parametrize("xid", [63, 74, 109, 144, 160])
def test_an_imex_domain_to_be_recovered_makes_no_other_fault_fatal(xid):
    one = ledger()
    imex = Sample(counting=0, energy=1, ecc_uncorrected=1, recovery_action=5)
    hear(one, replace(imex, ecc_uncorrected=0, recovery_action=0), XidEvent(xid), *[imex] * 20)
    assert one.verdict(A) is DEGRADED
    hear(one, replace(imex, recovery_action=1))
    assert {key.signal for key, _, verdict in one.standing(A) if verdict is FATAL} >= {"recovery-action", "xid"}


@pytest.mark.parametrize("first", [A, B])
def test_a_gpu_that_turns_out_to_be_another_has_the_counts_of_both(first):
    """The names of a GPU, of which each met one contained memory error, a hang or application errors."""
    one, last = ledger(A, B, policy=UNGUARDED), B if first == A else A
    met: list[Observation] = [XidEvent(94), *[ApplicationError(31)] * 4, ERROR, ERROR]
    hear(one, *met, uuid=first)
    hear(one, *met, uuid=last, start=1_100.0)
    one.rename(first, last)
    (fault,) = (latch for key, latch, _ in one.standing(last) if key.part == "94")
    assert fault.memory.times == (1_000.0, 1_100.0)
    assert one.verdict(last) is Verdict.APP
    hear(one, ApplicationError(31), XidEvent(94), uuid=last, start=1_120.0)
    assert {(key.signal, verdict) for key, _, verdict in one.standing(last)} >= {
        ("xid", Verdict.DEGRADED),
        ("application-errors", Verdict.DEGRADED),
    }
    assert one.standing(first) == []


def test_falls_under_either_name_count_together():
    one = ledger(A, B)
    for uuid, start in ((A, 1_000.0), (B, 1_100.0)):
        hear(one, HUNG, *[GOOD] * 3, uuid=uuid, start=start)
    one.rename(A, B)
    hear(one, HUNG, uuid=B, start=1_200.0)
    assert "flapping" in {key.signal for key, _, _ in one.standing(B)}


def test_xids_under_either_name_come_together():
    one = ledger(A, B)
    one.observe(A, XidEvent(94), 1_000.0)
    one.rename(A, B)
    one.observe(B, XidEvent(48), 1_002.0)
    assert one.verdict(B) is Verdict.DEGRADED
