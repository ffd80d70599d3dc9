"""The checks: each a pure function from the facts to what it finds. A new one is a file here and a line in `check.NAMES`."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules

from gpu_plugin.doctor.check import NAMES, Check, Finding, UnseenError, check, warning
from gpu_plugin.doctor.facts import Facts

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

CHECKS: Mapping[str, Check] = {name: check[name] for name in NAMES}


def examined(facts: Facts) -> list[tuple[str, Finding]]:
    """What every check finds, each with the check's name, in their order; at least one of each.

    A check that fails by itself, as over the status of a daemon of another version, is a finding and takes no other with it.
    """
    return [(name, finding) for name in NAMES for finding in examine(name, facts)]


def examine(name: str, facts: Facts) -> Sequence[Finding]:
    """What one check finds."""
    try:
        found = CHECKS[name](facts)
    except UnseenError as error:
        found = error.finding
    except Exception as error:  # noqa: BLE001 - whatever it is, it is said
        found = warning(
            f"this check failed on what it saw: {type(error).__name__}: {error}",
            "is the running daemon of another version? Use its own gpu-plugin; otherwise report this",
        )
    return [found] if isinstance(found, Finding) else found
