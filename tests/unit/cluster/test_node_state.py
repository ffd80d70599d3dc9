"""Condition and taint of a Node over time, on a clock of our own."""

import heapq
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import anyio
import msgspec
import pytest

from gpu_plugin.cluster import node_condition, node_state
from gpu_plugin.cluster.connection import UnreachableError
from gpu_plugin.cluster.node_api import NodeState
from gpu_plugin.cluster.node_condition import CONDITION, TAINT, Fitness, GpuFitness
from gpu_plugin.cluster.node_state import EnabledReports, NodeStateKeeper
from gpu_plugin.state.records import OwnMarks

SOUND, SICK = GpuFitness("GPU 0", Fitness.HEALTHY), GpuFitness("GPU 0", Fitness.UNHEALTHY, ("Xid 79",), ("xid 79",))
UNSEEN = GpuFitness("GPU 0", Fitness.UNSEEN)
THEIRS = {"key": "example.com/theirs", "effect": "NoExecute"}
T = 1_760_000_000.0


class EndError(Exception):
    """The time of the test is over."""


class World:
    """A clock, a Node, and a log of requests with their times."""

    node_name = "node-a"

    def __init__(self, asked, gpus=(SOUND,), marks=None, known=None, taints=()):
        self.asked, self.gpus, self.marks = asked, gpus, marks or OwnMarks()
        self.now, self.trouble, self.failing = 0.0, "", ""
        self.only, self.uid = "", "1"
        self.known, self.taints = known, [*taints]
        self.log, self.remembered, self.plans = [], [], []
        api: Any = self
        self.keeper = NodeStateKeeper(
            api,
            self,
            self.marks,
            clock=lambda: self.now,
            wall=lambda: T + self.now,
            dice=lambda: 0.0,
        )

    def enabled_reports(self):
        return self.asked

    def fitness(self):
        return self.gpus, self.trouble

    async def run(self, seconds, monkeypatch, *plans):
        """Run for this many seconds. `plans` has pairs of a time and a function; the keeper is woken after each call."""
        ends = self.now + seconds
        due = [(at, number, act) for number, (at, act) in enumerate(plans)]
        heapq.heapify(due)

        async def sleep(pause):
            self.now += pause
            while due and due[0][0] <= self.now:
                heapq.heappop(due)[2]()
            if self.now >= ends:
                raise EndError

        async def wait(pause=None):
            rung = due[0][0] if due else ends
            await sleep(max(0.0, min(ends, rung, self.now + (pause or 1e9)) - self.now))

        monkeypatch.setattr(anyio, "sleep", sleep)
        monkeypatch.setattr(self.keeper._bell, "wait", wait)
        with pytest.raises(EndError):
            await self.keeper.run()

    @asynccontextmanager
    async def session(self):
        yield

    async def read(self):
        self._try("read")
        conditions = [] if self.known is None else [msgspec.to_builtins(self.known)]
        content = {"metadata": {"uid": self.uid}, "spec": {"taints": self.taints}, "status": {"conditions": conditions}}
        return msgspec.convert(content, NodeState)

    async def nothing(self):
        return NodeState()

    async def apply_condition(self, condition):
        self._try("condition")
        self.known = condition
        return self.uid

    async def set_taint(self, key, effect, known=None):
        self._try(f"taint {effect}")
        assert key == TAINT
        assert known is None or self.log[-2][1] == "read", "it has changed since it was read"
        before = [*self.taints]
        self.taints = [each for each in before if each["key"] != key] + (
            [{"key": key, "effect": effect}] if effect else []
        )
        return before != self.taints

    async def write_marks(self, marks):
        self.remembered.append(marks)

    def _try(self, what):
        self.log.append((round(self.now), what))
        if self.failing and what.startswith(self.only):
            raise UnreachableError(self.failing, f"failing with {self.failing}")


def at(condition):
    return datetime.fromisoformat(condition.last_transition_time).timestamp() - T


async def test_nothing_asked_for_asks_nothing(monkeypatch):
    world = World(EnabledReports())
    await world.run(10_000, monkeypatch)
    assert world.log == []


async def test_an_hour_of_a_sound_node_is_a_read_and_a_dozen_heartbeats(monkeypatch):
    world = World(EnabledReports(condition=True, effect="NoSchedule"))
    await world.run(3600, monkeypatch)
    assert world.log[0] == (0, "read")
    assert [what for _, what in world.log[1:]] == ["condition"] * 12
    assert world.known.status == "True"


async def test_a_fault_is_written_at_once_and_so_is_its_end(monkeypatch):
    world = World(EnabledReports(condition=True, effect="NoSchedule"), taints=[THEIRS])
    await world.run(
        1000,
        monkeypatch,
        (100.0, lambda: setattr(world, "gpus", (SICK,))),
        (200.0, lambda: setattr(world, "gpus", (SOUND,))),
    )
    assert (100, "condition") in world.log
    assert (100, "taint NoSchedule") in world.log
    assert (200, "taint ") in world.log
    assert (world.known.status, at(world.known)) == ("True", 200)
    assert world.taints == [THEIRS]
    assert world.remembered == [
        OwnMarks(condition=True),
        OwnMarks(condition=True, taint=True),
        OwnMarks(condition=True),
    ]


async def test_after_a_restart_what_stands_is_neither_written_again_nor_doubted(monkeypatch):
    before = World(EnabledReports(condition=True, effect="NoSchedule"), gpus=(SICK,))
    await before.run(20, monkeypatch)
    after = World(
        EnabledReports(condition=True, effect="NoSchedule"),
        (UNSEEN,),
        before.remembered[-1],
        before.known,
        before.taints,
    )
    await after.run(59, monkeypatch, (30.0, lambda: setattr(after, "gpus", (SICK,))))
    assert [what for _, what in after.log] == ["read"]
    assert after.known is before.known
    assert after.taints == before.taints


async def test_what_cannot_be_seen_is_unknown_after_a_minute_and_the_taint_stays(monkeypatch):
    world = World(
        EnabledReports(condition=True, effect="NoSchedule"), (UNSEEN,), taints=[{"key": TAINT, "effect": "NoSchedule"}]
    )
    await world.run(200, monkeypatch)
    assert (world.known.status, world.known.reason) == ("Unknown", "GPUNotSeen")
    assert world.taints == [{"key": TAINT, "effect": "NoSchedule"}]


@pytest.mark.parametrize("lived", [True, False])
async def test_what_is_switched_off_is_removed_also_by_the_next_process(monkeypatch, lived):
    world = World(EnabledReports(condition=True, effect="NoExecute"), (SICK,), taints=[THEIRS])
    off = (100.0, lambda: setattr(world, "asked", EnabledReports()))
    await world.run(50 if not lived else 500, monkeypatch, *([off] if lived else []))
    if not lived:
        world = World(EnabledReports(), (SICK,), world.remembered[-1], world.known, world.taints)
        await world.run(500, monkeypatch)
    assert world.known is None
    assert world.taints == [THEIRS]
    assert world.remembered[-1] == OwnMarks()
    assert world.log[-1][0] <= 101


async def test_another_effect_replaces_ours(monkeypatch):
    world = World(EnabledReports(effect="NoSchedule"), (SICK,))
    await world.run(100, monkeypatch, (50.0, lambda: setattr(world, "asked", EnabledReports(effect="NoExecute"))))
    assert world.taints == [{"key": TAINT, "effect": "NoExecute"}]
    assert world.known is None


async def test_a_taint_that_somebody_removed_is_back_within_the_hour(monkeypatch):
    world = World(EnabledReports(effect="NoSchedule"), (SICK,))
    await world.run(2 * 3600, monkeypatch, (100.0, world.taints.clear), (101.0, lambda: setattr(world, "taints", [])))
    assert world.taints == [{"key": TAINT, "effect": "NoSchedule"}]
    assert len(world.log) <= 4


async def test_an_outage_is_said_once_and_asked_about_ever_more_rarely(monkeypatch, caplog):
    caplog.set_level("INFO")
    world = World(EnabledReports(condition=True), (SICK,))
    world.failing = "connection"
    await world.run(6 * 3600, monkeypatch, (4 * 3600.0, lambda: setattr(world, "failing", "")))
    assert [record.levelname for record in caplog.records if "cannot be written" in record.getMessage()].count(
        "WARNING"
    ) == 1
    assert caplog.text.count("are written again") == 1
    during = [when for when, _ in world.log if when < 4 * 3600]
    assert len(during) <= 4 * 3600 / node_state.LONGEST_PAUSE * 2 + 10
    assert world.known.status == "False"
    assert world.known.type == CONDITION


async def test_who_lost_the_right_to_remove_the_taint_is_told_how(monkeypatch, caplog):
    world = World(EnabledReports(), (SICK,), OwnMarks(taint=True), taints=[{"key": TAINT, "effect": "NoSchedule"}])
    world.failing = "403 get"
    await world.run(100, monkeypatch)
    assert f"kubectl taint node node-a {TAINT}-" in caplog.text


@pytest.mark.parametrize("lacking", ["condition", "taint"])
async def test_a_right_that_is_missing_for_one_costs_the_other_nothing(monkeypatch, lacking):
    world = World(EnabledReports(condition=True, effect="NoSchedule"), (SICK,))
    world.failing, world.only = "403", lacking
    await world.run(3600, monkeypatch)
    assert (world.taints != []) is (lacking == "condition")
    assert (world.known is not None) is (lacking == "taint")
    tried = [when for when, what in world.log if what.startswith(lacking)]
    assert 10 < len(tried) < 40, "again and again, ever more rarely"


async def test_what_changes_while_it_is_written_is_written_next(monkeypatch):
    world = World(EnabledReports(condition=True), (SICK,))

    async def apply(condition):
        if not world.log:
            world.gpus = (SOUND,)
            world.keeper.changed()
        world.log.append((round(world.now), condition.status))
        return "1"

    monkeypatch.setattr(world, "apply_condition", apply)
    monkeypatch.setattr(world, "read", world.nothing)
    await world.run(10, monkeypatch)
    assert world.log == [(0, "False"), (0, "True")]


async def test_a_node_that_was_recreated_has_both_with_the_next_heartbeat(monkeypatch):
    world = World(EnabledReports(condition=True, effect="NoSchedule"), (SICK,))

    def recreated():
        world.uid, world.known, world.taints = "2", None, []

    await world.run(1000, monkeypatch, (100.0, recreated))
    assert world.taints == [{"key": TAINT, "effect": "NoSchedule"}]
    (first, _), *_ = [entry for entry in world.log if entry[0] > 100]
    assert first <= node_condition.HEARTBEAT + 15
    assert [what for when, what in world.log if when == first] == ["condition", "taint NoSchedule"], "at the same time"


async def test_a_right_that_is_missing_for_the_condition_delays_no_taint(monkeypatch):
    world = World(EnabledReports(condition=True, effect="NoSchedule"))
    world.failing, world.only = "403", "condition"
    await world.run(3700, monkeypatch, (3600.0, lambda: sicken(world)))
    assert (3600, "taint NoSchedule") in world.log
    assert sum(what == "read" for _, what in world.log) < 40


async def test_what_changes_ends_a_long_pause_and_is_no_storm(monkeypatch):
    world = World(EnabledReports(effect="NoSchedule"))
    world.failing = "connection"
    back = (3604.0, lambda: setattr(world, "failing", ""))
    rings = [(3600.0 + number / 10, lambda: sicken(world)) for number in range(100)]
    await world.run(3700, monkeypatch, back, *rings)
    assert [what for when, what in world.log if when >= 3600] == ["read", "read", "taint NoSchedule"]
    assert world.log[-1][0] <= 3606


def sicken(world):
    world.gpus = (SICK,)
    world.keeper.changed()


@pytest.mark.parametrize(
    "asked", [EnabledReports(look=True), EnabledReports(condition=True), EnabledReports(effect="NoSchedule")]
)
async def test_what_is_on_the_node_of_us_is_taken_back_though_it_was_not_remembered(monkeypatch, asked):
    before = World(EnabledReports(condition=True, effect="NoSchedule"), (SICK,))
    await before.run(20, monkeypatch)
    after = World(asked, (SOUND,), None, before.known, [THEIRS, *before.taints])
    await after.run(100, monkeypatch)
    assert after.taints == [THEIRS]
    assert (after.known is not None) is asked.condition
    assert [what for _, what in after.log].count("read") == 1
    assert after.remembered[-1] == OwnMarks(condition=asked.condition)


async def test_who_may_not_look_is_told_nothing_and_asks_once(monkeypatch, caplog):
    world = World(EnabledReports(look=True))
    world.failing = "403"
    await world.run(3600, monkeypatch, (100.0, world.keeper.changed))
    assert (world.log, world.keeper.trouble, caplog.text) == ([(0, "read")], "", "")
