"""Signals of looks that fail, lost GPUs, orders of operators, driver events, and the registry of signals."""

from typing import Any, get_args

import msgspec
import pytest
from msgspec.structs import replace

from gpu_plugin.devices.node import Thresholds
from gpu_plugin.health.hysteresis import LEVEL
from gpu_plugin.health.latch import Proof, Verdict, shifted
from gpu_plugin.health.observation import (
    CORE,
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
from gpu_plugin.health.signals import SIGNALS, SignalKind
from tests.unit.health.ledgers import (
    ERROR,
    H200,
    HUNG,
    LOST,
    RESET_REQUIRED,
    SEEN,
    UNGUARDED,
    UNLOADED,
    VANISHED,
    A,
    Killed,
    energies,
    ledger,
)
from tests.unit.health.watching import GPU, Watched

OK, DEGRADED, FATAL = Verdict.OK, Verdict.DEGRADED, Verdict.FATAL
GOOD = Sample(temperature=40)
CORDON, UNCORDON, RELEASE, RESUME = (Order(verb) for verb in ("cordon", "uncordon", "release", "resume"))
HOUR, DAY = 3_600.0, 86_400.0


# unanswered: three of the last five looks failed, or ten in all


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        ([ERROR] * 2, OK),
        ([ERROR] * 3, DEGRADED),
        ([ERROR, GOOD, ERROR, GOOD, ERROR], DEGRADED),
        ([ERROR, GOOD, GOOD, ERROR, GOOD, ERROR], OK),  # the first is the sixth look from the last
        ([ERROR, GOOD, GOOD, ERROR, ERROR], DEGRADED),
        ([*[ERROR, GOOD, GOOD, GOOD, GOOD] * 40, ERROR], OK),
        ([*[ERROR, ERROR, GOOD, GOOD, GOOD] * 40], OK),
        ([ERROR, ERROR, *[GOOD] * 5, ERROR], OK),
        ([ERROR] * 9, DEGRADED),
        ([ERROR] * 10, FATAL),
        ([*[ERROR, GOOD] * 9], DEGRADED),
        ([*[ERROR, GOOD] * 10], FATAL),
        ([LOST, HUNG, RESET_REQUIRED, VANISHED, UNLOADED] * 5, OK),
        ([ERROR, LOST, ERROR, LOST, ERROR], DEGRADED),
        # Five answers in a row close it
        *[
            ([*[ERROR] * failed, *after], OK if closed else DEGRADED if failed == 3 else FATAL)
            for failed in (3, 10)
            for after, closed in (
                ([GOOD] * 4, False),
                ([GOOD] * 5, True),
                ([*[GOOD] * 4, HUNG, *[GOOD] * 4], False),
                ([LOST] * 20, False),
            )
        ],
        ([*[ERROR] * 3, *[GOOD] * 4, ERROR, *[GOOD] * 4], DEGRADED),
        ([*[ERROR] * 3, *[*[GOOD] * 4, ERROR] * 20], FATAL),
    ],
)
def test_looks_that_fail_open_unanswered(seen, verdict):
    assert Watched("unanswered", H200).see(*seen, every=1.0) is verdict


@pytest.mark.parametrize(("looks", "every", "verdict"), [(3, 60.0, DEGRADED), (3, 61.0, OK), (100, 61.0, OK)])
def test_failed_looks_count_together_within_two_minutes(looks, every, verdict):
    assert Watched("unanswered", H200).see(*[ERROR] * looks, every=every) is verdict


def test_the_detail_is_that_of_the_look_that_made_it_as_bad_as_it_is():
    gpu = Watched("unanswered", H200)
    for failures, at in ((2, "third"), (5, "tenth")):
        gpu.see(*[ERROR] * failures, replace(ERROR, detail=at), ERROR, every=1.0)
        assert (gpu.latch.detail, gpu.latch.since) == (at, 1_002.0)


@pytest.mark.parametrize(("failures", "soon"), [(1, True), (2, True), (3, True), (9, True), (10, False), (20, False)])
def test_another_look_soon_is_wanted_while_it_can_change_the_verdict(failures, soon):
    gpu = Watched("unanswered", H200)
    gpu.see(*[ERROR] * failures)
    assert gpu.ledger.suspicious(GPU) is soon
    gpu.see(GOOD)
    assert gpu.ledger.suspicious(GPU)


def test_the_memory_of_failed_looks_is_bounded():
    gpu = Watched("unanswered", H200)
    gpu.see(*[ERROR, GOOD] * 500, every=1.0)
    assert len(gpu.latch.memory.failures) == 10
    assert gpu.latch.memory.looks < 32


# Core readings that the driver refuses while it answers other questions

REFUSING = Sample(refused=CORE, nvlinks=(True, True), fabric=Fabric(3), recovery_action=0)


def test_refused_core_readings_count_as_failed_looks():
    gpu = Watched("unanswered", H200)
    assert gpu.steps(*[REFUSING] * 10) == [OK] * 2 + [DEGRADED] * 7 + [FATAL]
    assert all(name in gpu.ledger.reason(GPU) for name in ("temperature", "energy", "memory used", "utilization"))
    assert gpu.steps(*[GOOD] * 5) == [FATAL] * 4 + [OK]


@pytest.mark.parametrize("refused", [{"temperature", "energy"}, {"temperature"}, {"energy", "utilization"}])
def test_without_temperature_and_energy_a_gpu_is_fatal_whatever_else_it_answers(refused):
    seen = Sample(refused=frozenset(refused), memory_used=5, utilization=0)  # the other reading is not supported
    assert Watched("unanswered", H200).see(*[seen] * 10) is FATAL


@pytest.mark.parametrize("refused", sorted(CORE))
def test_one_refused_core_reading_is_degraded_while_it_lasts(refused):
    read: dict[str, Any] = {"temperature": 30, "energy": 5_000, "memory_used": 1, "utilization": 1} | {refused: None}
    seen = Sample(**read, refused=frozenset({refused}))
    gpu = Watched("unanswered", H200)
    assert gpu.see(*[seen] * 100) is DEGRADED
    assert refused.replace("_", " ") in gpu.latch.detail
    assert gpu.see(*[GOOD] * 4, seen, *[GOOD] * 4) is DEGRADED
    assert gpu.see(GOOD) is OK


def test_a_reading_that_the_part_does_not_support_is_not_refused():
    assert Watched("unanswered", H200).see(*[Sample(asked=frozenset({"nvlinks"}), nvlinks=(True,))] * 20) is OK


@pytest.mark.parametrize("refused", sorted(CORE))
def test_looks_with_a_refused_core_reading_close_no_signal(refused):
    odd = Sample(temperature=30, refused=frozenset({refused}))
    for signal in ("hung", "reset-required", "vanished", "driver"):
        gpu = Watched(signal, H200)
        assert gpu.see(*[Sample(fault=Fault(signal))] * 2) is FATAL
        assert gpu.see(*[odd] * 10) is FATAL
        assert gpu.see(*[GOOD] * 3) is OK
    gpu = Watched("xid", H200)
    gpu.see(*energies(10**10), XidEvent(48))
    assert gpu.see(*[replace(odd, counting=0, energy=10 + at) for at in range(9)]) > OK
    assert gpu.see(*energies(100, 101, 102)) is OK


# lost: found by a reset, another binding, another opening of the driver, or a release


def bound(binding: int, fault: Fault = Fault.NONE) -> Sample:
    return Sample(counting=0, binding=binding, fault=fault)


def through(opening: int | None, *energies: int) -> list[Sample]:
    """Return good looks through this opening of the driver; 0: in persistence mode, in which no opening is known."""
    return [Sample(counting=opening, energy=energy, binding=1) for energy in energies]


@pytest.mark.parametrize(
    ("before", "seen", "closed"),
    [
        (energies(5_000), energies(*range(5_000, 5_100)), False),
        (energies(5_000), [GOOD] * 100, False),
        (energies(5_000), [*energies(10, 20), LOST, *energies(30, 40, 50, 60)], False),
        (energies(5_000), [*energies(10, 20), LOST, *energies(5, 6, 7)], True),
        (energies(5_000), [*energies(10), LOST] * 20, False),
        ([bound(1)], [bound(1)] * 20, False),
        ([bound(1)], [bound(2)] * 2, False),
        ([bound(1)], [bound(2)] * 3, True),
        ([bound(1)], [bound(2, Fault.LOST), *[bound(2)] * 3], True),  # through a handle from before
        ([bound(1)], [bound(2), bound(2), bound(2, Fault.LOST), *[bound(2)] * 20], False),
        ([], [GOOD, GOOD], False),  # no mark was known
        ([], [GOOD] * 3, True),
        ([], [GOOD, GOOD, ERROR, GOOD, GOOD], False),
        ([], [*energies(7, 8), LOST, *energies(*range(9, 50))], False),
        (through(7, 4_000), through(8, 10, 20), False),
        (through(7, 4_000), through(8, 10, 20, 30), True),
        (through(7, 4_000), through(8, 9_000, 9_001, 9_002), True),
        (through(7, 4_000), through(7, *range(5_000, 5_020)), False),
        (through(7, 4_000), [*through(8, 10, 20), LOST, *through(8, 30, 40)], False),
        (through(7, 4_000), [*through(8, 10, 20), replace(LOST, counting=8), *through(8, *range(30, 50))], False),
        (through(7, 4_000), [*through(8, 10, 20), ERROR, *through(8, 30, 40)], False),
        (through(7, 4_000), [*through(8, 10, 20), ERROR, *through(8, 30, 40, 50)], True),
        (through(7, 4_000), through(0, *range(5_000, 5_020)), False),
        (through(0, 4_000), through(7, *range(5_000, 5_020)), False),
        (through(0, 4_000), through(0, *range(5_000, 5_020)), False),
        (through(0, 4_000), [*through(0, 5_000), RESUME, *through(0, 5_002, 5_003, 5_004)], False),
        (through(0, 4_000), [RELEASE, RESUME, *through(0, 5_000, 5_001)], False),
        (through(0, 4_000), [RELEASE, RESUME, *through(0, 5_000, 5_001, 5_002)], True),
        (through(7, 4_000), [RELEASE, RESUME, *through(7, 5_000, 5_001, 5_002)], True),
        (through(0, 4_000), [RELEASE, *through(0, *range(5_000, 5_020))], False),
        (through(0, 4_000), [RELEASE, RESUME, LOST, *through(0, *range(5_000, 5_020))], False),
    ],
)
@pytest.mark.parametrize("restarts", [False, True])
def test_a_lost_gpu_is_found_after_proof_and_three_answers(before, seen, closed, restarts):
    gpu = Watched("lost", H200)
    gpu.see(*before, LOST)
    if restarts:
        assert gpu.restart() is FATAL
    assert (gpu.see(*seen) is OK) is closed


@pytest.mark.parametrize("lost", [bound(1, Fault.LOST), bound(2, Fault.LOST)])
def test_another_binding_proves_also_if_it_was_first_seen_at_the_lost_look(lost):
    gpu = Watched("lost", H200)
    assert gpu.see(bound(1), lost, *[bound(2)] * 3) is OK
    gpu = Watched("lost", H200)
    gpu.see(lost)
    assert gpu.latch.proof is Proof.RESET
    assert gpu.see(*[bound(3)] * 3) is OK


def test_a_lost_gpu_can_be_overridden_once_this_process_saw_it_answer():
    gpu = Watched("lost", H200)
    gpu.see(*through(0, 4_000), LOST)
    assert gpu.override() is FATAL
    gpu.see(*through(0, 4_001))
    gpu.restart()
    assert gpu.override() is FATAL
    gpu.see(*through(0, 4_002), ERROR)
    assert gpu.override() is FATAL
    gpu.see(*through(0, 4_003))
    assert gpu.override() is OK
    assert gpu.see(*through(0, 4_004), LOST) is FATAL


# vanished, driver and events: words


@pytest.mark.parametrize(
    ("signal", "seen", "newer", "words"),
    [
        ("vanished", [Sample(fault=Fault.VANISHED)] * 2, None, "does not find the GPU"),
        ("vanished", [VANISHED] * 2, None, "no driver is bound to it"),
        ("driver", [UNLOADED], replace(UNLOADED, detail="it is another version"), "it is another version"),
        ("events", [EventDelivery("Unknown Error")], EventDelivery("GPU is lost"), "polling: GPU is lost"),
        ("hung", [HUNG], replace(HUNG, detail="another call"), "no answer for 30 s"),  # of the first call
        ("lost", [Sample(fault=Fault.LOST)], None, "lost"),
    ],
)
def test_the_detail_has_the_newest_words_of_the_driver_and_the_first_time(signal, seen, newer, words):
    gpu = Watched(signal)
    gpu.see(*seen)
    since = gpu.latch.since
    gpu.see(*[newer] if newer else [])
    assert words in (gpu.ledger.reason(GPU) if gpu.verdict is FATAL else gpu.latch.detail)
    assert gpu.latch.since == since


@pytest.mark.parametrize("event", [XidEvent(31), DriverEvent(0x1)])
def test_an_event_that_arrives_closes_events(event):
    gpu = Watched("events")
    assert gpu.see(EventDelivery(), event) is OK
    assert gpu.stored is None
    assert gpu.see(EventDelivery("x"), *[GOOD] * 20, ERROR, LOST) is DEGRADED
    assert gpu.see(event) is OK


# driver-event


def event(kind: int, part: str = "") -> Watched:
    """Return a GPU on which an event of this kind happened."""
    gpu = Watched("driver-event", part=part)
    gpu.see(*energies(5_000), DriverEvent(kind))
    return gpu


@pytest.mark.parametrize("kind", [0x1, 0x4, 0x8, 0x10, 0x80, 0x100, 0x8000, 0x10000])
def test_events_of_other_kinds_are_no_fault(kind):
    assert event(kind).verdict is OK


def test_each_kind_has_a_latch_that_names_it():
    gpu = event(0x800)
    gpu.see(DriverEvent(0x400), DriverEvent(0x400), DriverEvent(0x8), DriverEvent(0x100))
    found = {key.part: (verdict, latch.proof) for key, latch, verdict in gpu.ledger.standing(GPU)}
    assert found == {"0x800": (FATAL, Proof.RESET), "0x400": (DEGRADED, Proof.QUIET)}
    assert all(f"{key.part} (" in latch.detail for key, latch, _ in gpu.ledger.standing(GPU))


@pytest.mark.parametrize("kind", [0x400, 0x1000, 0x200, 0x2])
def test_a_degraded_event_closes_after_a_day_without_another(kind):
    gpu, quiet = event(kind, part=f"{kind:#x}"), energies(None)
    assert gpu.see(*quiet * 20, DriverEvent(kind), *quiet * 24, DriverEvent(0x800), every=HOUR) is DEGRADED
    assert gpu.see(*quiet) is OK
    gpu = event(kind)
    assert gpu.see(*[LOST] * 100, *quiet, *[LOST] * 100, every=HOUR) is DEGRADED, "without an answer"
    assert gpu.restart() is DEGRADED
    assert gpu.see(*quiet * 24, every=HOUR) is DEGRADED, "the day starts again"
    assert gpu.see(*quiet) is OK


@pytest.mark.parametrize("kind", [0x800, 0x2000, 0x4000])
def test_no_time_closes_a_fatal_event(kind):
    assert event(kind).see(*energies(None) * 100, every=DAY) is FATAL


def test_a_storm_of_one_kind_stores_nothing():
    gpu = event(0x200)
    gpu.see(*energies(5_001))
    revision = gpu.ledger.revision
    gpu.see(*[DriverEvent(0x200)] * 50, every=0.01)
    assert gpu.ledger.revision == revision


# cordon and maintenance


@pytest.mark.parametrize(
    ("signal", "seen", "verdict"),
    [
        ("cordon", [CORDON], FATAL),
        ("cordon", [CORDON, CORDON, RELEASE, RESUME, *[GOOD] * 100, XidEvent(48)], FATAL),
        ("cordon", [CORDON, UNCORDON], OK),
        ("cordon", [UNCORDON, RELEASE, RESUME], OK),
        ("maintenance", [RELEASE], FATAL),
        ("maintenance", [RELEASE, RELEASE, *[GOOD] * 100, CORDON, UNCORDON], FATAL),
        ("maintenance", [RELEASE, RESUME, LOST, HUNG, ERROR], FATAL),
        ("maintenance", [RELEASE, RESUME, LOST, GOOD], OK),
        ("maintenance", [RELEASE, RESUME, RELEASE, *[GOOD] * 20], FATAL),
        ("maintenance", [RESUME, GOOD, CORDON], OK),
    ],
)
def test_orders_end_by_an_order_and_maintenance_by_a_good_look(signal, seen, verdict):
    gpu = Watched(signal)
    assert gpu.see(*seen) is verdict
    if verdict is FATAL:
        assert gpu.latch.since == 1_000.0
        assert gpu.latch.proof is (Proof.READING if seen[1:2] == [RESUME] and seen[-1] is ERROR else Proof.OPERATOR)


# Kills: any cut of a story that opens a signal gives the same verdict

PART = Facts(Thresholds(95, 89, 95, 87), margins=Thresholds(-8, -2), contains_errors=True, says_action=True)
UP, DOWN = Sample(nvlinks=(True, True)), Sample(nvlinks=(True, False))
JOINED, BROKEN, LIMITED = (Sample(nvlinks=(True,), fabric=Fabric(3, 0, 0, summary)) for summary in (1, 2, 3))

STORIES: dict[str, list[Observation]] = {
    "temperature": [Sample(temperature=94)] * 2,
    "slowdown-temperature": [Sample(temperature=90)] * 4,
    "margin": [Sample(margin=30), *[Sample(margin=-3)] * 4],
    "margin near shutdown": [Sample(margin=30), *[Sample(margin=-9)] * 2],
    "margin after slowdown": [Sample(margin=30), *[Sample(margin=-3)] * 4, *[Sample(margin=-9)] * 2],
    "unanswered": [ERROR] * 3,
    "unanswered until fatal": [ERROR] * 10,
    "unanswered now and then": [ERROR, SEEN, ERROR, SEEN, ERROR],
    "vanished": [VANISHED] * 2,
    "nvlink": [UP, DOWN, DOWN],
    "nvlink with another link": [UP, DOWN, DOWN, *[Sample(nvlinks=(False, False))] * 2],
    "nvlink-errors": [Sample(nvlink_crc_errors=at) for at in range(0, 120, 10)],
    "nvlink-errors with a failed recovery": [Sample(nvlink_failed_recoveries=at) for at in range(2)],
    "pcie-errors": [Sample(pcie_replays=at) for at in range(0, 70, 10)],
    "pcie-errors that are fatal": [Sample(pcie_fatal_errors=at) for at in range(2)],
    "pcie-width": [Sample(pcie_width=8, pcie_max_width=16)] * 4,
    "fabric": [JOINED, BROKEN, BROKEN],
    "fabric after limited": [*[LIMITED] * 3, BROKEN, BROKEN],
    "xid with a request": [Sample(recovery_action=1), XidEvent(63), Sample(recovery_action=0)],
    "xid that repeats": [XidEvent(74)] * 10,
    "ecc-uncorrected": [Sample(ecc_uncorrected=0), Sample(ecc_uncorrected=1)],
    "hw-slowdown": [*[Sample(clocks_event_reasons=0)] * 8, *[Sample(clocks_event_reasons=0x40)] * 7],
}
SECONDS = {"xid that repeats": 600.0, "hw-slowdown": 60.0}


@pytest.mark.parametrize("name", STORIES)
def test_a_kill_at_any_time_does_not_change_what_opens(name):
    signal, found = name.split()[0], set()
    for cut in range(len(STORIES[name]) + 1):
        process = Killed(ledger(A, policy=UNGUARDED))
        process.ledger.watch(A, PART)
        for at, seen in enumerate(STORIES[name]):
            if at == cut:
                written = process.written
                process = Killed(ledger(A, policy=UNGUARDED))
                process.ledger.watch(A, PART)
                process.ledger.replay(written)
            process.observe(seen, 1_000.0 + SECONDS.get(name, 5.0) * at)
        verdicts = [verdict for key, _, verdict in process.ledger.standing(A) if key.signal == signal]
        found.add(max(verdicts, default=OK))
    assert len(found) == 1
    assert found <= {DEGRADED, FATAL}


def test_a_kill_loses_no_failed_look_of_looks_that_all_fail_far_apart():
    process = Killed(ledger(A, policy=UNGUARDED))
    for at in (0, 0, 700, 1_400, 1_400, 2_100):
        process.observe(ERROR, 1e6 + at)
    killed = ledger(A, policy=UNGUARDED)
    killed.replay(process.written)
    for _ in range(2):
        assert killed.verdict(A) is OK
        killed.observe(A, ERROR, 1e6 + 2_100)
    assert killed.verdict(A) is DEGRADED


# The registry


def test_signals_that_close_by_a_recovery_come_after_readings():
    of_the_gpu = [signal for signal in SIGNALS.values() if signal.kind in (SignalKind.READING, SignalKind.EVENT)]
    assert of_the_gpu == sorted(of_the_gpu, key=lambda signal: signal.recovers)


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_is_declared_with_fields_and_kinds_that_exist_and_words_for_people(name):
    signal = SIGNALS[name]
    assert set(signal.asks) <= set(Sample.__struct_fields__)
    assert set(signal.sees) <= set(get_args(Observation))
    assert signal.action
    assert signal.clears or signal.recovers or signal.memory is LEVEL


@pytest.mark.parametrize("name", SIGNALS)
def test_the_memory_of_a_signal_is_stored_by_the_names_of_its_fields_and_read_strictly(name):
    blank = SIGNALS[name].memory
    for written in (blank, blank.stored(), blank.stored_open(), shifted(blank, 5.0)):
        assert type(written) is type(blank)
        assert msgspec.json.decode(msgspec.json.encode(written), type=type(blank)) == written
    assert blank.stored() == blank
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"a field of another": 1}, type(blank))


@pytest.mark.parametrize("name", [name for name, signal in SIGNALS.items() if Sample in signal.sees])
def test_good_looks_at_a_sound_gpu_open_nothing_and_ask_for_no_look_soon(name):
    gpu = Watched(name, H200)
    assert gpu.see(*[Sample()] * 12) is OK
    assert not gpu.ledger.suspicious(GPU)
