"""Calls that are counted until they come back, on as few threads as will do."""

import threading

import anyio
import pytest

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.nvml.session import DriverCalls
from gpu_plugin.runtime import threads as runtime_threads
from gpu_plugin.runtime.threads import Workers, begin, settled

from .conftest import driver_threads
from .monitored import LONG


class Gate:
    """Holds whoever calls it until it is opened."""

    def __init__(self):
        self.free = threading.Event()

    def __call__(self):
        assert self.free.wait(LONG)
        return "through"


@pytest.fixture
async def calls():
    made = DriverCalls()
    yield made
    made.close()


async def test_a_call_is_under_way_from_when_it_is_handed_over_until_it_comes_back(calls):
    gate = Gate()
    with anyio.move_on_after(0.01) as given_up:
        await settled(calls.begin(gate), LONG)
    assert given_up.cancelled_caught
    assert calls.under_way
    job = calls.begin(gate)
    gate.free.set()
    assert await settled(job, LONG)
    assert job.done.result() == "through"
    assert not calls.under_way


async def test_a_call_that_comes_in_time_is_not_counted(calls):
    assert await (calls.begin(lambda: 6)).done == 6
    assert not calls.under_way


async def test_what_is_not_the_drivers_keeps_nobody_from_closing_it(calls):
    gate = Gate()
    job = calls.begin_unrelated(gate)
    await settled(job, 0.01)
    assert not job.done.done()
    assert not calls.under_way
    gate.free.set()
    await settled(job, LONG)


async def test_a_call_that_fails_late_is_counted_no_more(calls):
    gate = Gate()

    def fail():
        gate()
        raise NvmlError(Return.GPU_IS_LOST, "nvmlDeviceGetUUID")

    job = calls.begin(fail)
    await settled(job, 0.01)
    gate.free.set()
    await settled(job, LONG)
    await anyio.lowlevel.checkpoint()
    assert not calls.under_way


# Threads


@pytest.fixture
def workers():
    made = Workers("nvml-test")
    yield made
    made.close()


async def test_quick_calls_are_made_one_after_the_other_on_one_thread(workers):
    before, order = set(driver_threads()), []
    jobs = [workers.begin(lambda n=n: order.append((n, threading.current_thread()))) for n in range(100)]
    for job in jobs:
        assert await settled(job, LONG)
    assert [n for n, _ in order] == list(range(100))
    assert len({thread for _, thread in order}) == 1
    assert len(set(driver_threads()) - before) == 1


async def test_calls_that_take_their_time_go_on_side_by_side_and_one_thread_is_left(workers):
    before, together = set(driver_threads()), threading.Barrier(6, timeout=LONG)
    jobs = [workers.begin(together.wait) for _ in range(6)]
    for job in jobs:
        assert await settled(job, LONG)
    assert sorted(job.done.result() for job in jobs) == list(range(6))
    with anyio.fail_after(LONG):
        while len(set(driver_threads()) - before) > 1:
            await anyio.lowlevel.checkpoint()


async def test_a_call_that_hangs_holds_its_own_thread_alone(workers):
    before, gate = set(driver_threads()), Gate()
    hung = workers.begin(gate)
    for number in range(20):
        job = workers.begin(lambda number=number: number)
        assert await settled(job, LONG)
        assert job.done.result() == number
    assert len(set(driver_threads()) - before) == 2
    assert not hung.done.done()
    gate.free.set()
    assert await settled(hung, LONG)


async def test_after_close_the_thread_ends_and_another_call_begins_another(workers):
    before = set(driver_threads())
    assert await settled(workers.begin(threading.get_ident), LONG)
    (first,) = set(driver_threads()) - before
    workers.close()
    await anyio.to_thread.run_sync(first.join, LONG)
    assert not first.is_alive()
    again = workers.begin(threading.get_ident)
    assert await settled(again, LONG)


async def test_a_call_that_waited_when_all_was_closed_is_made_and_leaves_no_thread(workers):
    gate = Gate()
    hung, waits = workers.begin(gate), workers.begin(threading.current_thread)
    workers.close()
    assert await settled(waits, LONG)
    await anyio.to_thread.run_sync(waits.done.result().join, LONG)
    assert not waits.done.result().is_alive()
    gate.free.set()
    assert await settled(hung, LONG)


async def test_a_call_for_which_no_thread_can_be_started_fails_and_the_next_one_is_made(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    workers = Workers("nvml-test")
    with monkeypatch.context() as patches:
        patches.setattr(threading.Thread, "start", refuse)
        for job in (workers.begin(int), begin(int, "nvml-test")):
            with pytest.raises(RuntimeError, match="can't start"):
                await job.done
    with monkeypatch.context() as patches:
        patches.setattr(runtime_threads, "STALL", 100 * LONG)  # nobody is at work for whom the next call has to wait
        assert await settled(workers.begin(int), LONG)
    gate = Gate()
    held = workers.begin(gate)
    with monkeypatch.context() as patches:
        patches.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            await workers.begin(int).done
    gate.free.set()
    assert await held.done == "through"
    workers.close()
