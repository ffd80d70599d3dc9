"""Choose a node's config file by the rules of NVIDIA's config manager. Unlike there, an unknown name does not end the process.

A label of the node names a file in a directory, which has a file for each key of a ConfigMap. Without a label the default
applies, and without a default the fallbacks in their order (cmd/config-manager/main.go of NVIDIA/k8s-device-plugin).

If the requested file does not exist, or is not known, no other file replaces it: another configuration may offer shared devices
as whole devices. For the same reason the fallback `empty` never replaces a file that is in force.
"""

from collections.abc import Collection, Sequence

import msgspec

NO_FILE = ""  # the choice of no config file: only flags and environment apply


class Choice(msgspec.Struct, frozen=True):
    """A choice of a config file."""

    file: str | None  # `NO_FILE` for no config file; None if nothing may be served until more is known
    complaint: str = ""  # why the requested file is not used or not known; empty without a problem
    asked: str = ""  # the requested file if `file` is another file; empty if it is the same or not known


def choose(
    label: str,
    present: Collection[str],
    default: str = "",
    fallbacks: Sequence[str] = (),
    last: str | None = None,
    label_unknown: str = "",
    files_unknown: str = "",
) -> Choice:
    """Choose the config file among the `present` files. `label` and `default` are empty without a label or a default.

    `fallbacks` are tried in order if neither the label nor the default names a file. `last` is the last choice in force; None
    before the first choice. `label_unknown` and `files_unknown` have reasons; they are empty if label and files are known.

    The last choice is kept if the label or the files are not known, if the label or else the default names a missing file, and
    if nothing can be chosen. Without a last choice, there is no choice then. `NO_FILE` never replaces a file.
    """
    if files_unknown:
        return _kept(last, "; ".join(filter(None, (label_unknown, files_unknown))), label or default)
    if label_unknown:
        if last is None or (last != NO_FILE and last not in present):
            gone = f"; {_config_name(last)}, the last one chosen, does not exist: {_available(present)}" if last else ""
            return Choice(None, f"{label_unknown}{gone}")
        return _kept(last, label_unknown, "")
    asked = label or default
    if asked in present:
        return Choice(asked)
    if not asked:
        for strategy in fallbacks:
            file = _fallback(strategy, present)
            if file == NO_FILE and last:
                why = f"the label names no config, and the fallback {strategy} does not replace one that was chosen before"
                return _kept(last, f"{why}: {_available(present)}", "")
            if file is not None:
                return Choice(file)
    complaint = _available(present)
    if asked:
        by = "the node's label" if label else "the default"
        complaint = f"specified config {asked} (by {by}) does not exist: {complaint}"
    elif present:
        complaint = f"no config was set, no default was provided, and all fallbacks failed: {complaint}"
    return _kept(last, complaint, asked)


def _fallback(strategy: str, present: Collection[str]) -> str | None:
    """Return the file of a fallback strategy, None without one. The names and meanings are NVIDIA's."""
    if strategy == "named":
        return "default" if "default" in present else None
    if strategy == "single":
        return next(iter(present)) if len(present) == 1 else None
    return NO_FILE


def _kept(last: str | None, complaint: str, asked: str) -> Choice:
    if last is None:
        return Choice(None, complaint, asked)
    return Choice(last, f"{complaint}; {_config_name(last)} stays in force", asked)


def _config_name(file: str) -> str:
    return f"config {file}" if file else "no config file"


def _available(present: Collection[str]) -> str:
    return f"there are {', '.join(sorted(present))}" if present else "no configuration files are available"
