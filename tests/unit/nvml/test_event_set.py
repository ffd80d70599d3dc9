"""No call enters an event set that is being freed, and no set is freed during a call."""

import asyncio
import random
import threading
from typing import cast

import anyio
import pytest

from gpu_plugin.devices.node import Gpu
from gpu_plugin.devices.nvml_h import EventType, Return
from gpu_plugin.nvml import events, subscription
from gpu_plugin.nvml.driver_calls import DriverCalls
from gpu_plugin.nvml.events import LONGEST_REBUILD_PAUSE, STABLE_AFTER
from gpu_plugin.nvml.look_requests import LookRequests
from gpu_plugin.nvml.port import Driver, Event, EventSet, Handle, NvmlError
from gpu_plugin.nvml.reports import Reports
from gpu_plugin.nvml.roster import Watched
from gpu_plugin.nvml.subscription import EventSubscription

from .monitored import LONG

GPUS = 4


class Sets:
    """The event calls of a driver. `wrongs` are calls that nvml.h forbids. Calls in `held` wait until `free` is set."""

    def __init__(self):
        self.lock = threading.Lock()
        self.free = threading.Event()
        self.held: set[str] = set()
        self.outcomes: dict[Handle, int] = {}
        self.wait_codes: list[int] = []
        self.always = 0
        self.inside: dict[EventSet, int] = {}
        self.ended: set[EventSet] = set()
        self.wrongs: list[str] = []
        self.made = 0
        self.waiting = 0
        self.most_waiting = 0

    def _enter(self, call, events):
        with self.lock:
            if events in self.ended:
                self.wrongs.append(f"{call} of set {events} after its end was begun")
            self.inside[events] = self.inside.get(events, 0) + 1
        if call in self.held:
            assert self.free.wait(LONG)

    def _leave(self, events):
        with self.lock:
            self.inside[events] -= 1

    def event_set(self):
        if "event_set" in self.held:
            assert self.free.wait(LONG)
        with self.lock:
            self.made += 1
            return EventSet(self.made)

    def free_event_set(self, events):
        with self.lock:
            if self.inside.get(events):
                self.wrongs.append(f"set {events} is freed under a call")
            if events in self.ended:
                self.wrongs.append(f"set {events} is freed twice")
            self.ended.add(events)
        if "free_event_set" in self.held:
            assert self.free.wait(LONG)

    def supported_event_types(self, handle):
        return int(EventType.XID_CRITICAL)

    def register_events(self, handle, mask, events):
        self._enter(f"register_events {handle}" if f"register_events {handle}" in self.held else "register", events)
        try:
            if handle in self.outcomes:
                raise NvmlError(self.outcomes[handle], "nvmlDeviceRegisterEvents")
        finally:
            self._leave(events)

    def wait(self, events, timeout_ms):
        with self.lock:
            self.waiting += 1
            self.most_waiting = max(self.most_waiting, self.waiting)
        self._enter("wait", events)
        try:
            threading.Event().wait(timeout_ms / 1000)
            code = self.wait_codes.pop(0) if self.wait_codes and timeout_ms else self.always
            raise NvmlError(code or Return.TIMEOUT, "nvmlEventSetWait_v2")
        finally:
            self._leave(events)
            with self.lock:
                self.waiting -= 1


class Alone:
    """A subscription without a monitor, and its reports by GPU."""

    def __init__(self):
        self.driver = Sets()
        self.calls = DriverCalls()
        self.told: dict[str, list[str]] = {}
        self.received: list[Event] = []
        self.requests = 0
        self.news = anyio.Event()
        driver = cast("Driver", self.driver)
        self.subscription = EventSubscription(driver, self.calls, cast("Reports", self), cast("LookRequests", self))
        self.gpus = [Watched(Gpu(f"GPU-{index}", index), Handle(index + 1)) for index in range(GPUS)]

    def receive(self, event):
        self.received.append(event)

    def all_gpus(self):
        self.requests += 1
        self._ring()

    def observe(self, uuid, told):
        self.told.setdefault(uuid, []).append(told.trouble)
        self._ring()

    def _ring(self):
        news, self.news = self.news, anyio.Event()
        news.set()

    def now(self):
        return [self.subscription.trouble(watched.gpu.uuid) for watched in self.gpus]

    async def turn(self, patience=0.1, gpus=None):
        self.subscription.collect()
        self.subscription.listen(LONG)
        rebuilt = await self.subscription.update(self.gpus if gpus is None else gpus, patience)
        self.subscription.report(watched.gpu.uuid for watched in self.gpus)
        self.subscription.listen(LONG)
        return rebuilt

    async def turns_until(self, condition):
        with anyio.fail_after(LONG):
            while not condition():
                await self.turn()
                await anyio.sleep(0.001)


@pytest.fixture
async def alone(monkeypatch):
    monkeypatch.setattr(events, "WAIT_MS", 5)
    monkeypatch.setattr(events, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(events, "LONGEST_PAUSE", 0.002)
    monkeypatch.setattr(subscription, "WAIT_MS", 5)
    made = Alone()
    yield made
    made.driver.free.set()
    made.subscription.stop()
    made.calls.close()


async def test_a_set_that_is_being_freed_is_replaced_and_no_call_enters_it(alone):
    await alone.turn()
    assert alone.now() == [""] * GPUS
    alone.driver.held = {"free_event_set"}
    alone.driver.wait_codes = [Return.GPU_IS_LOST]
    await alone.turns_until(lambda: alone.driver.made >= 2 and not any(alone.now()))
    await alone.turn()
    assert not await alone.subscription.leave(0.01), "the driver is not closed under the call that ends it"
    for _ in range(3):
        await alone.turn()
    alone.driver.free.set()
    with anyio.fail_after(LONG):
        while not await alone.subscription.leave(0.1):
            pass
    assert len(alone.driver.ended) == alone.driver.made
    assert alone.driver.wrongs == []


@pytest.mark.parametrize("released", [False, True])
async def test_a_set_is_not_freed_during_a_registration(alone, released):
    alone.driver.held = {"register_events 2"}
    await alone.turn(0.01)
    assert "has not answered" in alone.now()[1]
    left = [watched for watched in alone.gpus if not (released and watched.gpu.index == 1)]
    alone.driver.outcomes[Handle(2)] = Return.UNKNOWN
    assert not await alone.subscription.leave(0.01)
    await alone.turn(0.01, left)
    alone.driver.free.set()
    with anyio.fail_after(LONG):
        while alone.gpus[1].registering is not None:
            await alone.turn(0.01, left)
            await anyio.sleep(0.001)  # a turn with nothing to wait for does not let the loop take the answer
        while not await alone.subscription.leave(0.1):
            pass
    assert alone.driver.wrongs == []


@pytest.mark.parametrize("held", ["register_events 2", "free_event_set"])
async def test_an_unusable_set_that_cannot_be_replaced_is_reported_for_all_its_gpus(alone, monkeypatch, held):
    monkeypatch.setattr(subscription, "MAX_ABANDONED_SETS", 1)
    alone.driver.held = {held}
    await alone.turn(0.01)
    alone.driver.always = Return.GPU_IS_LOST
    await alone.turns_until(lambda: len(alone.driver.ended) >= 1 or alone.subscription._abandoned)
    await alone.turns_until(lambda: all(alone.now()))
    assert all(alone.told[watched.gpu.uuid][-1] for watched in alone.gpus)
    made = alone.driver.made
    for _ in range(5):
        await alone.turn(0.01)
    assert alone.driver.made <= made + 1, "there is a limit to what is left behind"
    alone.driver.always = 0
    alone.driver.free.set()
    alone.subscription._rebuilds.longest = 0.0
    alone.subscription._rebuilds.not_before = 0.0
    await alone.turns_until(lambda: alone.subscription._set and not alone.subscription._set.unusable)
    assert alone.driver.wrongs == []


async def test_late_reports_of_an_abandoned_set_do_not_affect_the_next_set(alone):
    await alone.turn()
    left = alone.subscription._set
    alone.driver.wait_codes = [Return.GPU_IS_LOST]
    await alone.turns_until(lambda: alone.subscription._set is not left)
    await alone.turn()
    requests = alone.requests
    alone.subscription._failed(left, NvmlError(Return.GPU_IS_LOST, "nvmlEventSetWait_v2"))
    alone.subscription._waiting_changed(left, "it failed")
    assert alone.now() == [""] * GPUS
    assert alone.requests == requests


@pytest.mark.parametrize("code", [Return.INVALID_ARGUMENT, Return.UNKNOWN, Return.UNINITIALIZED, 12345])
async def test_a_set_whose_wait_keeps_failing_is_replaced(alone, code):
    await alone.turn()
    alone.driver.wait_codes = [code] * events.MAX_FAILED_WAITS
    await alone.turns_until(lambda: alone.driver.made >= 2)
    await alone.turns_until(lambda: alone.driver.ended and not any(alone.now()))
    assert len(alone.driver.ended) == 1
    assert alone.driver.wrongs == []


async def test_sets_that_fail_again_and_again_are_replaced_less_often_and_reported(alone):
    clock = anyio.current_time()
    with anyio.move_on_after(1.0):
        while True:
            if not alone.driver.wait_codes:
                alone.driver.wait_codes = [Return.TIMEOUT, Return.TIMEOUT, Return.GPU_IS_LOST]
            await alone.turn()
            await anyio.sleep(0.002)
    assert alone.driver.made - GPUS * 2 <= 5, "a suspect is tried in a set of its own"
    assert all(alone.now())
    assert alone.subscription._rebuilds.not_before > clock + 2
    assert alone.driver.wrongs == []


async def test_the_pauses_before_new_sets_end_once_a_set_is_stable(alone):
    await alone.turn()
    rebuilds, live = alone.subscription._rebuilds, alone.subscription._set
    assert [rebuilds.failed(0.0, worked_for=20.0) for _ in range(9)] == [0, 0, 8, 16, 32, *[LONGEST_REBUILD_PAUSE] * 4]
    assert alone.now() == ["the wait for them keeps failing"] * GPUS
    live.born -= STABLE_AFTER
    assert alone.now() == [""] * GPUS
    live.born += STABLE_AFTER
    assert rebuilds.failed(0.0, worked_for=STABLE_AFTER) == 0
    assert alone.now() == [""] * GPUS


async def test_there_is_one_wait_at_a_time_and_the_next_follows_a_wait_that_hung(alone):
    await alone.turn()
    alone.driver.held = {"wait"}
    with anyio.fail_after(LONG):
        while not alone.driver.waiting:
            await anyio.sleep(0.001)
    await anyio.sleep(0.02)
    alone.subscription.stop()
    for _ in range(3):
        await alone.turn()
    assert alone.driver.most_waiting == 1
    alone.driver.held = set()
    alone.driver.free.set()
    with anyio.fail_after(LONG):  # no other turn comes
        while not (
            alone.subscription._set.waiter._thread.is_alive() and not alone.subscription._set.waiter._stop.is_set()
        ):
            await anyio.sleep(0.001)
    assert alone.driver.most_waiting == 1


@pytest.mark.parametrize("seed", range(12))
async def test_canceled_calls_misuse_no_set(alone, seed):
    chance = random.Random(seed)
    driver = alone.driver
    for _ in range(40):
        driver.wait_codes = [chance.choice([Return.TIMEOUT, Return.GPU_IS_LOST, Return.UNKNOWN])] * chance.randrange(5)
        driver.outcomes = {Handle(2): Return.UNKNOWN} if chance.random() < 0.3 else {}
        if chance.random() < 0.2:
            driver.free.clear()
            driver.held = {chance.choice(["free_event_set", "register_events 2", "event_set", "wait"])}
        else:
            driver.held = set()
            driver.free.set()
        alone.subscription._rebuilds.not_before = 0.0
        what = chance.choice([alone.turn, alone.turn, lambda: alone.subscription.leave(0.005)])
        task = asyncio.ensure_future(what())
        for _ in range(chance.randrange(60)):
            await asyncio.sleep(0 if chance.random() < 0.9 else 0.001)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None
        if chance.random() < 0.2:
            alone.subscription.stop()
    driver.held, driver.outcomes, driver.wait_codes = set(), {}, []
    driver.free.set()
    with anyio.fail_after(LONG):
        while not await alone.subscription.leave(0.1):
            pass
    assert driver.wrongs == []
    assert len(driver.ended) == driver.made
