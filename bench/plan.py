"""The extent of the measurements, and the error of a failed measurement."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """The number of rounds, the number of calls of each kind in a round, and the seconds for which an idle daemon is measured."""

    rounds: int = 10
    calls: int = 300
    idle_seconds: float = 20.0


class MeasurementError(Exception):
    """A figure could not be measured. The text says why."""


PATIENCE = 30.0
"""The timeout of each wait in seconds. It is far above every budget, so that missed budgets are still measured."""
