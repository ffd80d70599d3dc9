"""The checks by name, in the order in which one thing depends on another: of several failures the first is often the cause.

A new check is a function in a file of `checks/`, both called as the check with underscores, and its line in `NAMES`.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import cast

from gpu_plugin.doctor.facts import Facts
from gpu_plugin.doctor.finding import Finding, warning

Check = Callable[[Facts], Sequence[Finding]]

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


def check(name: str) -> Check:
    """The check of this name: the function of that name, with underscores, in the file of that name.

    Raises:
        LookupError: there is no such file, or no such function in it.
    """
    function = name.replace("-", "_")
    module = f"gpu_plugin.doctor.checks.{function}"
    if find_spec(module) is not None and callable(found := getattr(import_module(module), function, None)):
        return cast("Check", found)
    place = f"gpu_plugin/doctor/checks/{function}.py"
    raise LookupError(
        f"the check {name!r} has a line in gpu_plugin/doctor/registry.py and no function: write {function} in {place}"
    )


CHECKS: Mapping[str, Check] = {name: check(name) for name in NAMES}


def examined(facts: Facts) -> list[tuple[str, Finding]]:
    """What every check finds, each with the check's name, in their order; at least one of each.

    A check that fails by itself, as over the status of a daemon of another version, is a finding and takes no other with it.
    """
    return [(name, finding) for name, check in CHECKS.items() for finding in _found(check, facts)]


def _found(check: Check, facts: Facts) -> Sequence[Finding]:
    try:
        return check(facts)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is said
        return [
            warning(
                f"this check could not judge what it saw: {type(error).__name__}: {error}",
                "is the running daemon of another version? Use its own gpu-plugin; otherwise report this",
            )
        ]
