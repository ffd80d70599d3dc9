"""Errors that the operator can correct: an invalid flag, environment variable or file."""

from collections.abc import Sequence
from typing import NamedTuple


class Fault(NamedTuple):  # every command imports this module, and few need msgspec
    """One error. `source` is a file, a flag or a variable, and `path` is the path to a value in a file.

    `line` and `column` count from 1. An unknown field, or a field that does not apply, is 0 or empty.
    """

    reason: str
    source: str = ""
    line: int = 0
    path: str = ""
    column: int = 0

    def __str__(self) -> str:
        where = f"{self.source}:{self.line}" if self.line else self.source
        return ": ".join(part for part in (where, self.path, self.reason) if part)


MAX_REPORTED_FAULTS = 50  # of an error, with a sentence each


class ConfigError(ValueError):
    """An invalid configuration. Its text is one sentence with the place, the error and the correction, and is shown unchanged."""

    faults: tuple[Fault, ...] = ()

    def each(self, most: int = MAX_REPORTED_FAULTS) -> tuple[str, ...]:
        """Return a sentence for each of the first `most` faults, and a sentence with the number of the others."""
        sentences = tuple(map(str, self.faults[:most])) or (str(self),)
        more = len(self.faults) - most
        return (*sentences, f"and {more} more") if more > 0 else sentences

    @classmethod
    def of(cls, faults: Sequence[Fault]) -> "ConfigError":
        """Return an error of all these faults. Its text has the first fault and the number of the others."""
        more = f"; and {len(faults) - 1} more" if len(faults) > 1 else ""
        error = cls(f"{faults[0]}{more}")
        error.faults = tuple(faults)
        return error
