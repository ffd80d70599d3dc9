import pytest

from gpu_plugin.health.observation import Sample
from gpu_plugin.nvml.port import NvmlError, Return
from gpu_plugin.nvml.sample import fault, sample
from gpu_plugin.simulation import profile
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode


@pytest.fixture
def node():
    return SimulatedNode(profile.load("h200"), wall_clock=lambda: 5000.0)


@pytest.fixture
def driver(node):
    made = SimulatedDriver(node)
    made.open()
    return made


def look(driver):
    return sample(driver, driver.handle_by_index(0))


def test_a_look_is_temperature_and_energy(node, driver):
    node.set_temperature(0, 71)
    assert look(driver) == Sample(temperature=71, energy=node.energy(0))
    assert node.energy(0) > 0


@pytest.mark.parametrize("code", [Return.NOT_SUPPORTED, Return.NO_PERMISSION, Return.FUNCTION_NOT_FOUND])
def test_what_a_part_does_not_say_is_no_fault(node, driver, code):
    energy = look(driver).energy
    node.refuse("temperature", code)
    assert look(driver) == Sample(temperature=None, energy=energy)
    node.refuse("total_energy", code)
    assert look(driver) == Sample()


@pytest.mark.parametrize("call", ["temperature", "total_energy"])
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Return.GPU_IS_LOST, "lost"),
        (Return.RESET_REQUIRED, "reset-required"),
        (Return.UNKNOWN, "error"),
        (Return.TIMEOUT, "error"),
        (Return.UNINITIALIZED, "error"),
        (4711, "error"),
    ],
)
def test_a_refusal_is_a_fault_with_the_drivers_words(node, driver, call, code, kind):
    node.refuse(call, code)
    seen = look(driver)
    assert (seen.fault, seen.temperature, seen.energy) == (kind, None, None)
    assert f"({int(code)})" in seen.detail
    assert "nvmlDeviceGetT" in seen.detail


def test_a_lost_gpu_is_lost(node, driver):
    handle = driver.handle_by_index(0)
    node.lose(0)
    assert sample(driver, handle).fault == "lost"


def test_any_refusal_can_be_made_a_fault():
    error = NvmlError(Return.GPU_IS_LOST, "nvmlDeviceGetHandleByUUID")
    assert fault(error) == Sample(fault="lost", detail=f"the GPU is lost ({error})")
    assert fault(NvmlError(Return.NOT_FOUND, "nvmlDeviceGetHandleByUUID")).fault == "error"
