"""The fixtures of all tests of nvml."""

from tests.unit.nvml.conftest import driver_threads, ended_threads, no_gap

__all__ = ["driver_threads", "ended_threads", "no_gap"]
