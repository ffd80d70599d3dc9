"""Which of several config files a node uses: the rules of NVIDIA's config manager, save that an unknown name ends nothing.

A label on the node names a file of a directory, as the keys of a ConfigMap lie there. Without a label there is a default,
and without that the fallbacks, in their order (cmd/config-manager/main.go of NVIDIA/k8s-device-plugin). What was asked for and
is not there, or cannot be known, is never replaced by something else: another configuration may hand out whole what is shared.
For the same reason a file that was chosen before is never replaced by `empty`, whatever became of the files.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

NO_FILE = ""
"""What stands for no config file at all: flags and environment only."""

FALLBACKS: Mapping[str, Callable[[Collection[str]], str | None]] = {
    "named": lambda present: "default" if "default" in present else None,
    "single": lambda present: next(iter(present)) if len(present) == 1 else None,
    "empty": lambda _: NO_FILE,
}
"""By strategy: the file it takes among those present, None for none; NVIDIA's names and meanings."""


class Choice(msgspec.Struct, frozen=True):
    """The file to use, `NO_FILE` for none at all, or None where nothing may be served until more is known.

    `complaint` is what is wrong with what was asked for, or with asking, and empty where nothing is; `asked` is the file that
    was asked for where that is another one, empty where it is not or is not known.
    """

    file: str | None
    complaint: str = ""
    asked: str = ""


def choose(
    label: str,
    present: Collection[str],
    default: str = "",
    fallbacks: Sequence[str] = (),
    last: str | None = None,
    label_unknown: str = "",
    files_unknown: str = "",
) -> Choice:
    """The config file to use among those `present`.

    Args:
        label: the label's value on the node, empty where it has none.
        present: the names of the files there are.
        default: the file to use without a label, empty for none.
        fallbacks: keys of `FALLBACKS`, tried in their order where neither label nor default names a file.
        last: the file of the last choice that was in force, None before there was one.
        label_unknown: why the label is not known, empty where it is.
        files_unknown: why it is not known which files there are, empty where it is.

    Where the label or the files are not known, where the label or else the default names a file that is not there, and where
    nothing can be chosen, the last choice is kept. Before there was one, there is no choice. No file at all is chosen only
    where none was chosen before.
    """
    if files_unknown:
        return _kept(last, "; ".join(filter(None, (label_unknown, files_unknown))), label or default)
    if label_unknown:
        if last is None or (last != NO_FILE and last not in present):
            gone = f"; {_named_in_words(last)}, the last one chosen, does not exist: {_there(present)}" if last else ""
            return Choice(None, f"{label_unknown}{gone}")
        return _kept(last, label_unknown, "")
    asked = label or default
    if asked in present:
        return Choice(asked)
    if not asked:
        for strategy in fallbacks:
            file = FALLBACKS[strategy](present)
            if file == NO_FILE and last:
                why = f"the label names no config, and the fallback {strategy} does not replace one that was chosen before"
                return _kept(last, f"{why}: {_there(present)}", "")
            if file is not None:
                return Choice(file)
    complaint = _there(present)
    if asked:
        by = "the node's label" if label else "the default"
        complaint = f"specified config {asked} (by {by}) does not exist: {complaint}"
    elif present:
        complaint = f"no config was set, no default was provided, and all fallbacks failed: {complaint}"
    return _kept(last, complaint, asked)


def _kept(last: str | None, complaint: str, asked: str) -> Choice:
    if last is None:
        return Choice(None, complaint, asked)
    return Choice(last, f"{complaint}; {_named_in_words(last)} stays in force", asked)


def _named_in_words(file: str) -> str:
    return f"config {file}" if file else "no config file"


def _there(present: Collection[str]) -> str:
    return f"there are {', '.join(sorted(present))}" if present else "no configuration files are available"
