"""What the demo prints, one line for each thing that happened."""

import os
import time
from typing import TextIO

BAD, GOOD, DIM, BOLD = "31;1", "32;1", "2", "1"
"""Colours, as ANSI's select graphic rendition takes them."""


class Timeline:
    """One line for each thing that happened: when, how long it took, what. Colours on a terminal only."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._colours = out.isatty() and "NO_COLOR" not in os.environ
        self._begun = time.perf_counter()
        self.steps = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._begun

    def say(self, text: str = "", colour: str = "") -> None:
        """Prints lines as they are."""
        self._out.write(self._paint(text, colour) + "\n")
        self._out.flush()

    def step(self, what: str, text: str, took: float | None = None, colour: str = "") -> None:
        """Prints what just happened; `took` in seconds."""
        self.steps += 1
        duration = "" if took is None else milliseconds(took)
        first, *more = text.split("\n")
        self.say(f"{self.elapsed:6.2f} s {duration:>9}  {self._paint(f'{what:<12}', colour or BOLD)} {first}")
        for line in more:
            self.say(f"{'':33}{line}")

    def _paint(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colours and colour else text


def milliseconds(seconds: float) -> str:
    """A duration for people: three digits or so."""
    value = seconds * 1000
    return f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"
