"""What a check finds. Pure."""

from enum import StrEnum
from functools import partial

import msgspec

from gpu_plugin.doctor.facts import Unknown


class Status(StrEnum):
    """How it stands, the worst first."""

    FAILED = "failed"
    """GPUs are not served, or pods that get them fail, until it is mended."""
    WARNING = "warning"
    """It works, and will cause trouble."""
    NOTE = "note"
    """Worth knowing when something else is wrong."""
    OK = "ok"
    SKIPPED = "skipped"
    """Not looked at, or not to be seen from here; `found` says why."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that a check found; `remedy` is what to do about it, empty where there is nothing to do."""

    status: Status
    found: str
    remedy: str = ""


ok = partial(Finding, Status.OK)
note = partial(Finding, Status.NOTE)
warning = partial(Finding, Status.WARNING)
failed = partial(Finding, Status.FAILED)
skipped = partial(Finding, Status.SKIPPED)
"""A finding of each status, of what was found (of what is skipped: why) and what to do about it."""

_HANGS = (
    "its file system, or the program that answers for it, hangs: look for it in the kernel log (dmesg) and in "
    "`ps -eo pid,stat,wchan,comm` with state D"
)


def unseen(what: str, unknown: Unknown, remedy: str = _HANGS, *, needed: bool = False) -> Finding:
    """Something that could not be looked at; that it hangs is a finding by itself.

    `needed`: pods do not get their GPUs without it, so that what hangs has failed. `remedy` is for what hangs.
    """
    if unknown.hung:
        return Finding(Status.FAILED if needed else Status.WARNING, f"{what}: {unknown.why}", remedy)
    return skipped(f"{what}: {unknown.why}")
