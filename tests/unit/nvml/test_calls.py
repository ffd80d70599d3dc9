"""Calls that are counted until they come back, and the driver's opening and closing."""

import threading

import anyio
import pytest

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.calls import DriverCalls, DriverSession
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.simulation import profile
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.threads import settled

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


@pytest.mark.parametrize("how", ["submit", "alone"])
async def test_a_call_is_under_way_until_it_comes_back(calls, how):
    gate = Gate()
    job = await getattr(calls, how)(gate, 0.01)
    assert calls.under_way
    gate.free.set()
    assert await settled(job, LONG)
    assert job.done.result() == "through"
    await anyio.lowlevel.checkpoint()
    assert not calls.under_way


async def test_a_call_that_comes_in_time_is_not_counted(calls):
    assert await calls.run(lambda: 5, LONG) == 5
    assert (await calls.alone(lambda: 6, LONG)).done.result() == 6
    assert not calls.under_way


async def test_what_is_not_the_drivers_keeps_nobody_from_closing_it(calls):
    gate = Gate()
    job = await calls.aside(gate, 0.01)
    assert not job.done.done()
    assert not calls.under_way
    gate.free.set()
    await settled(job, LONG)


async def test_a_call_that_fails_late_is_counted_no_more(calls):
    gate = Gate()

    def fail():
        gate()
        raise NvmlError(Return.GPU_IS_LOST, "nvmlDeviceGetUUID")

    job = await calls.submit(fail, 0.01)
    gate.free.set()
    await settled(job, LONG)
    await anyio.lowlevel.checkpoint()
    assert not calls.under_way


class Gated(SimulatedDriver):
    """Holds the calls named here until let go."""

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
    assert await session.open(LONG) == ("580.159.04", 1)
    assert (session.is_open, session.holds, session.trouble) == (True, True, "")
    assert await session.open(LONG) == ("580.159.04", 1)
    assert driver.calls["open"] == 1
    assert await session.close(LONG)
    assert (session.is_open, session.holds) == (False, False)
    assert await session.close(LONG)
    assert driver.calls["close"] == 1


@pytest.mark.parametrize("call", ["open", "driver_version", "device_count"])
async def test_a_session_that_cannot_be_opened_says_why_until_it_can(calls, call):
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


async def test_an_opening_that_hangs_is_one_however_often_it_is_asked_for(calls):
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


async def test_a_closing_that_hangs_is_one_and_keeps_the_driver_from_being_opened(calls):
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


async def test_a_closing_that_is_refused_is_a_closing(calls):
    driver = Gated()
    driver._node.refuse("close", Return.UNINITIALIZED)
    session = DriverSession(driver, calls)
    await session.open(LONG)
    assert await session.close(LONG)
    assert not session.holds
