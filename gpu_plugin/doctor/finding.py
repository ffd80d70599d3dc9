"""The findings of checks, and facts that a check could not read."""

from enum import StrEnum
from functools import partial
from typing import TypeAlias, TypeVar

import msgspec

T = TypeVar("T")


class Status(StrEnum):
    """The status of a finding, the worst first."""

    FAILED = "failed"
    """GPUs are not served, or pods that get them fail, until it is repaired."""
    WARNING = "warning"
    """It works now, and will cause trouble."""
    NOTE = "note"
    """Useful to know when something else is wrong."""
    OK = "ok"
    SKIPPED = "skipped"
    """Not checked, or not visible from here; `found` is the reason."""


class Finding(msgspec.Struct, frozen=True):
    """A result of a check. `remedy` is advice to the operator, empty if there is nothing to do."""

    status: Status
    found: str
    remedy: str = ""


ok = partial(Finding, Status.OK)
note = partial(Finding, Status.NOTE)
warning = partial(Finding, Status.WARNING)
failed = partial(Finding, Status.FAILED)
skipped = partial(Finding, Status.SKIPPED)


class Unknown(msgspec.Struct, frozen=True):
    """`why` a fact is not known, as a sentence. `hung` is True if it could not be read in time."""

    why: str
    hung: bool = False


Known: TypeAlias = T | Unknown

HANGS = (
    "its file system, or the program that answers for it, hangs: look for it in the kernel log (dmesg) and in "
    "`ps -eo pid,stat,wchan,comm` with state D"
)


class UnseenError(Exception):
    """A fact that the check needs is not known: `finding` is the only result of the check."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.found)
        self.finding = finding


def seen(known: Known[T], what: str, remedy: str = HANGS, *, needed: bool = False) -> T:
    """Return a known fact. Raise UnseenError for an `Unknown`: SKIPPED, or a WARNING if reading it hangs.

    With `needed`, pods do not get their GPUs without the fact, and a fact that hangs is FAILED. `what` names the fact, and
    `remedy` is the advice if it hangs.
    """
    if not isinstance(known, Unknown):
        return known
    status = (Status.FAILED if needed else Status.WARNING) if known.hung else Status.SKIPPED
    raise UnseenError(Finding(status, f"{what}: {known.why}", remedy if known.hung else ""))
