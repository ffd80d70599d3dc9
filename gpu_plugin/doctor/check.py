"""The type of a check, the names of all checks, and their findings. Pure."""

from collections.abc import Callable
from enum import StrEnum
from functools import partial

import msgspec

from gpu_plugin.config.choices import Functions
from gpu_plugin.doctor.facts import Facts, Known, T, Unknown


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
"""Functions that make a finding of each status from `found` (of a skipped check: the reason) and `remedy`."""

_HANGS = (
    "its file system, or the program that answers for it, hangs: look for it in the kernel log (dmesg) and in "
    "`ps -eo pid,stat,wchan,comm` with state D"
)


class UnseenError(Exception):
    """A fact that the check needs is not known: `finding` is the only result of the check."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.found)
        self.finding = finding


def seen(known: Known[T], what: str, remedy: str = _HANGS, *, needed: bool = False) -> T:
    """Return a fact that is known. Raise UnseenError for an `Unknown`, with a WARNING if its probe hangs, else SKIPPED.

    With `needed`, pods do not get their GPUs without the fact, and a probe that hangs is FAILED. `what` names the fact, and
    `remedy` is the advice if its probe hangs.
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
"""The checks in order of dependency: the first of several failures is often the cause of the others."""

check: Functions[Check] = Functions(
    "check", NAMES, "NAMES in gpu_plugin/doctor/check.py", "a file of gpu_plugin/doctor/checks"
)
"""A decorator that makes the function the check of this name."""
