"""Calls that are counted until they come back, on as few threads as will do."""

import threading

import anyio
import pytest

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml import driver_calls
from gpu_plugin.nvml.driver_calls import DriverCalls
from gpu_plugin.nvml.port import NvmlError

from .conftest import driver_threads
from .monitored import LONG


class Gate:
    """A function that returns once it is opened."""

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
        await calls.begin(gate).wait(LONG)
    assert given_up.cancelled_caught
    assert calls.under_way
    job = calls.begin(gate)
    gate.free.set()
    assert await job.wait(LONG)
    assert job.done.result() == "through"
    assert not calls.under_way


async def test_a_call_that_comes_in_time_is_not_counted(calls):
    assert await (calls.begin(lambda: 6)).done == 6
    assert not calls.under_way


async def test_a_call_that_fails_late_is_counted_no_more(calls):
    gate = Gate()

    def fail():
        gate()
        raise NvmlError(Return.GPU_IS_LOST, "nvmlDeviceGetUUID")

    job = calls.begin(fail)
    await job.wait(0.01)
    gate.free.set()
    await job.wait(LONG)
    await anyio.lowlevel.checkpoint()
    assert not calls.under_way


# Threads


async def test_quick_calls_are_made_one_after_the_other_on_one_thread(calls):
    before, order = set(driver_threads()), []
    jobs = [calls.begin(lambda n=n: order.append((n, threading.current_thread()))) for n in range(100)]
    for job in jobs:
        assert await job.wait(LONG)
    assert [n for n, _ in order] == list(range(100))
    assert len({thread for _, thread in order}) == 1
    assert len(set(driver_threads()) - before) == 1


async def test_calls_that_take_their_time_go_on_side_by_side_and_one_thread_is_left(calls):
    before, together = set(driver_threads()), threading.Barrier(6, timeout=LONG)
    jobs = [calls.begin(together.wait) for _ in range(6)]
    for job in jobs:
        assert await job.wait(LONG)
    assert sorted(job.done.result() for job in jobs) == list(range(6))
    with anyio.fail_after(LONG):
        while len(set(driver_threads()) - before) > 1:
            await anyio.lowlevel.checkpoint()


async def test_a_call_that_hangs_holds_its_own_thread_alone(calls):
    before, gate = set(driver_threads()), Gate()
    hung = calls.begin(gate)
    for number in range(20):
        job = calls.begin(lambda number=number: number)
        assert await job.wait(LONG)
        assert job.done.result() == number
    assert len(set(driver_threads()) - before) == 2
    assert not hung.returned
    gate.free.set()
    assert await hung.wait(LONG)


async def test_after_close_the_thread_ends_and_another_call_begins_another(calls):
    before = set(driver_threads())
    assert await calls.begin(threading.get_ident).wait(LONG)
    (first,) = set(driver_threads()) - before
    calls.close()
    await anyio.to_thread.run_sync(first.join, LONG)
    assert not first.is_alive()
    again = calls.begin(threading.get_ident)
    assert await again.wait(LONG)


async def test_a_call_that_waited_when_all_was_closed_is_made_and_leaves_no_thread(calls):
    gate = Gate()
    hung, waits = calls.begin(gate), calls.begin(threading.current_thread)
    calls.close()
    assert await waits.wait(LONG)
    await anyio.to_thread.run_sync(waits.done.result().join, LONG)
    assert not waits.done.result().is_alive()
    gate.free.set()
    assert await hung.wait(LONG)


async def test_a_call_for_which_no_thread_can_be_started_fails_and_the_next_one_is_made(calls, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patches:
        patches.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            await calls.begin(int).done
    with monkeypatch.context() as patches:
        patches.setattr(driver_calls, "STALL", 100 * LONG)  # nobody is at work for whom the next call has to wait
        assert await calls.begin(int).wait(LONG)
    gate = Gate()
    held = calls.begin(gate)
    with monkeypatch.context() as patches:
        patches.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            await calls.begin(int).done
    gate.free.set()
    assert await held.done == "through"
