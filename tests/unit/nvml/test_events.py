import asyncio
import logging
import threading
from types import SimpleNamespace

import anyio
import pytest

from gpu_plugin.devices.nvml_h import EventType, Return
from gpu_plugin.nvml import events
from gpu_plugin.nvml.events import EventBatch, EventWaiter, WaitFailures
from gpu_plugin.nvml.port import Event, EventSet, Handle, NvmlError

SET = EventSet(7)
GPU = Handle(0x1000)
LONG = 5.0

QUIET = NvmlError(Return.TIMEOUT, "nvmlEventSetWait_v2")
HASTY = object()
"""A driver that says at once that nothing came in time."""
BROKEN = NvmlError(Return.UNKNOWN, "nvmlEventSetWait_v2")


class Pauses:
    """In the place of the waiter's stop flag: a pause takes no time but the clock's, and is written down."""

    def __init__(self, clock):
        self.clock = clock
        self.flag = threading.Event()
        self.taken = []

    def is_set(self):
        return self.flag.is_set()

    def set(self):
        self.flag.set()

    def wait(self, seconds):
        self.taken.append(seconds)
        self.clock.now += seconds


class Script:
    """A driver whose waits go as written, and end with the waiter's."""

    def __init__(self, script, clock):
        self.script = list(script)
        self.clock = clock
        self.waits = []
        self.end = lambda: None

    def wait(self, event_set, timeout_ms):
        assert event_set == SET
        assert 1 <= timeout_ms <= events.WAIT_MS
        if not self.script:
            raise QUIET  # it is over: nothing is ready
        self.waits.append(self.clock.now)
        step = self.script.pop(0)
        if step is QUIET:
            self.clock.now += timeout_ms / 1000
        elif step is HASTY:
            step = QUIET
        if not self.script:
            self.end()
        if isinstance(step, Exception):
            raise step
        return step


class Outcome:
    """The reports of a waiter, and the threads that made them."""

    def __init__(self):
        self.events = []
        self.failures = []
        self.troubles = []
        self.threads = set()

    def deliver(self, event):
        self.threads.add(threading.current_thread())
        self.events.append(event)

    def on_failure(self, error):
        self.threads.add(threading.current_thread())
        self.failures.append(error)

    def report_trouble(self, why):
        self.threads.add(threading.current_thread())
        self.troubles.append(why)


@pytest.fixture
def play(monkeypatch):
    """Lets a waiter go through a script to its end; gives the driver, the pauses and the outcome."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def run(script, wait_failures=None):
        driver, outcome, pauses = Script(script, clock), Outcome(), Pauses(clock)
        handed_on = wait_failures or WaitFailures()
        waiter = EventWaiter(driver, SET, outcome.deliver, outcome.on_failure, outcome.report_trouble, handed_on)  # type: ignore[arg-type]
        waiter._stop = pauses  # type: ignore[assignment]
        driver.end = waiter.stop
        waiter.start()
        await anyio.to_thread.run_sync(waiter._thread.join, LONG)
        assert not waiter._thread.is_alive()
        assert waiter._thread.daemon
        return driver, pauses, outcome

    return run


def event(number):
    return Event(GPU, EventType.XID_CRITICAL, number)


async def test_events_arrive_in_order_on_the_event_loop(play):
    sent = [event(number) for number in (13, 79, 79, 48, 31)]
    _, pauses, outcome = await play([sent[0], QUIET, *sent[1:3], QUIET, *sent[3:], QUIET])
    assert outcome.events == sent
    assert outcome.threads == {threading.current_thread()}
    assert (outcome.failures, pauses.taken) == ([], [])


def test_events_are_delivered_at_once_and_those_of_a_storm_in_batches():
    batch, waits, batches = EventBatch(), [], []
    arrived = [at / 100 for at in range(500)]
    held: list[float] = []
    for now in arrived:
        if held and batch.due <= now:
            waits += [batch.due - at for at in held]
            batches.append(len(batch.take_all()))
            held = []
        batch.add(event(31), now)
        held.append(now)
        if batch.due <= now:
            waits += [0.0 for _ in held]
            batches.append(len(batch.take_all()))
            held = []
    assert waits[: events.BURST] == [0.0] * events.BURST
    assert max(waits) <= events.BATCH_SECONDS + 1e-9
    assert len(batches) < len(arrived) / 2
    batch = EventBatch()
    for number in range(1, 200):  # too few for a storm
        batch.add(event(31), number / 30)
        assert batch.due == number / 30
        batch.take_all()


async def test_events_of_a_storm_arrive_all_and_in_order(play):
    sent = [event(number) for number in range(100)]
    _, _, outcome = await play([*sent, QUIET])
    assert outcome.events == sent


async def test_a_driver_that_does_not_wait_is_not_asked_in_a_loop(play, caplog):
    driver, pauses, outcome = await play([*[HASTY] * 20, QUIET])
    assert pauses.taken == [min(events.FIRST_PAUSE, events.WAIT_MS / 1000)] * 20
    assert (len(driver.waits), outcome.failures, caplog.records) == (21, [], [])


async def test_an_unexpected_error_does_not_end_the_thread(play, caplog):
    odd = RuntimeError("a fault of ours")
    _, pauses, outcome = await play([odd, event(79), QUIET])
    assert (outcome.events, outcome.failures, pauses.taken) == ([event(79)], [odd], [0.25])
    assert "a fault of ours" in caplog.text


async def test_a_failing_wait_is_repeated_after_growing_pauses_and_logged_once(play, caplog):
    driver, pauses, outcome = await play([*[BROKEN] * 7, QUIET])
    assert pauses.taken == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    for at in driver.waits:
        assert sum(at <= other < at + 1 for other in driver.waits) < 5
    assert outcome.failures == [BROKEN] * 7, "each failure is a reason to look for oneself"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(BROKEN) in record.getMessage()


async def test_a_failing_wait_is_logged_once_a_minute_and_pauses_for_half_a_minute_at_most(play, caplog):
    driver, pauses, _ = await play([*[BROKEN] * 40, QUIET])
    assert max(pauses.taken) == 30.0
    minutes = (driver.waits[-1] - driver.waits[0]) / 60
    assert 0.8 * minutes <= len(caplog.records) <= minutes + 1


async def test_a_waiter_continues_the_pauses_of_the_waiter_before_it(play, caplog):
    wait_failures = WaitFailures()  # each is stopped during its last wait, which counts for nothing
    played = [await play([BROKEN] * 3, wait_failures) for _ in range(3)]
    assert [pauses.taken for _, pauses, _ in played] == [[0.25, 0.5], [1.0, 2.0], [4.0, 8.0]]
    assert [outcome.troubles for _, _, outcome in played] == [[], [str(BROKEN)], [str(BROKEN)]]
    assert len(caplog.records) == 1
    _, pauses, outcome = await play([QUIET, BROKEN, QUIET], wait_failures)
    assert (pauses.taken, outcome.troubles) == ([0.25], [""])


@pytest.mark.parametrize("step", [QUIET, event(79)])
async def test_a_wait_that_works_again_resets_the_pauses(play, step):
    _, pauses, _ = await play([BROKEN, BROKEN, BROKEN, step, BROKEN, BROKEN, QUIET])
    assert pauses.taken == [0.25, 0.5, 1.0, 0.25, 0.5]


async def test_failures_between_events_are_paused_for_too(play, caplog):
    script = [step for number in range(20) for step in (event(number), BROKEN)]
    driver, _, outcome = await play([*script, QUIET])
    assert len(outcome.events) == 20
    for at in driver.waits:
        assert sum(at <= other < at + 1 for other in driver.waits) <= 8
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ([QUIET, BROKEN, BROKEN, QUIET], [""]),
        ([QUIET, *[BROKEN] * 5, QUIET, QUIET], ["", str(BROKEN), ""]),
        ([QUIET, *[BROKEN] * 3, event(79), QUIET, *[BROKEN] * 4, QUIET], ["", str(BROKEN), "", str(BROKEN), ""]),
        ([*[BROKEN] * 3, event(79), QUIET], [str(BROKEN), ""]),
        ([*[BROKEN] * 2, QUIET, *[BROKEN] * 2, QUIET, *[BROKEN] * 2, QUIET], [""]),
        ([*[RuntimeError("odd")] * 4, QUIET], [repr(RuntimeError("odd")), ""]),
    ],
)
async def test_three_failed_waits_in_a_row_are_reported_until_a_wait_works(play, script, told):
    _, _, outcome = await play(script)
    assert outcome.troubles == told
    assert outcome.threads == {threading.current_thread()}


async def test_an_event_of_the_last_wait_is_not_lost(play):
    _, _, outcome = await play([event(79)])  # stopped while it waits
    assert outcome.events == [event(79)]


async def test_a_wait_that_fails_while_the_waiter_stops_is_not_logged(play, caplog):
    _, pauses, outcome = await play([BROKEN])
    assert caplog.records == []
    assert (pauses.taken, outcome.failures) == ([], [])


class Held:
    """A driver whose wait returns once `go` is set."""

    def __init__(self):
        self.waiting, self.go = threading.Event(), threading.Event()

    def wait(self, event_set, timeout_ms):
        self.waiting.set()
        assert self.go.wait(LONG)
        return event(79)

    async def stopped(self, outcome):
        """Return a waiter that was stopped during its wait."""
        waiter = EventWaiter(self, SET, outcome.deliver, outcome.on_failure, outcome.report_trouble, WaitFailures())  # type: ignore[arg-type]
        waiter.start()
        await anyio.to_thread.run_sync(self.waiting.wait, LONG)
        waiter.stop()
        return waiter


def test_the_loop_may_close_during_a_wait():
    driver, outcome = Held(), Outcome()
    waiter = asyncio.run(driver.stopped(outcome))
    driver.go.set()
    waiter._thread.join(LONG)
    assert waiter.ended
    assert outcome.events == []


async def test_a_waiter_has_left_once_its_thread_is_out_of_the_driver():
    driver = Held()
    waiter = await driver.stopped(Outcome())
    assert not await waiter.left(0.01)
    driver.go.set()
    assert await waiter.left(LONG)
    assert waiter.ended


async def test_a_wait_that_hangs_is_stuck_also_while_the_set_is_emptied(monkeypatch):
    clock, in_driver, go = SimpleNamespace(now=0.0), threading.Semaphore(0), threading.Semaphore(0)
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: clock.now))

    class Hanging:
        def wait(self, event_set, timeout_ms):
            in_driver.release()
            assert go.acquire(timeout=LONG)
            raise QUIET

    outcome = Outcome()
    waiter = EventWaiter(Hanging(), SET, outcome.deliver, outcome.on_failure, outcome.report_trouble, WaitFailures())  # type: ignore[arg-type]
    waiter.start()
    for _ in ("the wait", "the one that empties the set"):
        assert await anyio.to_thread.run_sync(lambda: in_driver.acquire(timeout=LONG))
        waiter.stop()
        assert not waiter.stuck(1.0)
        clock.now += 1.0 + events.WAIT_MS / 1000 + 0.1
        assert waiter.stuck(1.0)
        go.release()
    assert await waiter.left(LONG)
    assert not waiter.stuck(1.0)


class Queue:
    """A driver with events ready, which says of every wait beyond them that a GPU is lost. `ended` waits for the first wait."""

    def __init__(self, ready, endless=False):
        self.ready, self.endless = list(ready), endless
        self.begun, self.stopped = threading.Event(), threading.Event()
        self.waits = 0

    def wait(self, event_set, timeout_ms):
        assert event_set == SET
        self.waits += 1
        if not self.begun.is_set():
            self.begun.set()
            self.stopped.wait(LONG)
            raise NvmlError(Return.GPU_IS_LOST, "nvmlEventSetWait_v2")
        if self.endless:
            return Event(GPU, EventType.XID_CRITICAL, 31)
        if self.ready:
            return self.ready.pop(0)
        raise NvmlError(Return.GPU_IS_LOST, "nvmlEventSetWait_v2")


async def stopped(driver):
    """Return the events that a waiter delivers if it is stopped during a wait."""
    delivered: list[Event] = []
    waiter = EventWaiter(driver, SET, delivered.append, lambda _: None, lambda _: None, WaitFailures())
    waiter.start()
    await anyio.to_thread.run_sync(driver.begun.wait, LONG)
    waiter.stop()
    driver.stopped.set()
    assert await waiter.left(LONG)
    return delivered


async def test_events_that_are_ready_at_the_end_are_delivered_before_the_set_is_freed():
    ready = [Event(Handle(gpu), EventType.XID_CRITICAL, 79) for gpu in (1, 2, 3)]
    driver = Queue(ready)
    assert await stopped(driver) == ready
    assert driver.waits == 5  # a failed wait, three events, and a wait without an event


async def test_a_driver_that_always_has_an_event_ready_does_not_keep_the_set_from_its_end():
    driver = Queue([], endless=True)
    assert 0 < len(await stopped(driver)) <= events.MAX_DRAINED
