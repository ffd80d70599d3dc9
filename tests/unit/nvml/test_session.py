"""The driver's opening and closing: one attempt at a time, never under a call."""

import threading
import time

import anyio
import pytest

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.driver_calls import DriverCalls
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.nvml.session import DriverSession
from gpu_plugin.simulation import profile
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode

from .monitored import LONG
from .test_driver_calls import Gate


@pytest.fixture
async def calls():
    made = DriverCalls()
    yield made
    made.close()


class Gated(SimulatedDriver):
    """A driver that holds these calls until its gate is opened."""

    def __init__(self, *held):
        super().__init__(SimulatedNode(profile.load("h200")))
        self.gate = Gate()
        self.held = set(held)

    def open(self):
        super().open()
        if "open" in self.held:
            self.gate()

    def close(self):
        if "close" in self.held:
            self.gate()
        super().close()


async def test_a_session_opens_once_and_closes(calls):
    driver = Gated()
    session = DriverSession(driver, calls)
    assert not session.holds
    assert await session.open(LONG) == ("580.159.04", 1, (13, 0))
    assert (session.is_open, session.holds, session.trouble) == (True, True, "")
    assert await session.open(LONG) == ("580.159.04", 1, (13, 0))
    assert driver.calls["open"] == 1
    assert await session.close(LONG)
    assert (session.is_open, session.holds) == (False, False)
    assert await session.close(LONG)
    assert driver.calls["close"] == 1


@pytest.mark.parametrize("call", ["open", "driver_version", "device_count"])
async def test_a_session_has_the_trouble_of_a_failed_opening_until_it_opens(calls, call):
    driver = Gated()
    driver._node.refuse(call, Return.LIB_RM_VERSION_MISMATCH, times=1)
    session = DriverSession(driver, calls)
    with pytest.raises(NvmlError):
        await session.open(LONG)
    assert "lib rm version mismatch" in session.trouble
    assert not session.holds
    assert driver._opened == 0
    await session.open(LONG)
    assert session.trouble == ""


async def test_a_driver_without_a_cuda_version_is_open(calls):
    driver = Gated()
    driver._node.refuse("cuda_version", Return.FUNCTION_NOT_FOUND)
    assert await DriverSession(driver, calls).open(LONG) == ("580.159.04", 1, None)


async def test_there_is_one_opening_at_a_time(calls):
    driver = Gated("open")
    session = DriverSession(driver, calls)
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"no answer for 0.01 s"):
            await session.open(0.01)
    assert (session.is_open, session.holds) == (False, True)
    assert not await session.close(0.01), "it cannot be closed while it is being opened"
    driver.gate.free.set()
    assert await session.close(LONG)
    assert driver.calls == {"open": 1, "close": 1}


async def test_there_is_one_closing_at_a_time_and_no_opening_during_it(calls):
    driver = Gated("close")
    session = DriverSession(driver, calls)
    await session.open(LONG)
    assert not await session.close(0.01)
    assert (session.is_open, session.holds) == (False, True)
    assert not await session.close(0.01)
    with pytest.raises(TimeoutError, match="closes"):
        await session.open(0.01)
    driver.gate.free.set()
    assert await session.close(LONG)
    assert driver.calls["close"] == 1
    await session.open(LONG)
    assert driver.calls["open"] == 2


async def test_a_session_is_closed_at_last_once_the_call_under_way_is_over(calls):
    driver = Gated()
    session = DriverSession(driver, calls)
    await session.open(LONG)
    gate = Gate()
    calls.begin(gate)
    assert not await session.close_at_last(0.01)
    threading.Timer(0.05, gate.free.set).start()
    assert await session.close_at_last(LONG)


async def test_a_refused_closing_counts_as_closed(calls):
    driver = Gated()
    driver._node.refuse("close", Return.UNINITIALIZED)
    session = DriverSession(driver, calls)
    await session.open(LONG)
    assert await session.close(LONG)
    assert not session.holds


async def test_the_driver_is_not_closed_during_a_call(calls):
    driver, gate = Gated(), Gate()
    session = DriverSession(driver, calls)
    await session.open(LONG)
    with anyio.move_on_after(0.01):
        await calls.begin(gate).wait(LONG)
    assert not await session.close(LONG)
    assert (session.is_open, driver.calls["close"]) == (True, 0)
    gate.free.set()
    while calls.under_way:
        await anyio.lowlevel.checkpoint()
    assert await session.close(LONG)


@pytest.mark.parametrize(("refusals", "attempts"), [(1, 2), (3, 4), (9, 4)])
async def test_a_refused_opening_is_repeated_before_it_is_reported(calls, refusals, attempts):
    driver = Gated()
    driver._node.refuse("open", Return.UNKNOWN, times=refusals)
    session = DriverSession(driver, calls)
    if refusals < attempts:
        await session.open(LONG, (0.0, 0.0, 0.0))
    else:
        with pytest.raises(NvmlError):
            await session.open(LONG, (0.0, 0.0, 0.0))
    assert driver.calls["open"] == attempts
    assert bool(session.trouble) is not session.is_open


async def test_a_call_that_hangs_during_openings_is_made_once(calls):
    class Uncounted(Gated):
        def device_count(self):
            self.gate()
            return super().device_count()

    driver = Uncounted()
    session = DriverSession(driver, calls)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await session.open(0.01)
    assert driver.calls["driver_version"] == 1
    assert not await session.close(0.01)
    driver.gate.free.set()
    assert await session.open(LONG) == ("580.159.04", 1, (13, 0))


async def test_answers_of_an_earlier_opening_do_not_count(calls):
    class Counting(Gated):
        def device_count(self):
            self.gate()
            return self.calls["open"]

    driver = Counting()
    session = DriverSession(driver, calls)
    with pytest.raises(TimeoutError):
        await session.open(0.01)
    driver.gate.free.set()
    while calls.under_way:
        await anyio.lowlevel.checkpoint()
    assert await session.close(LONG)
    assert (await session.open(LONG)).gpus == 2


async def test_each_opening_has_a_number_of_its_own_though_the_clock_is_set_back(calls, monkeypatch):
    clock = iter([1000, 1000, 10])
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    session, numbers = DriverSession(Gated(), calls), [0]
    for _ in range(3):
        await session.open(LONG)
        numbers.append(session.opening)
        await session.close(LONG)
    assert numbers == sorted(set(numbers))
    monkeypatch.undo()
    other = DriverSession(Gated(), calls)
    await other.open(LONG)
    assert other.opening > numbers[-1], "of a later process too"
