"""What every test here shares with those of nvml: no driver thread outlives its test, and none waits longer than it must."""

from tests.unit.nvml.conftest import driver_threads, ended_threads, no_gap

__all__ = ["driver_threads", "ended_threads", "no_gap"]
