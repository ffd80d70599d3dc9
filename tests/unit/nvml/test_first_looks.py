"""When the node is served for the first time, a GPU counts as healthy only after its own good look."""

import threading
import time

import anyio
import pytest

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Sample, facts
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.nvml import monitor
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.simulation.driver import SimulatedDriver

from .conftest import driver_threads
from .monitored import LONG, Bench


class Holding(SimulatedDriver):
    """Holds calls for a temperature until `free` is set. `held` counts them, `closed_under` those during a close."""

    def __init__(self, node):
        super().__init__(node)
        self.free = threading.Event()
        self.held = 0
        self.closed_under = 0

    def temperature(self, handle):
        with self._lock:
            self.held += 1
        try:
            assert self.free.wait(LONG)
        finally:
            with self._lock:
                self.held -= 1
        return super().temperature(handle)

    def close(self):
        self.closed_under += self.held
        super().close()


async def test_eight_gpus_that_hang_are_read_in_parallel_and_have_no_good_look(monkeypatch):
    monkeypatch.setattr(monitor, "FIRST_LOOKS", 0.3)
    bench = Bench(driver=Holding)
    began = anyio.current_time()
    await bench.monitor.open()
    assert anyio.current_time() - began < LONG / 2
    assert bench.driver.held == 8, "each of them, though none has answered"
    assert bench.seen == [], "what has not been looked at is neither good nor bad: the ledger holds it back"
    bench.monitor.timeout = 0.3
    async with bench.running():
        await bench.until(lambda: all("hung" in bench.faults(gpu) for gpu in range(8)))
        bench.driver.free.set()
        await bench.until(lambda: all("" in bench.faults(gpu) for gpu in range(8)))


async def test_eight_gpus_that_hang_at_the_start_are_held_back_until_each_has_had_a_good_look(monkeypatch):
    monkeypatch.setattr(monitor, "FIRST_LOOKS", 0.1)
    ledger = HealthLedger(HealthPolicy())

    def met(gpus):
        for gpu in gpus:
            ledger.watch(gpu.uuid, facts(gpu))

    bench = Bench(driver=Holding, met=met)
    healthy = []

    def judge(uuid, seen):
        ledger.observe(uuid, seen, time.time())
        healthy.append({each for each in bench.uuids if ledger.verdict(each) < Verdict.FATAL})

    bench.meddle = judge
    await bench.monitor.open()
    assert [ledger.verdict(uuid) for uuid in bench.uuids] == [Verdict.FATAL] * 8
    bench.monitor.timeout = 0.1
    async with bench.running():
        await bench.until(lambda: all("hung" in bench.faults(gpu) for gpu in range(8)))
        assert not any(healthy)
        bench.driver.free.set()
        await bench.until(lambda: healthy[-1] == set(bench.uuids))
    good = set()
    for (uuid, seen), fit in zip(bench.seen, healthy, strict=True):
        good |= {uuid} if not getattr(seen, "fault", "-") else set()
        assert fit <= good


async def test_looks_that_take_almost_a_second_are_over_in_little_more_than_one():
    bench = Bench(driver=lambda node: SimulatedDriver(node, latency={"total_energy": 0.4, "field_values": 0.0}))
    began = anyio.current_time()
    await bench.opened()
    assert anyio.current_time() - began < 8 * 0.4
    good = {uuid for uuid, seen in bench.seen if isinstance(seen, Sample) and not seen.fault}
    assert good == set(bench.uuids)


async def test_a_canceled_start_does_not_close_the_driver_during_a_call():
    bench = Bench(driver=Holding)
    with anyio.move_on_after(0.3):
        await bench.monitor.open()
    async with bench.running():
        await bench.turned(1)
        released = anyio.Event()

        async def release():
            await bench.monitor.release(None)
            released.set()

        async with anyio.create_task_group() as group:
            group.start_soon(release)
            await bench.turned(2)
            assert not released.is_set()
            bench.driver.free.set()
    assert bench.driver.closed_under == 0
    assert bench.driver._opened == 0


async def test_an_observer_that_fails_over_one_gpu_costs_no_other_its_looks(caplog):
    bench = Bench()
    await bench.monitor.open()
    odd = bench.uuids[3]

    def fails(uuid, seen):
        if uuid == odd:
            raise ValueError("odd")

    bench.meddle = fails
    async with bench.running():
        await bench.rounds(3, [gpu for gpu in range(8) if gpu != 3])
        bench.meddle = None
        await bench.rounds(2)
    assert caplog.text.count("ValueError: odd") == 1
    assert odd in caplog.text


async def test_a_single_refusal_to_open_is_no_fault_of_a_gpu():
    async with Bench().watching() as bench:
        bench.node.refuse("open", Return.UNKNOWN, times=1)
        since = len(bench.seen)
        await bench.monitor.release(frozenset({bench.uuids[3]}))
        await bench.rounds(2, [gpu for gpu in range(8) if gpu != 3])
    assert {seen.fault for uuid, seen in bench.seen[since:] if isinstance(seen, Sample)} == {""}


async def test_a_start_against_a_count_that_hangs_holds_one_thread_however_often_it_is_tried():
    free = threading.Event()

    class Uncounted(SimulatedDriver):
        def device_count(self):
            assert free.wait(LONG)
            return super().device_count()

    bench = Bench(driver=Uncounted, timeout=0.02)
    before = set(driver_threads())
    for _ in range(5):
        with pytest.raises((TimeoutError, NvmlError)):
            await bench.monitor.open()
    assert len(set(driver_threads()) - before) <= 2
    free.set()
    bench.monitor.timeout = LONG
    assert len((await bench.monitor.open()).gpus) == 8
    bench.monitor.close()
