"""The pods that an application's error is assigned to. Queries run one at a time and at a limited rate."""

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from gpu_plugin.containers.edits import Access
from gpu_plugin.daemon import faulting_pods
from gpu_plugin.daemon.faulting_pods import FaultingPods
from gpu_plugin.daemon.reported_errors import MAX_WAITING, SAME_ERROR_SECONDS, Error, ReportedErrors
from gpu_plugin.devices.device import Device, Resource
from gpu_plugin.health.observation import ApplicationError
from gpu_plugin.kubelet.snapshot import ResourceView, Snapshot
from gpu_plugin.placement.subsets import Placement
from tests.unit.waiting import until

GPU, MIG = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"
SNAPSHOT = Snapshot(
    1,
    {
        name: ResourceView.of(Resource(name, devices), Access(), Placement())
        for name, devices in {
            GPU: (Device("GPU-0::0", "GPU-0", "GPU-0", "0"), Device("GPU-0::1", "GPU-0", "GPU-0", "0")),
            MIG: (Device("MIG-a", "GPU-1", "MIG-a", "1:0"), Device("MIG-b", "GPU-1", "MIG-b", "1:1")),
        }.items()
    },
)
HELD = {
    (GPU, "GPU-0::0"): frozenset({"ns/one"}),
    (GPU, "GPU-0::1"): frozenset({"ns/one", "ns/two"}),
    (MIG, "MIG-a"): frozenset({"ns/a"}),
    (MIG, "MIG-b"): frozenset({"ns/b"}),
    (MIG, "MIG-gone"): frozenset({"ns/c"}),
    ("example.com/nic", "GPU-0::0"): frozenset({"ns/d"}),
}


class Bench:
    """Errors in, questions counted, observations out."""

    def __init__(self):
        self.now = 0.0
        self.held = HELD
        self.asked = 0
        self.seen: list[tuple[str, ApplicationError]] = []
        self.gate = anyio.Event()
        self.gate.set()
        self.errors = ReportedErrors(lambda: self.now)
        parts: Any = self, SimpleNamespace(current=SNAPSHOT), self
        self.pods = FaultingPods(self.errors, *parts)

    def observe(self, uuid, seen):
        self.seen.append((uuid, seen))

    async def newest_pods(self):
        self.asked += 1
        await self.gate.wait()
        return self.held

    def heard(self, *error, after=2 * SAME_ERROR_SECONDS):
        self.now += after
        self.errors.add(Error(*error))


@pytest.fixture
async def bench(monkeypatch):
    monkeypatch.setattr(faulting_pods, "QUERY_INTERVAL", 0.001)
    bench = Bench()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.pods.run)
        yield bench
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("error", "pods"),
    [
        (("GPU-0", 31), {"ns/one", "ns/two"}),
        (("GPU-1", 31), {"ns/a", "ns/b"}),
        (("GPU-1", 31, frozenset({"MIG-b"})), {"ns/b"}),
        (("GPU-2", 31), set()),
    ],
)
async def test_an_error_is_told_with_the_pods_that_hold_what_it_hit(bench, error, pods):
    bench.heard(*error)
    await until(lambda: bench.seen)
    assert bench.seen == [(error[0], ApplicationError(31, frozenset(pods)))]


async def test_where_nobody_can_say_whose_it_was_it_is_told_all_the_same(bench):
    bench.held = None
    bench.heard("GPU-0", 13)
    await until(lambda: bench.seen)
    assert bench.seen == [("GPU-0", ApplicationError(13, None))]


async def test_what_comes_during_a_question_is_answered_by_the_next(bench):
    bench.gate = anyio.Event()
    bench.heard("GPU-0", 13)
    await until(lambda: bench.asked == 1)
    for _ in range(5):
        bench.heard("GPU-1", 31)
    bench.gate.set()
    await until(lambda: len(bench.seen) == 6)
    assert bench.asked == 2


async def test_a_burst_is_one_error_and_what_comes_later_another(bench):
    for _ in range(300):
        bench.heard("GPU-0", 13, after=SAME_ERROR_SECONDS / 10)
    bench.heard("GPU-1", 13, after=0)
    bench.heard("GPU-0", 31, after=0)
    bench.heard("GPU-0", 13)
    await until(lambda: len(bench.seen) == 4)
    assert [(uuid, seen.xid) for uuid, seen in bench.seen] == [
        ("GPU-0", 13),
        ("GPU-1", 13),
        ("GPU-0", 31),
        ("GPU-0", 13),
    ]


async def test_what_was_heard_is_remembered_no_longer_than_a_burst(bench):
    for xid in range(100):
        bench.heard("GPU-0", xid, after=SAME_ERROR_SECONDS / 10)
    assert len(bench.errors._burst) <= 11
    bench.heard("GPU-0", 1, after=2 * SAME_ERROR_SECONDS)
    assert len(bench.errors._burst) == 1
    await until(lambda: len(bench.seen) == 101)


async def test_a_flood_is_let_go_of_at_its_old_end(bench):
    bench.gate = anyio.Event()
    bench.heard("GPU-0", 1)
    await until(lambda: bench.asked == 1)
    for xid in range(2, MAX_WAITING + 12):
        bench.heard("GPU-0", xid)
    bench.gate.set()
    await until(lambda: len(bench.seen) == MAX_WAITING + 1)
    assert [seen.xid for _, seen in bench.seen] == [1, *range(12, MAX_WAITING + 12)]


async def test_questions_keep_their_distance(bench, monkeypatch):
    monkeypatch.setattr(faulting_pods, "QUERY_INTERVAL", 3600)
    bench.heard("GPU-0", 13)
    await until(lambda: bench.seen)
    bench.heard("GPU-0", 31)
    await anyio.wait_all_tasks_blocked()
    assert bench.asked == 1
