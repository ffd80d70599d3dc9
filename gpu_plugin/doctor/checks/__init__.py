"""The checks: pure functions from the facts to findings. A new check is a file here and a line in `check.NAMES`."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules

from gpu_plugin.doctor.check import NAMES, Check, Finding, UnseenError, check, warning
from gpu_plugin.doctor.facts import Facts

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

CHECKS: Mapping[str, Check] = {name: check[name] for name in NAMES}


def examined(facts: Facts) -> list[tuple[str, Finding]]:
    """Return the findings of all checks, each with the check's name, in the order of `NAMES`; at least one of each check.

    If a check raises an error, as it may for the status of a daemon of another version, that is its finding.
    """
    return [(name, finding) for name in NAMES for finding in examine(name, facts)]


def examine(name: str, facts: Facts) -> Sequence[Finding]:
    """Return the findings of one check."""
    try:
        found = CHECKS[name](facts)
    except UnseenError as error:
        found = error.finding
    except Exception as error:  # noqa: BLE001 - any error of a check is reported as its finding
        found = warning(
            f"this check failed: {type(error).__name__}: {error}",
            "is the running daemon of another version? Use its own gpu-plugin; otherwise report this",
        )
    return [found] if isinstance(found, Finding) else found
