"""Invariants of health under events of any kind in any order."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_plugin.health.latch import AnyLatch, LatchKey, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import (
    CORE,
    ApplicationError,
    DriverEvent,
    EventDelivery,
    Fabric,
    Observation,
    Order,
    Sample,
    XidEvent,
)
from gpu_plugin.health.policy import HealthPolicy, XidList, XidPolicy
from gpu_plugin.health.signals import SIGNALS
from tests.unit.health.ledgers import GUARDED, UNGUARDED, A, B, ledger

BOUNDED = settings(max_examples=60, deadline=None)
FATAL, OK = Verdict.FATAL, Verdict.OK
SLICES = {(1, 0): "MIG-1", (2, 0): "MIG-2"}
DEVICES = ("", "MIG-1", "MIG-2")
# A policy by which some Xids stay FATAL also without a request of the driver
FIRM = HealthPolicy(XidPolicy(GUARDED.xids.table, enabled=XidList(numbers=frozenset({48, 79, 119}))))

# Signals of a driver that does not answer or is not asked: any answer closes them
ANSWERED = {"hung", "unanswered", "lost", "reset-required", "vanished", "driver", "maintenance"}

flag = st.none() | st.booleans()
count = st.none() | st.integers(0, 3)
whole_looks = st.builds(
    Sample,
    temperature=st.sampled_from([None, 20, 83, 84, 89, 92, 93, 95, 120]),
    energy=st.none() | st.integers(0, 50),
    fault=st.sampled_from(["", "", "", "", "", "", "lost", "reset-required", "hung", "error", "vanished", "driver"]),
    detail=st.sampled_from(["", "some words"]),
    memory_temperature=st.sampled_from([None, 50, 99]),
    margin=st.sampled_from([None, 40, 5, -1, -10]),
    recovery_action=st.sampled_from([None, 0, 0, 0, 1, 2, 3, 5]),
    ecc_uncorrected=count,
    sram_threshold=flag,
    remap_pending=flag,
    remap_failure=flag,
    retired_pending=flag,
    retired_pages=st.sampled_from([None, 0, 59, 60]),
    unrepairable_memory=flag,
    clocks_event_reasons=st.sampled_from([None, 0, 1, 0x40, 0x80]),
    nvlinks=st.sampled_from([None, (True, True), (True, False), (False, False)]),
    nvlink_crc_errors=st.sampled_from([None, 0, 200]),
    nvlink_failed_recoveries=count,
    fabric=st.sampled_from([None, Fabric(), Fabric(2), Fabric(3, 0, 0, 1), Fabric(3, 0, 0, 2), Fabric(3, 0, 0, 3)]),
    pcie_width=st.sampled_from([None, 8, 16]),
    pcie_max_width=st.just(16),
    pcie_replays=st.sampled_from([None, 0, 100]),
    pcie_fatal_errors=count,
    binding=st.sampled_from([None, 1, 1, 1, 2]),
    counting=st.sampled_from([0, 0, 0, None, 7]),
    refused=st.sampled_from([frozenset(), frozenset(), frozenset({"energy"}), CORE]),
    unknown=st.sampled_from([frozenset(), frozenset(), frozenset({"energy"}), frozenset({"recovery_action"})]),
)


def steady(seen: Sample, names: frozenset[str] | None) -> Sample:
    """Return the look as if it had requested only these fields."""
    if names is None or seen.fault:
        return seen
    said = ("fault", "detail", "counting", "binding", "opening", "refused", "unknown")
    unasked = {name: None for name in Sample.__struct_fields__ if name not in {*names, *said}}
    return replace(replace(seen, **unasked), asked=names)


ALWAYS = {"temperature", "energy", "recovery_action"}
asked = st.sampled_from([None, None, frozenset(ALWAYS), frozenset({*ALWAYS, "nvlinks", "fabric"}), frozenset(())])
looks = st.builds(steady, whole_looks, asked)
instances = st.sampled_from([(None, None), (1, 0), (2, 0), (1, None), (9, 9), (0, 0)])
xids = st.builds(
    lambda xid, where: XidEvent(xid, *where),
    st.sampled_from([13, 31, 31, 45, 46, 48, 48, 63, 74, 79, 94, 94, 109, 119, 122, 122, 9999]),
    instances,
)
others = st.one_of(
    st.builds(DriverEvent, st.sampled_from([0x2, 0x8, 0x200, 0x400, 0x800, 0x1000, 0x2000, 0x4000, 0x8000])),
    st.builds(
        ApplicationError, st.sampled_from([13, 31, 48]), st.none() | st.sampled_from([frozenset("a"), frozenset("b")])
    ),
    st.builds(EventDelivery, st.sampled_from(["", "no answer"])),
    st.builds(Order, st.sampled_from(["cordon", "uncordon", "release", "resume"])),
)
observations = st.one_of(looks, looks, looks, xids, others)
pauses = st.sampled_from([0.0, 1.0, 1.0, 1.0, 5.0, 60.0, 700.0, 4_000.0])
stories = st.lists(st.tuples(observations, pauses), max_size=40)
Story = list[tuple[Observation, float]]
BEGIN = 1_000_000.0


def divided(policy: HealthPolicy = GUARDED) -> HealthLedger:
    return ledger(policy=policy, slices=SLICES)


def play(to: HealthLedger, story: Story, now: float = BEGIN) -> float:
    """Observe the story of one GPU, and return the time of its end."""
    for seen, pause in story:
        now += pause
        to.observe(A, seen, now)
    return now


def latches(of: HealthLedger, uuid: str = A) -> dict[LatchKey, AnyLatch]:
    return {key: latch for key, latch, _ in of.standing(uuid, None)}


def verdicts(of: HealthLedger) -> dict[LatchKey, Verdict]:
    return {key: verdict for key, _, verdict in of.standing(A, None)}


def reported(of: HealthLedger, uuid: str = A) -> list[tuple[Verdict, str]]:
    """Return the verdict and the reason of the GPU and of each of its MIG devices."""
    return [(of.verdict(uuid, device), of.reason(uuid, device)) for device in DEVICES]


def restarted(from_: HealthLedger) -> HealthLedger:
    new = divided(from_.policy)
    new.replay(from_.evidence())
    return new


@BOUNDED
@given(stories, st.sets(st.integers(0, 39), max_size=2))
def test_a_gpu_is_never_healthier_than_its_worst_open_fault(story, overridden):
    """The reported changes add up to the open latches."""
    one, now = divided(), BEGIN
    open_: dict[LatchKey, Verdict] = {}
    for at, (seen, pause) in enumerate(story):
        now += pause
        changes = one.observe(A, seen, now)
        if at in overridden:
            changes += one.override(A)
        for change in changes:
            key = LatchKey(change.signal, change.part, change.device)
            assert change.before is open_.pop(key, OK)
            assert change.verdict is not change.before
            if change.verdict is not OK:
                open_[key] = change.verdict
        assert verdicts(one) == open_
        for device in DEVICES:
            worst = max((v for key, v in open_.items() if key.device in ("", device)), default=OK)
            assert one.verdict(A, device) is worst
            assert bool(one.reason(A, device)) is (worst is FATAL)
        assert one.verdict(B) is OK


@BOUNDED
@given(stories, st.sampled_from([48, 79, 119]), stories)
def test_a_fatal_xid_stays_fatal_without_a_recovery(before, xid, after):
    one = divided(FIRM)
    now = play(one, before)
    one.observe(A, XidEvent(xid), now)
    energy = 50  # at least as high as any energy before
    for seen, pause in after:
        now += pause
        if isinstance(seen, Sample):
            energy += seen.energy or 0
            seen = replace(seen, energy=energy, ecc_uncorrected=None, binding=None)  # noqa: PLW2901
        one.observe(A, seen, now)
        assert {one.verdict(A, device) for device in DEVICES} == {FATAL}
        assert f"Xid {xid} " in one.reason(A)


@BOUNDED
@given(stories, st.integers(1, 30))
def test_no_silence_heals(story, silent):
    """Looks without readings prove only that the driver answers, and time alone proves nothing."""
    one = divided()
    now = play(one, story)
    held = latches(one)
    for _ in range(silent):
        one.observe(A, Sample(), now)
    still = verdicts(one)
    for key, latch in held.items():
        recovered = latch.recovery.reset or latch.recovery.rebound  # these looks are clean looks after it
        orderly = key.signal == "flapping" or latch.proof in ("application", "quiet")  # their time is over
        if not (recovered or orderly or key.signal in ANSWERED):
            assert key in still, f"{key} was closed by silence"


@BOUNDED
@given(stories, stories, st.randoms(use_true_random=False))
def test_a_gpus_health_never_depends_on_another(story, rest, random):
    alone, together, now = divided(), divided(), BEGIN
    rest = list(rest)
    for seen, pause in story:
        now += pause
        while rest and random.random() < 0.5:
            together.observe(B, rest.pop()[0], now)
        assert together.observe(A, seen, now) == alone.observe(A, seen, now)
        assert reported(together) == reported(alone)
        assert together._records[A].latches == alone._records[A].latches
        assert reported(alone, B) == [(OK, "")] * 3
    assert [entry for entry in together.evidence() if entry.uuid == A] == list(alone.evidence())


@BOUNDED
@given(stories, st.lists(st.sampled_from([46, 48, 45, 109, 31, 94, 9999]), max_size=30))
def test_a_fault_of_one_mig_device_affects_no_other_and_not_the_gpu(story, hits):
    """Observations of the delivery of events are left out, because an event of any MIG device closes `events`."""
    assert not any(GUARDED.xids.judge(xid).whole_gpu for xid in hits)
    without, with_, now = divided(), divided(), BEGIN
    for at, (seen, pause) in enumerate(one for one in story if not isinstance(one[0], EventDelivery)):
        now += pause
        without.observe(A, seen, now)
        with_.observe(A, seen, now)
        if at < len(hits):
            with_.observe(A, XidEvent(hits[at], 1, 0), now)
        for device in ("", "MIG-2"):
            assert (with_.verdict(A, device), with_.reason(A, device)) == (
                without.verdict(A, device),
                without.reason(A, device),
            )
        if 94 not in hits:  # Xid 94 contains an error of that MIG device
            assert with_.verdict(A, "MIG-1") >= without.verdict(A, "MIG-1")


@BOUNDED
@given(stories, stories)
def test_a_kill_at_any_moment_changes_no_verdict_no_reason_and_no_evidence(story, others):
    """The evidence is stored when the revision changes; a killed process loses later changes."""
    one, now = divided(), BEGIN
    written, revision = one.evidence(), one.revision
    for at, (seen, pause) in enumerate(story):
        now += pause
        one.observe(A, seen, now)
        if at < len(others):
            one.observe(B, others[at][0], now)
        if one.revision != revision:
            written, revision = one.evidence(), one.revision
        again = divided()
        again.replay(written)
        assert (reported(again), reported(again, B)) == (reported(one), reported(one, B))
        assert verdicts(again) == verdicts(one)
        assert again.evidence() == written


@st.composite
def repeating(draw):
    """Return two parts of a story in which the same few observations repeat, so that counts grow."""
    steps = st.lists(
        st.tuples(st.sampled_from(draw(st.lists(observations, min_size=1, max_size=4))), pauses), max_size=25
    )
    return draw(steps), draw(steps)


@settings(max_examples=150, deadline=None)
@given(repeating() | st.tuples(stories, stories))
def test_no_restart_at_any_point_ends_in_a_better_verdict(story):
    """Without the flap guard: a fault that stays open for longer after a restart does not drop again."""
    before, after = story
    one, now = divided(UNGUARDED), BEGIN
    written, revision = one.evidence(), one.revision
    for seen, pause in before:
        now += pause
        one.observe(A, seen, now)
        if one.revision != revision:
            written, revision = one.evidence(), one.revision
    new = HealthLedger(UNGUARDED, one.boot_id)
    new.watch(A, one.facts(A), SLICES)
    new.replay(written)
    for seen, pause in [(None, 0.0), *after]:
        now += pause
        if seen is not None:
            one.observe(A, seen, now)
            new.observe(A, seen, now)
        theirs = verdicts(new)
        for key, verdict in verdicts(one).items():
            assert theirs.get(key, OK) >= verdict, key


@BOUNDED
@given(stories)
def test_after_an_override_only_a_gpu_that_cannot_be_served_is_fatal(story):
    one = divided()
    now = play(one, story)
    one.override(A)
    left = {key.signal for key, verdict in verdicts(one).items() if verdict is FATAL}
    assert left <= ANSWERED - {"unanswered"} | {"cordon"}
    play(one, [(Order("uncordon"), 0.0), (Order("resume"), 0.0)], now)
    left = {key.signal for key, verdict in verdicts(one).items() if verdict is FATAL}
    assert left <= ANSWERED - {"unanswered"}


@BOUNDED
@given(stories)
def test_every_gpu_comes_back_from_a_boot_once_it_reads_well(story):
    """A boot and a day of good looks close everything but orders."""
    one = divided()
    now = play(one, story)
    one.booted("boot-2")
    good = Sample(
        temperature=30,
        energy=1,
        memory_temperature=30,
        margin=60,
        recovery_action=0,
        ecc_uncorrected=0,
        sram_threshold=False,
        remap_pending=False,
        remap_failure=False,
        retired_pending=False,
        retired_pages=0,
        unrepairable_memory=False,
        clocks_event_reasons=0,
        nvlinks=(True, True),
        nvlink_crc_errors=0,
        nvlink_failed_recoveries=0,
        fabric=Fabric(3, 0, 0, 1),
        pcie_width=16,
        pcie_max_width=16,
        pcie_replays=0,
        pcie_fatal_errors=0,
        binding=7,
    )
    play(one, [(Order("uncordon"), 0.0), (Order("resume"), 0.0), (EventDelivery(), 0.0), *[(good, 700.0)] * 130], now)
    assert verdicts(one) == {}


@BOUNDED
@given(stories)
def test_a_look_that_requests_few_fields_affects_only_signals_of_these_fields(story):
    one, now = divided(UNGUARDED), play_on(story)
    play(one, story)
    nothing = Sample(asked=frozenset(("energy",)), energy=None)
    before = {key: latch for key, latch in latches(one).items() if SIGNALS[key.signal].asks}
    for _ in range(5):
        now += 1.0
        one.observe(A, nothing, now)
    after = {key: latch for key, latch in latches(one).items() if SIGNALS[key.signal].asks}
    assert after == before


def play_on(story: Story) -> float:
    return BEGIN + sum(pause for _, pause in story)
