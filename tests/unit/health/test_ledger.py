"""The ledger: reports of changes, MIG devices, orders, overrides, boots, names and restarts."""

import pytest
from msgspec.structs import replace

from gpu_plugin.devices.node import Thresholds
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.latch import CLEAN_SAMPLES, NOTHING, Latch, Transition, Verdict
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
    UNGUARDED,
    UNLOADED,
    A,
    B,
    Killed,
    energies,
    ledger,
    observe,
    restarted,
)

OK, APP, DEGRADED, FATAL = Verdict.OK, Verdict.APP, Verdict.DEGRADED, Verdict.FATAL
GOOD, HOT = Sample(temperature=40), Sample(temperature=94)
STARTED = Sample(counting=0, energy=5_000)
SLICES = {(1, 0): "MIG-1", (2, 0): "MIG-2", (3, 0): "MIG-3a", (3, 1): "MIG-3b"}
ALL = frozenset(SLICES.values())


def name(xid: int) -> str:
    return describe(xid, GUARDED.xids.judge(xid).name)


def reasons(of: HealthLedger) -> dict[str, str]:
    return {uuid: of.reason(uuid) for uuid in (A, B)}


def divided() -> HealthLedger:
    """Return a ledger of GPU A in MIG mode and GPU B without MIG."""
    made = ledger(A, slices=SLICES)
    made.watch(B, H200)
    made.observe(B, Sample(asked=frozenset()), 0.0)
    return made


def unfit(of: HealthLedger) -> set[str]:
    """Return the MIG devices of GPU A that are FATAL, and "" if the whole GPU is."""
    return {device for device in {"", *ALL} if of.verdict(A, device) is FATAL}


def fatal_signals(of: HealthLedger, uuid: str = A) -> set[str]:
    return {key.signal for key, _, verdict in of.standing(uuid) if verdict is FATAL}


# Verdicts and reasons


def test_a_gpu_is_healthy_without_evidence():
    fresh = ledger()
    assert (fresh.verdict(A), fresh.reason(A), fresh.evidence()) == (OK, "", ())


@pytest.mark.parametrize(
    "seen", [GOOD, XidEvent(79), DriverEvent(0x800), EventDelivery("x"), Order("cordon"), ApplicationError(31), LOST]
)
def test_observations_of_a_gpu_that_is_not_watched_change_nothing(seen):
    fresh = ledger(A)
    assert observe(fresh, seen, uuid=B) == []
    assert (fresh.verdict(B), fresh.standing(B), fresh.unfit(B), fresh.suspicious(B)) == (OK, [], (), False)
    assert fresh.override(B) == ()
    assert fresh.facts(B) == Facts()
    assert reasons(fresh) == {A: "", B: ""}


def test_a_reason_names_every_fatal_fault_once_the_oldest_first():
    one = divided()
    observe(one, HUNG, XidEvent(119), LOST, XidEvent(48, 1, 0), XidEvent(48), *[ERROR] * 3)
    expected = [HUNG.detail, name(119), LOST.detail, name(48)]
    assert one.reason(A, "MIG-1").split("; ") == expected
    assert restarted(one, SLICES).reason(A, "MIG-1").split("; ") == expected
    assert one.verdict(B) is OK
    same = ledger()
    for seen in (XidEvent(48), HUNG, LOST):
        same.observe(A, seen, 1_000.0)
    assert restarted(same).reason(A) == same.reason(A), "also of faults of one time"
    other = ledger()
    for seen in (LOST, HUNG, XidEvent(48)):
        other.observe(A, seen, 1_000.0)
    assert other.evidence() == same.evidence()


@pytest.mark.parametrize(
    ("seen", "verdict", "stored"), [([HOT, ERROR], OK, [("unanswered", OK)]), ([ERROR] * 3, DEGRADED, None)]
)
def test_only_fatal_faults_are_a_reason(seen, verdict, stored):
    one = ledger()
    observe(one, *seen)
    assert (one.verdict(A), one.reason(A)) == (verdict, "")
    assert stored is None or [(entry.signal, entry.latch.verdict) for entry in one.evidence()] == stored
    assert (one.suspicious(A), one.suspicious(B)) == (True, False)


def test_new_facts_apply_to_later_looks_and_keep_the_latches():
    one = ledger()
    observe(one, XidEvent(79))
    one.watch(A, Facts(Thresholds(shutdown=50)))
    observe(one, Sample(temperature=48), Sample(temperature=48))
    assert name(79) in one.reason(A)
    assert "48 °C" in one.reason(A)


def test_another_policy_changes_the_verdict_of_open_latches():
    one = ledger()
    observe(one, HOT, HOT)
    for verdict in (DEGRADED, OK):
        one.policy = replace(GUARDED, signals={"temperature": verdict})
        assert one.verdict(A) is verdict
    one.policy = GUARDED
    (milder,) = one.judge_by(replace(GUARDED, signals={"temperature": DEGRADED}))
    assert (milder.signal, milder.before, milder.verdict, milder.standing) == ("temperature", FATAL, DEGRADED, DEGRADED)
    assert one.judge_by(one.policy) == ()
    (harsher,) = one.judge_by(GUARDED)
    assert (harsher.before, harsher.verdict, harsher.standing) == (DEGRADED, FATAL, FATAL)


@pytest.mark.parametrize(
    ("policy", "seen", "opened"),
    [
        (replace(GUARDED, signals={"hung": OK, "temperature": OK}), [HOT, HOT, HUNG], {"hung"}),
        (HealthPolicy(GUARDED.xids, judging=False), [HOT, HOT, LOST], {"lost"}),
        (GUARDED, [HOT, HOT, LOST], {"temperature", "lost"}),
    ],
)
def test_a_policy_cannot_ignore_a_gpu_that_cannot_be_served(policy, seen, opened):
    one = ledger(policy=policy)
    assert {change.signal for change in observe(one, *seen) if change.verdict is FATAL} == opened
    assert fatal_signals(one) == opened


# Transitions


def test_each_change_of_a_verdict_is_reported_once_with_its_fields():
    one = ledger()
    began, over = observe(one, STARTED, XidEvent(48), XidEvent(48), *energies(1, 2, 3, 4))
    assert began == Transition(
        A,
        "xid",
        FATAL,
        OK,
        name(48),
        1_001.0,
        xid=48,
        action="reset the GPU when no pod has it",
        part="48",
    )
    assert over == replace(began, verdict=OK, before=FATAL, action="")
    assert (began.stood, began.standing, over.stood, over.standing) == (OK, FATAL, FATAL, OK)
    (change,) = observe(divided(), XidEvent(46, 1, 0))
    assert (change.uuid, change.device, change.xid, change.standing) == (A, "MIG-1", 46, FATAL)


def test_changes_of_one_observation_are_judged_one_after_the_other():
    one = ledger()
    hot = Sample(temperature=96, sram_threshold=True)
    changes = observe(one, STARTED, *[hot] * 4)
    assert len(changes) >= 2
    assert [change.stood < FATAL <= change.standing for change in changes].count(True) == 1


def test_a_gpu_recovers_with_its_last_fatal_signal():
    one = ledger()
    changes = observe(one, GOOD, HUNG, RESET_REQUIRED, Order("cordon"), GOOD, GOOD, GOOD, Order("uncordon"))
    assert [(change.signal, change.verdict, change.standing) for change in changes] == [
        ("hung", FATAL, FATAL),
        ("reset-required", FATAL, FATAL),
        ("cordon", FATAL, FATAL),
        ("hung", OK, FATAL),
        ("reset-required", OK, FATAL),
        ("cordon", OK, OK),
    ]
    assert [change.standing for change in observe(one, HUNG, GOOD, GOOD, GOOD)] == [FATAL, OK]


# MIG devices


@pytest.mark.parametrize(
    ("event", "reached"),
    [
        (XidEvent(46), {"", *ALL}),
        (XidEvent(46, 1, 0), {"MIG-1"}),
        (XidEvent(46, 2, 0), {"MIG-2"}),
        (XidEvent(46, 3, 0), {"MIG-3a"}),
        (XidEvent(46, 3, 1), {"MIG-3b"}),
        (XidEvent(46, 3), {"MIG-3a", "MIG-3b"}),
        (XidEvent(46, 3, 7), {"MIG-3a", "MIG-3b"}),  # an unknown compute instance refers to its GPU instance
        (XidEvent(46, 9, 0), {"", *ALL}),  # an unknown GPU instance refers to the whole GPU
        (XidEvent(46, 0, 0), {"", *ALL}),
        (XidEvent(46, None, 0), {"", *ALL}),
        (XidEvent(79, 1, 0), {"", *ALL}),  # an Xid of the whole GPU
        (DriverEvent(0x800), {"", *ALL}),
        (LOST, {"", *ALL}),
        (Order("cordon"), {"", *ALL}),
    ],
)
def test_evidence_affects_the_devices_that_it_names(event, reached):
    one = divided()
    observe(one, event)
    assert unfit(one) == reached
    assert one.verdict(B) is OK
    assert unfit(restarted(one, SLICES)) == reached


@pytest.mark.parametrize("event", [XidEvent(46, 0, 0), XidEvent(46, 0xFF, 0xFF), XidEvent(46)])
def test_instances_of_a_gpu_without_mig_refer_to_the_gpu(event):
    one = ledger()
    observe(one, event)
    assert reasons(one) == {A: name(46), B: ""}


def test_a_reset_of_the_gpu_proves_for_its_mig_devices():
    one = divided()
    observe(one, STARTED, XidEvent(46, 1, 0), XidEvent(46, 2, 0), *energies(10, 20))
    assert unfit(one) == {"MIG-1", "MIG-2"}
    changes = observe(one, *energies(30))
    assert {(change.device, change.verdict) for change in changes} == {("MIG-1", OK), ("MIG-2", OK)}
    assert unfit(one) == set()


def test_the_fault_of_a_mig_device_that_is_gone_applies_to_the_whole_gpu():
    one = divided()
    observe(one, STARTED, XidEvent(46, 1, 0))
    one.watch(A, H200, {(2, 0): "MIG-2", (5, 0): "MIG-5"})
    assert {one.reason(A, device) for device in ("", "MIG-1", "MIG-2", "MIG-5")} == {name(46)}
    one.watch(A, H200, SLICES)
    assert unfit(one) == {"MIG-1"}
    one.watch(A, H200)
    observe(one, *energies(1, 2, 3))
    one.watch(A, H200, SLICES)
    assert unfit(one) == set()


# Proof


@pytest.mark.parametrize("other", [XidEvent(31), DriverEvent(0x8), EventDelivery("x"), Order("resume")])
def test_observations_other_than_looks_do_not_affect_a_proof(other):
    one = ledger()
    observe(one, Sample(counting=0, energy=5_000_000), XidEvent(48), *energies(10, 20), other)
    assert name(48) in one.reason(A)
    observe(one, *energies(30), start=2_000.0)
    assert name(48) not in one.reason(A)


@pytest.mark.parametrize("first", [[], [Sample(counting=0, refused=frozenset({"energy"}))]])
def test_a_reset_between_two_processes_does_not_prove_for_an_event_after_it(first):
    one = ledger()
    observe(one, STARTED, XidEvent(48))
    after = restarted(one)  # the GPU was reset, and failed again before the first look
    observe(after, *first, XidEvent(48), *energies(*range(10, 40)))
    assert after.verdict(A) is FATAL
    observe(after, *energies(1, 2, 3))
    assert after.verdict(A) is OK


@pytest.mark.parametrize(("xid", "left"), [(119, [119]), (None, [])])
def test_a_reset_during_maintenance_proves_for_earlier_events(xid, left):
    one = ledger()
    observe(one, STARTED, XidEvent(48), Order("release"), Order("resume"), *[XidEvent(xid)] if xid else [])
    observe(one, *energies(10, 20))
    assert name(48) in one.reason(A)
    observe(one, *energies(30, 40))
    assert one.reason(A) == "; ".join(map(name, left))


def test_no_look_proves_a_recovery_while_another_reading_is_fatal():
    one = ledger()
    observe(one, STARTED, XidEvent(48), *[replace(HOT, counting=0, energy=at) for at in (10, 20)])
    assert one.unfit(A) == ("temperature",)
    observe(one, *[Sample(counting=0, temperature=90, energy=at) for at in range(30, 40)])
    assert name(48) in one.reason(A)
    observe(one, Order("cordon"), *[replace(GOOD, counting=0, energy=at) for at in range(40, 45)], every=200)
    assert one.reason(A) == "cordoned", "an order holds up no proof"


@pytest.mark.parametrize("xid", [63, 74, 109, 144, 160])
def test_a_request_about_the_imex_domain_makes_no_other_fault_fatal(xid):
    one = ledger()
    imex = Sample(counting=0, energy=1, ecc_uncorrected=1, recovery_action=5)
    observe(one, replace(imex, ecc_uncorrected=0, recovery_action=0), XidEvent(xid), *[imex] * 20)
    assert one.verdict(A) is DEGRADED
    observe(one, replace(imex, recovery_action=1))
    assert fatal_signals(one) >= {"recovery-action", "xid"}


# Overrides


def test_an_override_removes_events_and_makes_readings_degraded():
    one = ledger()
    observe(one, XidEvent(48), DriverEvent(0x800), HOT, HOT)
    assert {(change.signal, change.verdict) for change in one.override(A)} == {
        ("xid", OK),
        ("driver-event", OK),
        ("temperature", DEGRADED),
    }
    assert (one.verdict(A), one.reason(A)) == (DEGRADED, "")
    assert one.override(A) == ()
    assert restarted(one).verdict(A) is DEGRADED
    one = ledger(policy=replace(UNGUARDED, signals={"unanswered": FATAL}))
    observe(one, *[ERROR] * 3)
    assert one.unfit(A) == ("unanswered",)
    one.override(A)
    assert one.verdict(A) is DEGRADED, "a signal that the policy alone calls FATAL"


@pytest.mark.parametrize("seen", [LOST, HUNG, RESET_REQUIRED, UNLOADED, Order("cordon"), Order("release")])
def test_an_override_does_not_help_a_gpu_that_cannot_be_served_or_is_withheld(seen):
    one = ledger()
    observe(one, seen)
    evidence = one.evidence()
    assert one.override(A) == ()
    assert one.verdict(A) is FATAL
    assert one.evidence() == tuple(entry for entry in evidence if entry.latch.verdict is FATAL), "without counts"


# Boots


def test_looks_from_before_a_boot_prove_nothing_after_it():
    one = ledger()
    observe(one, RESET_REQUIRED, GOOD, GOOD)
    one.booted("boot-2")
    observe(one, GOOD, GOOD)
    assert one.verdict(A) is FATAL
    observe(one, GOOD)
    assert one.verdict(A) is OK
    observe(one, STARTED)
    one.booted("boot-3")
    observe(one, XidEvent(48), *energies(*range(10, 30)))
    assert one.verdict(A) is FATAL


def test_a_boot_ends_an_override_and_a_release_but_not_a_cordon():
    one = ledger()
    observe(one, *[Sample(sram_threshold=True)] * 3)
    one.override(A)
    (change,) = one.booted("boot-2")
    assert (change.signal, change.verdict, change.before) == ("sram-threshold", FATAL, DEGRADED)
    observe(one, *[Sample(sram_threshold=False)] * 3, Order("cordon"), Order("release"))
    one.booted("boot-3")
    for seen in ([], [GOOD] * 5):
        observe(one, *seen)
        assert one.reason(A) == "cordoned"
    assert {entry.boot_id for entry in one.evidence()} == {"boot-3"}


def test_the_same_boot_changes_nothing():
    one = ledger()
    observe(one, STARTED, XidEvent(48), *[GOOD] * 5)
    revision = one.revision
    one.booted("boot-1")
    observe(one, *[GOOD] * 5)
    assert (one.verdict(A), one.revision) == (FATAL, revision)


# Names


def test_a_rename_moves_the_evidence():
    one = ledger("index-0", B, policy=UNGUARDED)
    observe(one, XidEvent(79), uuid="index-0")
    one.rename("index-0", A)
    assert (one.verdict(A), one.verdict("index-0"), one.verdict(B)) == (FATAL, OK, OK)
    assert [entry.uuid for entry in one.evidence()] == [A]
    fresh = ledger()
    fresh.rename("index-0", A)
    assert fresh.evidence() == ()


@pytest.mark.parametrize(("first", "second"), [(A, "index-0"), ("index-0", A)])
def test_a_rename_keeps_the_worse_latch_of_both_names(first, second):
    one = ledger("index-0", A)
    observe(one, *[ERROR] * 10, uuid=first)
    observe(one, ERROR, uuid=second)
    one.rename("index-0", A)
    assert (one.verdict(A), one.verdict("index-0")) == (FATAL, OK)


@pytest.mark.parametrize("first", [A, B])
def test_a_rename_adds_the_counts_of_both_names(first):
    one, last = ledger(A, B, policy=UNGUARDED), B if first == A else A
    seen: list[Observation] = [XidEvent(94), *[ApplicationError(31)] * 4, ERROR, ERROR]
    observe(one, *seen, uuid=first)
    observe(one, *seen, uuid=last, start=1_100.0)
    one.rename(first, last)
    (fault,) = (latch for key, latch, _ in one.standing(last) if key.part == "94")
    assert fault.memory.times == (1_000.0, 1_100.0)
    assert one.verdict(last) is APP
    observe(one, ApplicationError(31), XidEvent(94), uuid=last, start=1_120.0)
    assert {(key.signal, verdict) for key, _, verdict in one.standing(last)} >= {
        ("xid", DEGRADED),
        ("application-errors", DEGRADED),
    }
    assert one.standing(first) == []


def test_a_rename_joins_drops_and_xids_of_both_names():
    one = ledger(A, B)
    for uuid, start in ((A, 1_000.0), (B, 1_100.0)):
        observe(one, HUNG, *[GOOD] * 3, uuid=uuid, start=start)
    one.rename(A, B)
    observe(one, HUNG, uuid=B, start=1_200.0)
    assert "flapping" in fatal_signals(one, B)
    one = ledger(A, B)
    one.observe(A, XidEvent(94), 1_000.0)
    one.rename(A, B)
    one.observe(B, XidEvent(48), 1_002.0)
    assert one.verdict(B) is DEGRADED


# Restarts


def test_stored_evidence_does_not_replace_a_newer_latch_but_counts_beside_new_counts():
    now = ledger()
    observe(now, LOST)
    now.replay([Evidence("boot-1", A, "lost", Latch(NOTHING, FATAL, "earlier words", 1.0))])
    assert now.reason(A) == LOST.detail
    now = ledger()
    observe(now, HOT, ERROR)
    stored = {"temperature": "too hot", "unanswered": "no answer"}
    now.replay(
        [
            Evidence("boot-1", A, signal, Latch(SIGNALS[signal].memory, FATAL, words, 1.0))
            for signal, words in stored.items()
        ]
    )
    assert set(now.reason(A).split("; ")) == set(stored.values())


@pytest.mark.parametrize(
    ("signal", "stored", "of", "verdict"),
    [
        ("xid", FATAL, {"part": "48"}, FATAL),
        ("xid", DEGRADED, {"part": "48"}, DEGRADED),
        ("xid", OK, {"part": "48"}, OK),
        ("xid", FATAL, {}, OK),
        ("xid", FATAL, {"part": "forty-eight"}, OK),
        ("a signal of a later version", FATAL, {}, OK),
        ("hung", FATAL, {"part": "of a later version", "device": "MIG-1"}, FATAL),
    ],
)
def test_evidence_of_another_version(signal, stored, of, verdict):
    one = ledger()
    latch = Latch(SIGNALS[signal].memory if signal in SIGNALS else NOTHING, stored, "x", 1.0)
    one.replay([Evidence("", A, signal, latch, **of), Evidence("", "GPU-gone", signal, latch, **of)])
    assert (one.verdict(A), one.verdict(B)) == (verdict, OK)
    assert bool(one.reason(A)) is (verdict is FATAL)
    observe(one, *[GOOD] * CLEAN_SAMPLES)
    if signal == "hung":
        assert one.verdict(A) is OK


ENERGY = Sample(counting=0, energy=900)


@pytest.mark.parametrize(
    ("seen", "changes"),
    [
        ([GOOD] * 3, 0),
        ([ERROR] * 2, 2),
        ([ERROR] * 9, 9),  # their number counts
        ([XidEvent(48)] * 50, 2),  # a minute passes, and the last time is stored
        ([XidEvent(13)] * 50, 2),
        ([XidEvent(31)] * 50, 52),  # it makes other Xids worse: its time is stored to the second
        ([Order("cordon")] * 3, 1),
        ([HUNG, GOOD, GOOD], 1),
        ([ENERGY, XidEvent(48), replace(ENERGY, energy=950), replace(ENERGY, energy=1_000)], 2),
        ([ENERGY, XidEvent(48), replace(ENERGY, energy=1_500)], 4),  # each doubling, of the GPU and of the latch
        ([ENERGY, XidEvent(48), *energies(10)], 3),
        ([ENERGY, XidEvent(48), *energies(10, 10)], 5),
        ([Sample(counting=0, binding=1), XidEvent(48), Sample(counting=0, binding=2)], 3),
        ([Sample(counting=0, binding=1), XidEvent(48), *[Sample(counting=0, binding=2)] * 2], 5),
        ([Sample(counting=0, ecc_uncorrected=1), XidEvent(48)], 3),
    ],
)
def test_only_changes_that_must_outlive_the_process_raise_the_revision(seen, changes):
    one = ledger(policy=UNGUARDED)
    before = one.revision
    observe(one, *seen)
    assert one.revision - before == changes


def test_a_reset_shows_after_a_kill_until_a_quarter_of_the_energy_is_used_again():
    process = Killed(ledger())
    for at, energy in enumerate((100, *range(200, 900_000, 1_000))):
        process.observe(Sample(counting=0, energy=energy), 1_000.0 + at)
        if not at:
            process.observe(XidEvent(48), 1_000.0)
    killed = ledger()
    killed.replay(process.written)
    observe(killed, *energies(200_000, 200_100, 200_200))
    assert killed.verdict(A) is OK


@pytest.mark.parametrize(
    ("seen", "apart", "then", "after", "verdict"),
    [
        ([XidEvent(92)] * 2, 16 * 3600, GOOD, 23 * 3600, DEGRADED),  # for a day after the last one
        ([XidEvent(74)] * 9, 3600, XidEvent(74), 3600, FATAL),  # the tenth within a day
        ([ApplicationError(31, frozenset({f"ns/{pod}"})) for pod in "abcdef"], 90, GOOD, 590, DEGRADED),
    ],
)
def test_a_kill_loses_neither_the_number_of_events_nor_the_time_of_the_last(seen, apart, then, after, verdict):
    process, now = Killed(ledger()), 1e6
    for event in seen:
        now += apart
        process.observe(event, now)
    killed = ledger()
    killed.replay(process.written)
    for each in (process.ledger, killed):
        each.observe(A, then, now + after)
        assert each.verdict(A) is verdict


def test_in_a_storm_of_xids_those_of_the_last_minutes_are_kept():
    known, last = GpuRecord(Facts()), 2 * REMEMBER_XIDS
    for number, at in ((1, 0.0), (2, last - REMEMBER_XIDS), *((number, last) for number in range(100, 200))):
        assert known.note_xid(number, ("",), at)
    assert {number for number, _ in known.xids} == {2, *range(100, 200)}


def test_a_fault_without_words_of_the_driver_has_a_reason():
    one = ledger()
    observe(one, Sample(fault=Fault.LOST))
    assert one.reason(A) == "lost"
