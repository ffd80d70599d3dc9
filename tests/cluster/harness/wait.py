"""Waiting for a condition by asking again and again until a deadline."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class NotYet(Exception):  # noqa: N818 - a message between two halves of a loop, not an error
    """Raised by a condition that does not hold yet; its text says what was seen instead."""


class DeadlineError(AssertionError):
    """A condition did not come true in time."""


def wait_until(condition: Callable[[], T], what: str, *, within: float, every: float = 0.1) -> T:
    """What `condition` returns once it no longer raises `NotYet`.

    Args:
        condition: asked at once, then again after each pause.
        what: the condition in words, for the error.
        within: seconds until the deadline. The condition is asked at least once.
        every: seconds between two questions.

    Raises:
        DeadlineError: the deadline passed; the text carries what was seen last.
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
    """Raise `NotYet` with what was `seen` unless the condition `holds`."""
    if not holds:
        raise NotYet(str(seen))


def stays(condition: Callable[[], object], what: str, *, seconds: float, every: float = 0.2) -> None:
    """Ask a condition again and again for a while and fail at the first time that it does not hold.

    Args:
        condition: raises `NotYet` where it does not hold.
        what: the condition in words, for the error.
        seconds: how long it must hold.
        every: seconds between two questions.

    Raises:
        AssertionError: it did not hold once.
    """
    began = time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        try:
            condition()
        except NotYet as seen:
            raise AssertionError(f"{what}: no longer so after {elapsed:.1f} s: {seen}") from None
        time.sleep(every)
