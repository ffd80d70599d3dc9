import asyncio
import errno
import gc
import subprocess
import sys
import threading
from functools import partial

import anyio
import pytest

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.runtime.slow_call import SlowCall
from gpu_plugin.runtime.threads import NoAnswerError, Workers, answered, begin, settled

SOON = 0.01
LONG = 5.0


class Hang:
    """A call that comes back when it is let go."""

    def __init__(self, outcome="late"):
        self.outcome = outcome
        self.begun = threading.Event()
        self.free = threading.Event()
        self.thread = threading.current_thread()

    def __call__(self):
        self.thread = threading.current_thread()
        self.begun.set()
        assert self.free.wait(10 * LONG)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def threads():
    made = Workers("calls")
    yield made
    made.close()


@pytest.fixture
def hang():
    made = Hang()
    yield made
    made.free.set()


async def joined(thread):
    await anyio.to_thread.run_sync(thread.join, LONG)
    return not thread.is_alive()


async def test_a_call_gives_its_result_from_a_daemon_thread_of_its_own(threads):
    thread = await threads.run(threading.current_thread, LONG)
    assert thread is not threading.current_thread()
    assert thread.daemon
    assert thread.name == "calls"


async def test_calls_share_one_thread_while_they_come_back(threads):
    used = {await threads.run(threading.current_thread, LONG) for _ in range(5)}
    assert len(used) == 1


async def test_calls_are_made_in_their_order(threads):
    made: list[int] = []
    async with anyio.create_task_group() as group:
        for number in range(10):
            group.start_soon(threads.run, lambda number=number: made.append(number), LONG)
    assert made == list(range(10))


@pytest.mark.parametrize("error", [NvmlError(Return.GPU_IS_LOST, "nvmlDeviceGetName"), ValueError("odd"), OSError(5)])
async def test_an_exception_passes_and_the_thread_lives_on(threads, error):
    def call():
        raise error

    before = await threads.run(threading.current_thread, LONG)
    with pytest.raises(type(error)) as caught:
        await threads.run(call, LONG)
    assert caught.value is error
    assert await threads.run(threading.current_thread, LONG) is before


async def test_a_hung_call_leaves_others_free(threads, hang):
    with pytest.raises(TimeoutError, match=r"no answer for 0\.01 s"):
        await threads.run(hang, SOON)
    assert [await threads.run(lambda n=n: n, LONG) for n in range(3)] == [0, 1, 2]
    assert hang.thread.is_alive()


async def test_several_hung_calls_leave_others_free():
    threads, hangs = Workers("calls"), [Hang() for _ in range(3)]
    jobs = [threads.begin(hang) for hang in hangs]
    assert await threads.run(lambda: "answer", LONG) == "answer"
    for hang in hangs:
        hang.free.set()
    assert [await job.done for job in jobs] == ["late"] * 3
    threads.close()


async def test_a_late_outcome_stays_readable(threads, hang):
    started = anyio.current_time()
    job = threads.begin(hang)
    assert not await settled(job, SOON)
    assert started <= job.started <= anyio.current_time()
    hang.free.set()
    with anyio.fail_after(LONG):
        assert await job.done == "late"
    assert job.done.result() == "late"


async def test_who_waits_for_a_hung_call_leaves_nothing_behind_with_it(hang):
    job = begin(hang, "one-call")
    for _ in range(3):
        assert not await settled(job, SOON)
        with anyio.move_on_after(SOON):
            await settled(job)
    assert not job.done._callbacks
    hang.free.set()
    assert await settled(job, LONG)


@pytest.mark.parametrize("error", [TimeoutError(errno.ETIMEDOUT, "Connection timed out"), TimeoutError()])
async def test_a_call_that_says_time_is_up_is_not_taken_for_one_without_an_answer(threads, error):
    def call():
        raise error

    slow = SlowCall(partial(begin, name="one-call"))
    ways = (threads.run, slow.joined, slow.fresh, lambda call, seconds: answered(begin(call, "one-call"), seconds))
    for ask in ways:
        with pytest.raises(TimeoutError) as caught:
            await ask(call, LONG)
        assert caught.value is error
    assert not isinstance(error, NoAnswerError)


async def test_each_way_of_asking_says_that_there_is_no_answer(threads, hang):
    slow = SlowCall(partial(begin, name="one-call"))
    ways = (threads.run, slow.joined, slow.fresh, lambda call, seconds: answered(begin(call, "one-call"), seconds))
    for ask in ways:
        with pytest.raises(NoAnswerError, match=r"no answer for 0\.01 s"):
            await ask(hang, SOON)


async def test_a_late_failure_nobody_asks_for_is_not_complained_of(threads):
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    hang = Hang(NvmlError(Return.UNKNOWN, "nvmlDeviceGetName"))
    job = threads.begin(hang)
    assert not await settled(job, SOON)
    threads.close()
    hang.free.set()
    assert await joined(hang.thread)
    await anyio.lowlevel.checkpoint()
    assert isinstance(job.done.exception(), NvmlError)
    del job
    gc.collect()
    assert complaints == []


async def test_who_gives_up_waiting_leaves_the_call_and_the_others_alone(threads, hang):
    with anyio.move_on_after(SOON) as scope:
        await threads.run(hang, LONG)
    assert scope.cancelled_caught
    with anyio.fail_after(LONG):
        assert await threads.run(lambda: "answer", LONG) == "answer"


async def test_after_close_the_idle_thread_ends_and_another_call_begins_another(threads):
    first = await threads.run(threading.current_thread, LONG)
    threads.close()
    assert await joined(first)
    assert await threads.run(threading.current_thread, LONG) is not first


async def test_close_before_any_call_does_nothing(threads):
    before = set(threading.enumerate())
    threads.close()
    assert not [each for each in set(threading.enumerate()) - before if each.name == "calls"]


def test_a_loop_may_close_while_a_call_is_under_way(hang):
    async def leave():
        threads = Workers("calls")
        job = threads.begin(hang)
        assert not await settled(job, SOON)
        threads.close()
        return job

    job = asyncio.run(leave())
    assert hang.begun.is_set()
    hang.free.set()
    hang.thread.join(LONG)
    assert not hang.thread.is_alive()
    assert not job.done.done()


def test_a_hung_call_does_not_hold_the_process():
    code = """
import anyio, threading
from gpu_plugin.runtime.threads import Workers, settled

async def main():
    print("done" if await settled(Workers("calls").begin(threading.Event().wait), 0.01) else "hung")

anyio.run(main)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "hung", "")


async def test_a_thread_of_its_own_ends_with_its_call():
    threads = []

    def call():
        threads.append(threading.current_thread())
        return 7

    assert await begin(call, "one-call").done == 7
    threads[0].join(LONG)
    assert not threads[0].is_alive()
    assert (threads[0].name, threads[0].daemon) == ("one-call", True)


async def test_what_a_call_on_its_own_thread_raises_is_raised_where_it_is_waited_for():
    def call():
        raise NvmlError(Return.TIMEOUT, "wait")

    with pytest.raises(NvmlError):
        await begin(call, "one-call").done
