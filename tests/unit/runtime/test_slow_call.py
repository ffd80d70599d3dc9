"""A slow call: one at a time, given up on without being ended, and collected by whoever asks next."""

import threading
import time
from functools import partial

import anyio
import pytest

from gpu_plugin.runtime import slow_call
from gpu_plugin.runtime.slow_call import SlowCall
from gpu_plugin.runtime.threads import begin

LONG = 10.0
SHORT = 0.01


class Disk:
    """Answers with a number, one higher each time, while `free` is set."""

    def __init__(self):
        self.free = threading.Event()
        self.free.set()
        self.asked = 0
        self.refuses = False

    def __call__(self):
        self.asked += 1
        number = self.asked
        self.free.wait(LONG)
        if self.refuses:
            raise OSError(5, "refused")
        return number


@pytest.fixture
def disk():
    made = Disk()
    yield made
    made.free.set()


@pytest.fixture
def call():
    return SlowCall(partial(begin, name="slow"))


async def test_a_call_that_comes_back_leaves_nothing_behind(call, disk):
    assert await call.joined(disk, LONG) == 1
    assert (call.begun, call.under_way, call.back, call.started) == (False, False, False, None)
    assert await call.joined(disk, LONG) == 2
    assert await call.fresh(disk, LONG) == 3


async def test_one_that_hangs_is_the_only_one_and_its_answer_is_collected_later(call, disk):
    disk.free.clear()
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"no answer for 0\.01 s"):
            await call.joined(disk, SHORT)
        with pytest.raises(TimeoutError, match=r"no answer for 0\.01 s"):
            await call.fresh(disk, SHORT)
    assert (disk.asked, call.begun, call.under_way, call.back) == (1, True, True, False)
    assert call.started <= anyio.current_time()
    disk.free.set()
    assert await call.wait(LONG)
    assert (call.begun, call.under_way, call.back) == (True, False, True)
    assert await call.joined(disk, LONG) == 1, "whoever joins takes what it brought"
    assert not call.begun


async def test_who_wants_a_call_of_his_own_waits_for_the_one_before(call, disk):
    disk.free.clear()
    call.begin(disk)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep, 0)
        with pytest.raises(TimeoutError):
            await call.fresh(disk, SHORT)
        disk.free.set()
    assert await call.fresh(disk, LONG) == 2


@pytest.mark.parametrize(("way", "brought"), [("joined", [1, 1, 1]), ("fresh", [2, 3, 4])])
async def test_several_may_wait_for_it_and_calls_still_go_one_at_a_time(call, disk, way, brought):
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
        for _ in brought:
            tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        disk.free.set()
    assert (found, set(side_by_side), call.begun) == (brought, {0}, False)


async def test_the_one_before_takes_of_the_time_there_is(call, monkeypatch):
    """Both together may take so long, not each of them."""
    now, patience = anyio.current_time(), []

    async def settles(job, seconds):
        nonlocal now
        patience.append(seconds)
        now += 3.0
        return seconds >= 3.0

    call.begin(lambda: 1)
    monkeypatch.setattr(slow_call, "settled", settles)
    monkeypatch.setattr(anyio, "current_time", lambda: now)
    with pytest.raises(TimeoutError, match="no answer for 5 s"):
        await call.fresh(lambda: 2, 5.0)
    assert patience == [5.0, 2.0]
    assert call.begun, "the one of its own"


async def test_what_a_call_raises_is_raised_once(call, disk):
    disk.refuses = True
    for ask in (call.joined, call.fresh):
        with pytest.raises(OSError, match="refused"):
            await ask(disk, LONG)
        assert not call.begun
    call.begin(disk)
    assert await call.wait()
    assert isinstance(call.take().done.exception(), OSError)


async def test_what_is_forgotten_is_not_waited_for(call, disk):
    disk.free.clear()
    call.begin(disk)
    call.forget()
    assert not await call.wait(SHORT)
    disk.free.set()
    assert await call.joined(disk, LONG) == 2


async def test_the_call_outlives_whoever_waited_for_it(call, disk):
    disk.free.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call.joined, disk, LONG)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert call.under_way
    disk.free.set()
    assert await call.joined(disk, LONG) == 1


@pytest.mark.parametrize("how", ["joined", "fresh"])
async def test_what_came_back_counts_however_late_the_loop_gets_to_look(call, disk, how):
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
