"""Wait for a condition by checking it repeatedly until a deadline."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class NotYet(Exception):  # noqa: N818 - a message between two halves of a loop, not an error
    """Raised by a condition that does not hold yet. The text is the present state."""


class DeadlineError(AssertionError):
    """A condition did not become true in time."""


def wait_until(condition: Callable[[], T], what: str, *, within: float, every: float = 0.1) -> T:
    """Call `condition` until it does not raise `NotYet`, and return its value.

    Args:
        condition: called at once, and again after each pause.
        what: a description of the condition, for the error.
        within: seconds until the deadline. The condition is called at least once.
        every: seconds between two calls.

    Raises:
        DeadlineError: the deadline passed. The text has the last state.
    """
    deadline = time.monotonic() + within
    while True:
        try:
            return condition()
        except NotYet as seen:
            if time.monotonic() >= deadline:
                raise DeadlineError(f"{what}: not so within {within:g} s. Last seen: {seen}") from None
        time.sleep(every)


def expect(*, holds: bool, seen: object) -> None:
    """Raise `NotYet` with the state `seen` unless the condition `holds`."""
    if not holds:
        raise NotYet(str(seen))


def stays(condition: Callable[[], object], what: str, *, seconds: float, every: float = 0.2) -> None:
    """Check for some time that a condition holds.

    Args:
        condition: raises `NotYet` if it does not hold.
        what: a description of the condition, for the error.
        seconds: the time for which the condition must hold.
        every: seconds between two calls.

    Raises:
        AssertionError: the condition did not hold at a call.
    """
    began = time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        try:
            condition()
        except NotYet as seen:
            raise AssertionError(f"{what}: no longer so after {elapsed:.1f} s: {seen}") from None
        time.sleep(every)
