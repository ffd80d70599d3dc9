"""Blocking calls: their outcomes, their time limits, calls that hang, and calls of which at most one runs."""

import asyncio
import errno
import gc
import subprocess
import sys
import threading
import time

import anyio
import pytest

from gpu_plugin.runtime.threads import Job, NoAnswerError, SlowCall, begin

SHORT = 0.01
LONG = 10.0


class Disk:
    """Answers with a number, one higher each time, while `free` is set."""

    def __init__(self):
        self.free = threading.Event()
        self.free.set()
        self.asked = 0
        self.error = None

    def __call__(self):
        self.asked += 1
        number = self.asked
        self.free.wait(LONG)
        if self.error is not None:
            raise self.error
        return number


@pytest.fixture
def disk():
    made = Disk()
    yield made
    made.free.set()


@pytest.fixture
def call():
    return SlowCall("calls")


def alone(call, seconds):
    return begin(call, "calls").result(seconds)


async def test_a_call_runs_on_a_daemon_thread_of_its_own_which_ends_with_it():
    thread = await begin(threading.current_thread, "calls").result(LONG)
    assert (thread.name, thread.daemon) == ("calls", True)
    thread.join(LONG)
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [OSError(5, "refused"), TimeoutError(errno.ETIMEDOUT, "late"), TimeoutError()])
async def test_an_error_of_a_call_is_raised_where_it_is_waited_for(call, disk, error):
    disk.error = error
    for ask in (alone, call.joined, call.fresh):
        with pytest.raises(type(error)) as caught:
            await ask(disk, LONG)
        assert caught.value is error
        assert not call.begun


async def test_a_call_that_hangs_raises_no_answer_and_leaves_others_free(call, disk):
    disk.free.clear()
    for ask in (alone, call.joined, call.fresh):
        with pytest.raises(NoAnswerError, match=r"no answer for 0\.01 s"):
            await ask(disk, SHORT)
    assert await begin(lambda: "answer", "calls").result(LONG) == "answer"


async def test_a_late_outcome_stays_readable(disk):
    disk.free.clear()
    started = anyio.current_time()
    job = begin(disk, "calls")
    assert not await job.wait(SHORT)
    assert (started <= job.started <= anyio.current_time(), job.returned) == (True, False)
    disk.free.set()
    assert await job.wait(LONG)
    assert (job.done.result(), job.returned) == (1, True)


async def test_a_waiter_leaves_nothing_behind_with_a_hung_call(disk):
    disk.free.clear()
    job = begin(disk, "calls")
    for _ in range(3):
        assert not await job.wait(SHORT)
        with anyio.move_on_after(SHORT):
            await job.wait()
    assert not job.done._callbacks


async def test_a_late_failure_without_a_waiter_is_not_logged(disk):
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    disk.error = OSError(5, "refused")
    disk.free.clear()
    job = begin(disk, "calls")
    assert not await job.wait(SHORT)
    disk.free.set()
    assert await job.wait(LONG)
    del job
    gc.collect()
    assert complaints == []


async def test_without_a_further_thread_the_call_fails(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        await begin(int, "calls").result(LONG)


def test_a_loop_may_close_while_a_call_is_under_way(disk):
    async def leave():
        job = begin(disk, "calls")
        assert not await job.wait(SHORT)
        return job

    disk.free.clear()
    job = asyncio.run(leave())
    (thread,) = (each for each in threading.enumerate() if each.name == "calls")
    disk.free.set()
    thread.join(LONG)
    assert not thread.is_alive()
    assert not job.returned


def test_a_hung_call_does_not_hold_the_process():
    code = """
import anyio, threading
from gpu_plugin.runtime.threads import begin

async def main():
    print("done" if await begin(threading.Event().wait, "calls").wait(0.01) else "hung")

anyio.run(main)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "hung", "")


# One at a time


async def test_a_call_that_comes_back_leaves_nothing_behind(call, disk):
    assert await call.joined(disk, LONG) == 1
    assert (call.begun, call.under_way, call.back, call.started) == (False, False, False, None)
    assert await call.joined(disk, LONG) == 2
    assert await call.fresh(disk, LONG) == 3


async def test_a_call_that_hangs_is_the_only_one_and_its_answer_is_collected_later(call, disk):
    disk.free.clear()
    for ask in (call.joined, call.fresh) * 3:
        with pytest.raises(NoAnswerError):
            await ask(disk, SHORT)
    assert (disk.asked, call.begun, call.under_way, call.back) == (1, True, True, False)
    assert call.started <= anyio.current_time()
    disk.free.set()
    assert await call.wait(LONG)
    assert (call.begun, call.under_way, call.back) == (True, False, True)
    assert await call.joined(disk, LONG) == 1
    assert not call.begun


async def test_a_fresh_call_waits_for_the_call_before(call, disk):
    disk.free.clear()
    call.begin(disk)
    with pytest.raises(NoAnswerError):
        await call.fresh(disk, SHORT)
    disk.free.set()
    assert await call.fresh(disk, LONG) == 2


@pytest.mark.parametrize(("way", "results"), [("joined", [1, 1, 1]), ("fresh", [2, 3, 4])])
async def test_several_may_wait_for_it_and_calls_still_go_one_at_a_time(call, disk, way, results):
    found, side_by_side, inside = [], [], []

    def ask():
        inside.append(1)
        number = disk()
        time.sleep(0.01)  # long enough for another to begin, if it could
        side_by_side.append(len(inside) - 1)
        inside.pop()
        return number

    async def wait():
        found.append(await getattr(call, way)(ask, LONG))

    disk.free.clear()
    call.begin(ask)
    async with anyio.create_task_group() as tasks:
        for _ in results:
            tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        disk.free.set()
    assert (found, set(side_by_side), call.begun) == (results, {0}, False)


async def test_the_call_before_takes_of_the_time_there_is(call, monkeypatch):
    now, patience = anyio.current_time(), []

    async def wait(_job, seconds):
        nonlocal now
        patience.append(seconds)
        now += 3.0
        return seconds >= 3.0

    call.begin(lambda: 1)
    monkeypatch.setattr(Job, "wait", wait)
    monkeypatch.setattr(anyio, "current_time", lambda: now)
    with pytest.raises(NoAnswerError, match="no answer for 5 s"):
        await call.fresh(lambda: 2, 5.0)
    assert patience == [5.0, 2.0]
    assert call.begun


async def test_a_forgotten_call_is_not_waited_for(call, disk):
    disk.free.clear()
    call.begin(disk)
    call.forget()
    assert not await call.wait(SHORT)
    disk.free.set()
    assert await call.joined(disk, LONG) == 2


async def test_a_call_outlives_its_cancelled_waiter(call, disk):
    disk.free.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call.joined, disk, LONG)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert call.under_way
    disk.free.set()
    assert await call.joined(disk, LONG) == 1


@pytest.mark.parametrize("how", ["joined", "fresh"])
async def test_a_call_that_came_back_counts_however_late_the_loop_runs(call, disk, how):
    held = threading.Event()

    def quick():
        held.wait(LONG)
        return disk()

    async def hold_the_loop():
        held.set()
        time.sleep(5 * SHORT)  # noqa: ASYNC251 - as a process that was stopped, or a machine that was

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold_the_loop)
        assert await getattr(call, how)(quick, SHORT) == 1
    assert not call.begun
