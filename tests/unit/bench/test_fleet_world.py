"""The simulated fleet: small worlds of which the right answer is known."""

import dataclasses
import random

import pytest

from bench.fleet.faults import APPLICATION_XIDS, KINDS, OTHER_XIDS, Incident, Truth
from bench.fleet.hardware import FACTS, Hardware
from bench.fleet.plan import GPUS, Happening, NodePlan, What, drawn
from bench.fleet.policies import POLICIES, Ours, default_policy, policy_for
from bench.fleet.rates import ASSUMED, NODE_RATES, SOURCES, Part, incidents
from bench.fleet.world import simulate
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Fault, Sample, XidEvent
from gpu_plugin.health.xid_table import XID_TABLE

EVERY = list(POLICIES)
PARTS = list(Part)
HOUR = 3600.0


def outcome(policy, *happenings, part=Part.A100, days=1.0, **more):
    plan = NodePlan("test", part, days, happenings=tuple(happenings), **more)
    return simulate(plan, policy_for(policy, GPUS, default_policy()) if isinstance(policy, str) else policy)


def struck(kind, at=HOUR, gpu=0, number=0):
    return Happening(at, number, What.INCIDENT, gpu, kind)


def failed(at, pod, *xids, gpu=0, number=0):
    return Happening(at, number, What.APPLICATION, gpu, pod, xids)


@pytest.fixture
def certain(monkeypatch):
    """Make all chances of a kind certain, except for the given fields."""

    def make(kind, **changes):
        known = KINDS[kind]
        begins = tuple(dataclasses.replace(emission, chance=1.0) for emission in known.begins)
        certainly = {"broken": 1.0, "unseen": 1.0, "begins": begins, "resets": 0.0, "reboots": 0.0, **changes}
        monkeypatch.setitem(KINDS, kind, dataclasses.replace(known, **certainly))

    return make


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("policy", EVERY)
def test_a_world_without_faults_costs_nothing_whatever_is_restarted_or_reset(policy, part):
    happenings = [
        Happening(HOUR, 0, What.RESTART, down=5.0),
        Happening(2 * HOUR, 1, What.RESET, gpu=3),
        Happening(3 * HOUR, 2, What.REBOOT),
        Happening(4 * HOUR, 3, What.RESTART, down=30.0),
    ]
    tally = outcome(policy, *happenings, part=part, persistence=False, energy_stays=True)
    assert tally.hours == GPUS * 24
    assert (tally.broken, tally.handed_out, tally.held_back, tally.lost, tally.turned_away) == (0, {}, {}, 0, 0)
    assert (tally.changed, tally.first_look, tally.steps) == ({}, 0, {})


@pytest.mark.parametrize(("xids", "seconds"), [(KINDS["off-the-bus"].begins, 2), ((), 16)])
def test_a_gpu_that_is_lost_for_ever_is_held_back_by_ours_within_a_look(certain, xids, seconds):
    certain("off-the-bus", begins=tuple(dataclasses.replace(emission, chance=1.0) for emission in xids))
    tally = outcome("ours", struck("off-the-bus"), days=1.5 / 24)
    assert tally.broken == pytest.approx(0.5)
    assert tally.handed_out.get("off-the-bus", 0) * HOUR <= seconds
    assert (tally.held_back, tally.lost) == ({}, 0)


def test_a_lost_gpu_is_handed_out_all_the_time_by_one_and_takes_its_node_along_under_the_other(certain):
    certain("off-the-bus")
    google = outcome("google", struck("off-the-bus"), days=1.5 / 24)
    assert google.handed_out == {"off-the-bus": pytest.approx(0.5)}
    assert google.lost > 0
    nvidia = outcome("nvidia", struck("off-the-bus"), days=1.5 / 24)
    assert nvidia.handed_out == {}
    assert sum(nvidia.held_back.values()) == pytest.approx((GPUS - 1) * 0.5)


def test_a_gpu_that_is_not_found_after_a_boot_is_offered_by_nobody(certain):
    certain("off-the-bus")
    for policy in EVERY:
        tally = outcome(policy, struck("off-the-bus"), Happening(HOUR + 60, 1, What.REBOOT), days=1.5 / 24)
        assert sum(tally.handed_out.values()) * HOUR <= 60, policy
        assert sum(tally.held_back.values()) <= 7 * 60 / HOUR, policy


@pytest.mark.parametrize("part", PARTS)
def test_a_failing_job_takes_no_gpu_that_works(part):
    """The retries of one Job, on one GPU and on its neighbours: page faults, exceptions, and their successors."""
    pods = [
        failed(HOUR + 60 * at, f"team/train-{at:05d}", 31 if at % 2 else 13, 43, 45, gpu=at % 3, number=at)
        for at in range(30)
    ]
    for policy in EVERY:
        tally = outcome(policy, *pods, part=part)
        assert tally.held_back == {}, policy
    other = [failed(HOUR, "team/train-aaaaa", 32)]
    assert outcome("ours", *other, part=part).held_back == {}
    assert set(outcome("nvidia", *other, part=part).held) == {("xid 32", "an application")}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("down", [1.0, 30.0])
def test_a_restart_changes_no_verdict_of_ours_and_launders_theirs(certain, part, down):
    certain("ecc-uncontained")
    happenings = struck("ecc-uncontained"), Happening(HOUR + 60, 1, What.RESTART, down=down)
    ours, nvidia = (outcome(policy, *happenings, part=part, days=1.5 / 24) for policy in ("ours", "nvidia"))
    assert ours.changed == {}
    assert ours.standing >= 1
    assert ours.handed_out.get("ecc-uncontained", 0) * HOUR < 1
    assert nvidia.changed == {"marks": 1}
    assert nvidia.lost > 0


def test_a_killed_process_leaves_what_it_wrote_down_and_one_that_ends_all_it_knows():
    for killed, changed in ((False, {}), (True, {"FATAL to OK: xid 95": 1})):
        ours = Ours(default_policy())
        ours.watch(0, FACTS[Part.A100])
        ours.see(0, Hardware(Part.A100).sample(HOUR, loaded=True), HOUR)
        ours.see(0, XidEvent(95), HOUR + 1)
        ours._gpus[0].written = ()
        ours.restart_one(0, HOUR + 2, killed=killed)
        assert (ours.restarts.changed, ours.restarts.standing) == (changed, 1)


def test_a_restart_that_forgets_is_noticed(certain, monkeypatch):
    certain("ecc-uncontained")
    happenings = struck("ecc-uncontained"), Happening(HOUR + 60, 1, What.RESTART, down=1.0)
    monkeypatch.setattr(HealthLedger, "replay", lambda _, evidence: None)
    assert sum(outcome("ours", *happenings).changed.values()) >= 1


def test_a_verdict_that_a_restart_loses_later_is_noticed(certain, monkeypatch):
    """A replayed fault closes too early after the restart."""
    certain("ecc-uncontained")
    replayed = HealthLedger.replay

    def lenient(ledger: HealthLedger, evidence: tuple[Evidence, ...]) -> None:
        replayed(ledger, evidence)
        for uuid in {entry.uuid for entry in evidence}:
            shown = ledger.observe

            def loses(of, seen, now, uuid=uuid, shown=shown):
                found = shown(of, seen, now)
                ledger.override(uuid)
                return found

            monkeypatch.setattr(ledger, "observe", loses)

    monkeypatch.setattr(HealthLedger, "replay", lenient)
    happenings = struck("ecc-uncontained"), Happening(HOUR + 60, 1, What.RESTART, down=1.0)
    assert any("FATAL" in what for what in outcome("ours", *happenings).changed)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("policy", EVERY)
def test_what_a_reset_mends_is_offered_again_once_somebody_has_come(certain, policy, part):
    """Also if no counter shows the reset: then an operator overrides."""
    certain("ecc-uncontained", resets=1.0)
    for energy_stays in (False, True):
        tally = outcome(policy, struck("ecc-uncontained"), part=part, days=60, energy_stays=energy_stays)
        assert tally.steps.get("reset") == 1
        assert tally.broken < tally.hours / GPUS / 2
        assert sum(tally.held_back.values()) < 1
        if policy == "ours":
            assert tally.handed_out["ecc-uncontained"] < 0.01
            assert tally.steps.get("vouch", 0) == energy_stays


def test_what_only_another_part_mends_is_replaced_in_the_end(certain):
    certain("wedged")
    tally = outcome("google", struck("wedged"), days=60)
    assert tally.steps["replace"] == 1
    assert tally.broken < 20 * 24
    assert tally.handed == {"wedged": 1}
    assert tally.lost == pytest.approx(6 * tally.broken, rel=0.3), "a pod each ten minutes"


def test_pods_of_a_wedged_gpu_are_several_owners_and_their_errors_are_told_with_their_names(certain):
    certain("wedged")
    told: list[frozenset[str]] = []

    class Told(Ours):
        def see(self, gpu, seen, now):
            if type(seen).__name__ == "ApplicationError":
                told.append(seen.pods)
            super().see(gpu, seen, now)

    outcome(Told(default_policy()), struck("wedged"), days=2 / 24)
    owners = {name.rsplit("-", 1)[0] for pods in told for name in pods}
    assert len(told) > 2
    assert len(owners) > 1


def test_the_worlds_are_the_same_for_a_seed_and_others_for_another():
    one, same, other = (drawn(seed, Part.A100, 200) for seed in ("1/0", "1/0", "2/0"))
    assert one == same
    assert one.happenings != other.happenings
    tallies = [simulate(one, Ours(default_policy())) for _ in range(2)]
    assert tallies[0] == tallies[1]


def test_a_verdict_that_is_better_for_one_look_alone_is_changed_also_while_evidence_is_gathered():
    """A tenth failed look makes a GPU unfit: nine before the restart, of which the new process knows nothing."""
    failed_look = Sample(fault=Fault.ERROR, detail="Unknown Error")
    ours = Ours(default_policy())
    ours.watch(0, FACTS[Part.A100])
    ours.see(0, Hardware(Part.A100).sample(HOUR, loaded=True), HOUR)
    for at in range(9):
        ours.see(0, failed_look, HOUR + 1 + at)
    ours._gpus[0].written = ()
    ours.restart_one(0, HOUR + 10, killed=True)
    assert ours.restarts.changed == {"DEGRADED to OK: unanswered": 1}
    ours._gpus[0].twin = ours._ledger(ours._gpus[0].uuid, FACTS[Part.A100])
    for at in range(9):
        ours._gpus[0].twin.observe(ours._gpus[0].uuid, failed_look, HOUR + 1 + at)
    ours.restarts.changed.clear()
    for at in range(3):
        ours.see(0, failed_look, HOUR + 11 + at)
    assert sum(ours.restarts.changed.values()) == 1


def test_a_verdict_that_is_worse_for_some_looks_after_a_restart_is_told_apart():
    """A bad look during the proof: the good looks before the restart do not count afterwards."""
    ours = Ours(default_policy())
    ours.watch(0, FACTS[Part.A100])
    sound = Hardware(Part.A100)
    ours.see(0, sound.sample(HOUR, loaded=True), HOUR)
    ours.see(0, Sample(fault=Fault.HUNG, detail="no answer"), HOUR + 1)
    for at in (2, 3):
        ours.see(0, sound.sample(HOUR + at, loaded=True), HOUR + at)
    ours.restart_one(0, HOUR + 3.5, killed=False)
    for at in (4, 5, 6, 7, 8, 1000, 1015, 1030):
        ours.see(0, sound.sample(HOUR + at, loaded=True), HOUR + at)
    assert (ours.restarts.changed, ours.restarts.longer) == ({}, 1)


def test_a_quiet_hour_that_is_gathered_anew_changes_nothing_either():
    ours = Ours(default_policy())
    ours.watch(0, FACTS[Part.A100])
    link = Hardware(Part.A100)
    ours.see(0, link.sample(HOUR, loaded=True), HOUR)
    link.counts["nvlink_crc_errors"] = 500
    for at in range(0, 9000, 60):
        ours.see(0, link.sample(HOUR + at, loaded=True), HOUR + at)
        if at == 3000:
            ours.restart_one(0, HOUR + at, killed=False)
    assert (ours.restarts.changed, ours.restarts.longer) == ({}, 1)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("kind", "counter"),
    [
        ("nvlink-transient", "nvlink_crc_errors"),
        ("nvlink-flapping", "nvlink_crc_errors"),
        ("nvlink-down", "nvlink_crc_errors"),
        ("pcie-lanes", "pcie_replays"),
        ("pcie-noise", "pcie_replays"),
        ("pcie-fatal", "pcie_fatal_errors"),
    ],
)
def test_incidents_of_links_and_of_the_bus_show_in_counters_until_a_reset(part, kind, counter):
    hardware = Hardware(part)
    incident = Incident.begun(KINDS[kind], 0.0, 1, random.Random(1))
    assert getattr(hardware.sample(0.0, loaded=True), counter) == 0
    hardware.strike(incident)
    hardware.count(incident)
    first = getattr(hardware.sample(1.0, loaded=True), counter)
    hardware.count(incident)
    assert 0 < first < getattr(hardware.sample(2.0, loaded=True), counter)
    assert hardware.sample(2.0, loaded=True).nvlink_failed_recoveries is None
    assert Hardware(part, counts_recoveries=True).sample(2.0, loaded=True).nvlink_failed_recoveries == 0
    hardware.reset(3.0)
    assert getattr(hardware.sample(3.0, loaded=True), counter) == 0


def test_a_fatal_error_of_the_bus_is_held_back_by_ours_alone(certain):
    certain("pcie-fatal")
    for policy in EVERY:
        tally = outcome(policy, struck("pcie-fatal"), days=1.5 / 24)
        out = sum(tally.handed_out.values())
        assert out < 0.01 if policy == "ours" else out == pytest.approx(0.5)


def test_google_heeds_what_it_is_configured_to(certain):
    certain("remap-failure")
    handed = {policy: outcome(policy, struck("remap-failure"), days=1.5 / 24).handed_out for policy in EVERY}
    assert handed["google"] == {"remap-failure": pytest.approx(0.5)}
    assert handed["google-8"].get("remap-failure", 0) < 0.01


def test_what_is_assumed_otherwise_of_one_incident_leaves_the_others_as_they_were():
    usual, other = (
        drawn("1/0", Part.A100, 2000, assumed=assumed)
        for assumed in (ASSUMED, dataclasses.replace(ASSUMED, often={"wedged": 50.0}))
    )
    wedged = [[it for it in plan.happenings if it.name == "wedged"] for plan in (usual, other)]
    assert len(wedged[1]) > len(wedged[0])
    rest = [
        {(it.at, it.number, it.name) for it in plan.happenings if it.what is What.INCIDENT and it.name != "wedged"}
        for plan in (usual, other)
    ]
    assert rest[0] == rest[1]
    assert len({it.number for it in usual.happenings if it.what is What.INCIDENT}) == sum(
        it.what is What.INCIDENT for it in usual.happenings
    )


@pytest.mark.parametrize("part", PARTS)
def test_incidents_come_as_often_as_the_rates_say(part):
    days, counted = 20_000.0, dict.fromkeys((*incidents(), *NODE_RATES), 0)
    for happening in drawn("many", part, days).happenings:
        if happening.what is What.INCIDENT:
            counted["nvml-glitch" if happening.name == "nvml-hang" else happening.name] += 1
    for kind, rate in {**incidents(), **NODE_RATES}.items():
        expected = rate.on(part) * days * GPUS
        assert counted[kind] == pytest.approx(
            expected, abs=5 * expected**0.5 + (GPUS * 5 if kind in NODE_RATES else 0)
        ), kind


def test_every_rate_says_where_it_is_from_and_every_incident_is_one_that_is_known():
    for kind, rate in {**incidents(), **NODE_RATES}.items():
        assert kind in KINDS
        assert set(rate.sources) <= set(SOURCES)
        assert rate.derived
        if any(word in rate.derived for word in ("assumed", "taken to be")):
            assert "assumed" in rate.sources
    table = XID_TABLE
    raised = {emission.xid for kind in KINDS.values() for emission in (*kind.begins, *kind.pods)}
    assert raised | {xid for xid, _ in APPLICATION_XIDS} | set(OTHER_XIDS) <= set(table)
    assert all(kind.silent or kind.otherwise is not Truth.BROKEN for kind in KINDS.values())


def test_a_job_that_fails_comes_back_at_most_six_times_under_names_of_one_owner():
    pods = [it for it in drawn("jobs", Part.A100, 400).happenings if it.what is What.APPLICATION]
    owners: dict[str, list[Happening]] = {}
    for pod in pods:
        owners.setdefault(pod.name.rsplit("-", 1)[0], []).append(pod)
    assert max(map(len, owners.values())) <= 7
    assert 1.5 < len(pods) / len(owners) < 3
    assert any(len({pod.gpu for pod in tries}) > 1 for tries in owners.values())


@pytest.mark.parametrize(("at", "hears"), [(HOUR - 5, False), (2 * HOUR, True)])
def test_a_process_that_is_down_hears_of_no_xid(certain, at, hears):
    certain("nvlink-transient", broken=0.0, recurs=0.0)
    restart = Happening(at, 1, What.RESTART, down=30.0)
    tally = outcome("nvidia", restart, struck("nvlink-transient"), days=3 / 24)
    assert bool(tally.held_back) is hears


def test_the_driver_reports_its_recovery_action_after_the_delay(certain):
    """An engine that hangs with an Xid of no weight: only the recovery action makes the GPU unfit."""
    certain("engine-hang", begins=(), pods=())
    handed_out = {
        seconds: outcome(
            "ours",
            struck("engine-hang"),
            part=Part.H100,
            days=3 / 24,
            assumed=dataclasses.replace(ASSUMED, action_seconds=seconds, try_hours=1000.0),
        ).handed_out["engine-hang"]
        for seconds in (0.0, 5.0, 600.0)
    }
    assert handed_out[0.0] * HOUR < 1
    assert handed_out[0.0] < handed_out[5.0] < handed_out[600.0]
    assert outcome("ours", struck("engine-hang"), part=Part.A100, days=2 / 24).handed_out["engine-hang"] == 1


def test_a_hot_gpu_reads_as_far_from_its_threshold_as_is_assumed():
    for below, spread in ((1.0, 0.0), (3.0, 0.0), (3.0, 2.0)):
        hardware = Hardware(Part.H100, heat_below=below, heat_spread=spread)
        hardware.strike(Incident.begun(dataclasses.replace(KINDS["overheating"], broken=1.0), 0.0, 1, random.Random(1)))
        readings = [hardware.sample(float(at), loaded=True).temperature or 0 for at in range(500)]
        limit = FACTS[Part.H100].thresholds.shutdown or 0
        assert sum(readings) / len(readings) == pytest.approx(limit - below, abs=0.5)
        assert (max(readings) > min(readings)) is (spread > 0)
        assert (hardware.sample(7.0, loaded=False).temperature or 0) < 60
