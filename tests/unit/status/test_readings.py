"""The newest readings: looks that ask for parts, and faults."""

from msgspec.structs import replace

from gpu_plugin.devices.node import Gpu, Thresholds
from gpu_plugin.health.observation import Fabric, Fault, Sample
from gpu_plugin.status.readings import Readings, told

GPU = Gpu("GPU-0", 0, memory_bytes=2**36, thresholds=Thresholds(95, 89, None, 87))
WHOLE = Sample(temperature=40, power=345_678, utilization=87, energy=1500, nvlinks=(True, False, True))


def test_a_look_that_asks_for_some_leaves_the_others_as_they_were():
    readings = Readings()
    readings.saw("GPU-0", WHOLE, 10.0)
    asked = frozenset({"temperature", "utilization"})
    readings.saw("GPU-0", Sample(temperature=50, utilization=None, asked=asked), 25.0)
    newest = readings.of("GPU-0")
    assert newest is not None
    assert newest.at == 25.0
    shown = told(GPU, newest)
    assert (shown["temperature_celsius"], shown["power_watts"]) == (50, 345.678)
    assert shown["utilization_ratio"] is None, "what was asked for and not answered is not known"
    assert (shown["nvlinks_active"], shown["nvlinks_inactive"]) == (2, 1)
    assert shown["energy_joules"] == 1.5


def test_a_fault_ends_the_readings_and_leaves_the_limits():
    readings = Readings()
    readings.saw("GPU-0", WHOLE, 10.0)
    readings.saw("GPU-0", Sample(fault=Fault.LOST), 25.0)
    shown = told(GPU, readings.of("GPU-0"))
    limits = {"slowdown_celsius": 89, "shutdown_celsius": 95, "gpu_max_celsius": 87, "memory_total_bytes": 2**36}
    assert {name: value for name, value in shown.items() if value is not None} == limits
    steady = Sample(temperature=41, asked=frozenset({"temperature"}))
    readings.saw("GPU-0", steady, 40.0)
    after = readings.of("GPU-0")
    assert after is not None
    assert (after.sample.temperature, after.sample.power) == (41, None), "nothing of before the fault comes back"


def test_gpus_that_are_gone_are_forgotten():
    readings = Readings()
    readings.saw("GPU-0", WHOLE, 1.0)
    readings.saw("GPU-1", WHOLE, 1.0)
    readings.keep(frozenset({"GPU-1"}))
    assert readings.of("GPU-0") is None
    assert readings.of("GPU-1") is not None


def test_states_are_words():
    def of(sample):
        readings = Readings()
        readings.saw("GPU-0", sample, 1.0)
        return told(GPU, readings.of("GPU-0"))

    assert of(replace(WHOLE, recovery_action=0))["recovery_action"] == "none"
    assert of(replace(WHOLE, recovery_action=1))["recovery_action"] == "gpu_reset"
    assert of(replace(WHOLE, recovery_action=99))["recovery_action"] == "99"
    states = [of(replace(WHOLE, fabric=Fabric(state, status)))["fabric"] for state, status in ((0, 0), (1, 0), (2, 0))]
    assert states == [None, "not_started", "in_progress"]
    assert [of(replace(WHOLE, fabric=Fabric(3, status)))["fabric"] for status in (0, 1)] == ["completed", "failed"]
