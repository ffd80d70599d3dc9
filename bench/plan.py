"""How much is measured, and what a failed measurement is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """How many rounds, how many calls of a kind in each, and how long idling is watched, in seconds."""

    rounds: int = 10
    calls: int = 300
    idle_seconds: float = 20.0


class MeasurementError(Exception):
    """A figure could not be measured; the text says why."""


PATIENCE = 30.0
"""Seconds after which what is waited for counts as failed. Far beyond every budget: a missed budget is still measured."""
