"""Times and errors of the driver's calls."""

import threading

import pytest

from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import SettingsStore
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.call_times import CallTimes
from gpu_plugin.nvml.port import NVML_FUNCTIONS, EventSet, Handle, NvmlError
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.profile import load

H = Handle(1)

SETTINGS = SettingsStore(resolve({"nvml_timeout": "5s"}, {}))


class Scripted:
    """A driver whose calls take `takes` seconds on the clock, and raise `refusal`."""

    def __init__(self):
        self.now = 100.0
        self.takes = 0.002
        self.refusal = None
        self.entered, self.free = threading.Event(), threading.Event()
        self.free.set()

    def __getattr__(self, name):
        def call(*arguments):
            self.entered.set()
            self.free.wait(10)
            self.now += self.takes
            if self.refusal is not None:
                raise NvmlError(self.refusal, name)
            return name, arguments

        return call


@pytest.fixture
def scripted():
    return Scripted()


@pytest.fixture
def times(scripted):
    return CallTimes(SETTINGS, lambda: scripted.now)


def test_a_call_is_timed_and_its_answer_passed_on(scripted, times):
    driver = times.timed(scripted)
    assert driver.temperature(H) == ("temperature", (H,))
    driver.temperature(H)
    told = times.told()
    assert list(told["calls"]) == ["temperature"], "what was never called is not there"
    assert told["calls"]["temperature"]["seconds"]["counts"] == [0, 0, 2, 0, 0, 0, 0]
    assert told["calls"]["temperature"]["seconds"]["sum"] == pytest.approx(0.004)
    assert told["hanging"] == 0


def test_every_call_of_the_port_is_taken_down():
    node = SimulatedNode(load("t4-4"))
    times = CallTimes(SETTINGS)
    driver = times.timed(SimulatedDriver(node))
    assert all(callable(getattr(driver, call)) for call in NVML_FUNCTIONS)
    driver.open()
    assert driver.device_count() == 4
    driver.close()
    assert set(times.told()["calls"]) == {"open", "device_count", "close"}


@pytest.mark.parametrize(
    ("call", "arguments", "code", "errors"),
    [
        ("temperature", (H,), Return.GPU_IS_LOST, {"gpu_is_lost": 1}),
        ("temperature", (H,), 4711, {"4711": 1}),
        ("temperature", (H,), Return.NOT_SUPPORTED, {}),
        ("temperature", (H,), Return.TIMEOUT, {"timeout": 1}),
        ("wait", (EventSet(1), 1000), Return.TIMEOUT, {}),
        ("mig_handle", (H, 3), Return.NOT_FOUND, {}),
        ("handle_by_uuid", ("GPU-1",), Return.NOT_FOUND, {"not_found": 1}),
    ],
)
def test_errors_are_counted_unless_they_only_mean_that_there_is_nothing(scripted, times, call, arguments, code, errors):
    scripted.refusal = code
    with pytest.raises(NvmlError):
        getattr(times.timed(scripted), call)(*arguments)
    assert times.told()["calls"][call]["errors"] == errors


def test_a_call_that_hangs_is_counted_once_while_it_does_and_after(scripted, times):
    scripted.free.clear()
    calling = threading.Thread(target=times.timed(scripted).temperature, args=(H,))
    calling.start()
    assert scripted.entered.wait(10)
    assert times.told()["hanging"] == 0
    scripted.now += 5.0
    for _ in range(2):
        told = times.told()
        assert (told["hanging"], told["calls"]["temperature"]["hung"]) == (1, 1)
    scripted.free.set()
    calling.join(10)
    told = times.told()
    assert (told["hanging"], told["calls"]["temperature"]["hung"]) == (0, 1)
    assert sum(told["calls"]["temperature"]["seconds"]["counts"]) == 1


def test_the_wait_for_events_hangs_only_beyond_what_it_was_asked_to_wait(scripted, times):
    driver = times.timed(scripted)
    scripted.takes = 5.9
    driver.wait(EventSet(1), 1000)
    assert times.told()["calls"]["wait"]["hung"] == 0
    scripted.takes = 6.0
    driver.wait(EventSet(1), 1000)
    assert times.told()["calls"]["wait"] == {"seconds": None, "errors": {}, "hung": 1}
