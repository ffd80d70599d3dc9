"""What a check is, which there are, and what one finds. Pure."""

from collections.abc import Callable
from enum import StrEnum
from functools import partial

import msgspec

from gpu_plugin.config.choices import Functions
from gpu_plugin.doctor.facts import Facts, Known, T, Unknown


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


class UnseenError(Exception):
    """What a check looks at is not known: then `finding` is all that it finds."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.found)
        self.finding = finding


def seen(known: Known[T], what: str, remedy: str = _HANGS, *, needed: bool = False) -> T:
    """A fact that is known. Raises UnseenError for one that is not; that somebody hangs is a finding by itself.

    `needed`: pods do not get their GPUs without it, so that what hangs has failed. `remedy` is for what hangs.
    """
    if not isinstance(known, Unknown):
        return known
    status = (Status.FAILED if needed else Status.WARNING) if known.hung else Status.SKIPPED
    raise UnseenError(Finding(status, f"{what}: {known.why}", remedy if known.hung else ""))


Check = Callable[[Facts], Finding | list[Finding]]

NAMES = (
    "configuration",
    "permissions",
    "security-modules",
    "clock",
    "driver-library",
    "driver-versions",
    "gpus",
    "device-nodes",
    "persistence-mode",
    "fabric-manager",
    "imex-channels",
    "mps",
    "state-directory",
    "kubelet-directory",
    "kubelet-socket",
    "other-plugins",
    "pod-resources",
    "container-runtime",
    "cdi-directory",
    "daemon",
    "registration",
    "kubernetes-api",
    "features-directory",
)
"""The checks in the order in which one thing depends on another: of several failures the first is often the cause."""

check: Functions[Check] = Functions(
    "check", NAMES, "NAMES in gpu_plugin/doctor/check.py", "a file of gpu_plugin/doctor/checks"
)
"""A decorator: the function is the check of that name."""
