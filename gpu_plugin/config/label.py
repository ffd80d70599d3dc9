"""Which of several config files a node uses: the rules of NVIDIA's config manager, save that an unknown name ends nothing.

A label on the node names a file of a directory, as the keys of a ConfigMap lie there. Without a label there is a default,
and without that the fallbacks, in their order (cmd/config-manager/main.go of NVIDIA/k8s-device-plugin).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

NODE_LABEL = "nvidia.com/device-plugin.config"
"""The label's name unless told otherwise, NVIDIA's."""

NO_FILE = ""
"""What stands for no config file at all: flags and environment alone."""

_NAMED = "default"


def _named(present: Collection[str]) -> str | None:
    return _NAMED if _NAMED in present else None


def _single(present: Collection[str]) -> str | None:
    return next(iter(present)) if len(present) == 1 else None


FALLBACKS: Mapping[str, Callable[[Collection[str]], str | None]] = {
    "named": _named,
    "single": _single,
    "empty": lambda _: NO_FILE,
}
"""By strategy: the file it takes among those present, None for none; NVIDIA's names and meanings."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The file to use, `NO_FILE` for none, and what is wrong with what was asked for, empty where nothing is."""

    file: str
    complaint: str = ""


def choose(
    label: str,
    present: Collection[str],
    default: str = "",
    fallbacks: Sequence[str] = (),
    in_force: Choice | None = None,
) -> Choice:
    """The config file to use among those `present`.

    Args:
        label: the label's value on the node, empty where it has none.
        present: the names of the files there are.
        default: the file to use without a label, empty for none.
        fallbacks: keys of `FALLBACKS`, tried in their order where neither label nor default names a file.
        in_force: the last choice without a complaint, None before there was one.

    That choice is kept where the label, or else the default, names a file that is not there, and where nothing can be
    chosen. Before there was one, what would be chosen without the unknown name is used.
    """
    asked = label or default
    if asked in present:
        return Choice(asked)
    complaint = _complaint(label, default, present)
    if asked and in_force is not None:
        return Choice(in_force.file, f"{complaint}; {_named_in_words(in_force.file)} stays in force")
    if asked and default in present:
        return Choice(default, f"{complaint}; the default, {default}, is used until it does")
    for strategy in fallbacks:
        file = FALLBACKS[strategy](present)
        if file is not None:
            return Choice(file, f"{complaint}; {_named_in_words(file)} is used until it does" if asked else "")
    if in_force is not None:
        return Choice(in_force.file, f"{complaint}; {_named_in_words(in_force.file)} stays in force")
    return Choice(NO_FILE, f"{complaint}; flags and environment alone are used")


def _named_in_words(file: str) -> str:
    return f"config {file}" if file else "no config file"


def _complaint(label: str, default: str, present: Collection[str]) -> str:
    there = f"there are {', '.join(sorted(present))}" if present else "no configuration files are available"
    if label or default:
        by = "the node's label" if label else "the default"
        return f"specified config {label or default} (by {by}) does not exist: {there}"
    if not present:
        return "no configuration files are available"
    return f"no config was set, no default was provided, and all fallbacks failed: {there}"
