"""What a person can mend: a flag, an environment variable or a file that asks for what cannot be."""

from collections.abc import Sequence
from typing import NamedTuple


class Fault(NamedTuple):  # every command has this module, and hardly one needs what structs are made with
    """One thing that is wrong: `source` is a file, a flag or a variable, `line` counts from 1, `path` leads to a value in a file.

    0 and empty text: not known, or there is none.
    """

    reason: str
    source: str = ""
    line: int = 0
    path: str = ""

    def __str__(self) -> str:
        where = f"{self.source}:{self.line}" if self.line else self.source
        return ": ".join(part for part in (where, self.path, self.reason) if part)


MAX_REPORTED_FAULTS = 50
"""Faults that are reported one by one."""


class ConfigError(ValueError):
    """What is wrong, where, and what would be right, in one sentence. `str()` of it is shown as it is."""

    faults: tuple[Fault, ...] = ()

    def each(self, most: int = MAX_REPORTED_FAULTS) -> tuple[str, ...]:
        """A sentence for each fault, where there are many for the first so many, and then how many more there are."""
        sentences = tuple(map(str, self.faults[:most])) or (str(self),)
        more = len(self.faults) - most
        return (*sentences, f"and {more} more") if more > 0 else sentences

    @classmethod
    def of(cls, faults: Sequence[Fault]) -> "ConfigError":
        """An error of all these faults; its text is the first and the number of the others."""
        more = f"; and {len(faults) - 1} more" if len(faults) > 1 else ""
        error = cls(f"{faults[0]}{more}")
        error.faults = tuple(faults)
        return error
