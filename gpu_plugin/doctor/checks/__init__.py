"""The checks. Each reads what it needs of a node, and judges it. A new check is a file here and a line in `check.NAMES`."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from gpu_plugin.doctor.check import NAMES, Check, check
from gpu_plugin.doctor.finding import Finding, Unknown, UnseenError, warning
from gpu_plugin.doctor.node import Node, longest

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

CHECKS: Mapping[str, Check] = {name: check[name] for name in NAMES}


def examined(node: Node) -> list[tuple[str, Finding]]:
    """Return each check's findings, at least one, with the check's name, in the order of `NAMES`.

    The checks run at the same time, so that a hanging check leaves the others alone.
    """
    seconds = longest(node.settings, node.patience)
    reads = [(name, node.begin(f"check-{name}", examine, name, node, seconds=seconds)) for name in NAMES]
    found = []
    for name, read in reads:
        findings = read.found()
        if isinstance(findings, Unknown):
            findings = [_broken(findings.why)]
        found += [(name, finding) for finding in findings]
    return found


def examine(name: str, node: Node) -> list[Finding]:
    """Return the findings of one check.

    An error of the check is its finding. The status of a daemon of another version may cause an error.
    """
    try:
        found = CHECKS[name](node)
    except UnseenError as error:
        found = error.finding
    except Exception as error:  # noqa: BLE001 - any error of a check is reported as its finding
        found = _broken(f"{type(error).__name__}: {error}")
    return [found] if isinstance(found, Finding) else found


def _broken(why: str) -> Finding:
    return warning(
        f"this check failed: {why}",
        "is the running daemon of another version? Use its own gpu-plugin; otherwise report this",
    )
