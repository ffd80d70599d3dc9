"""Calls that are counted until they come back, on as few threads as will do."""

import threading

import anyio
import pytest

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.nvml.session import DriverCalls
from gpu_plugin.runtime import threads as runtime_threads
from gpu_plugin.runtime.threads import Workers, begin, settled

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


async def test_unrelated_calls_do_not_delay_the_closing(calls):
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
        patches.setattr(runtime_threads, "STALL", 100 * LONG)  # no thread is busy, so the next call need not wait
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
