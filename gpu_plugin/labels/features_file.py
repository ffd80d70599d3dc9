"""The file of labels that Node Feature Discovery's worker reads (its source "local"): a line key=value each. Blocks.

Its name is that of GPU Feature Discovery's file, so that either replaces the other's and the Node never has both. Ours lies in
alphabetical order and says nvidia.com/gpu.present; GPU Feature Discovery's lies in no order, and does not. Only ours is removed.
"""

from collections.abc import Mapping
from pathlib import Path

from gpu_plugin.labels.keys import PRESENT, TIMESTAMP
from gpu_plugin.runtime.atomic import leftovers, replace_file
from gpu_plugin.runtime.regular_file import UnfitFileError, open_file

NAME = "gfd"
MODE = 0o644

MAX_BYTES = 64 * 1024
"""More than any such file has: NFD's own limit."""

_NOT_COMPARED = frozenset({PRESENT, TIMESTAMP})


class FeaturesFile:
    """The file in one directory. Every call raises OSError where the directory or the file cannot be read or written."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME

    def read(self) -> dict[str, str]:
        """The labels that it has now, in its order, whoever wrote it; none where there is no such file."""
        try:
            with open_file(self.path, links=False) as file:
                text = file.read(MAX_BYTES).decode("utf-8", "replace")
        except (FileNotFoundError, UnfitFileError):
            return {}
        pairs = (line.partition("=") for line in text.splitlines())
        return {key: value for key, equals, value in pairs if equals}

    def write(self, labels: Mapping[str, str]) -> None:
        """Replaces it whole, whoever wrote it."""
        content = "".join(f"{key}={labels[key]}\n" for key in sorted(labels))
        replace_file(self.path, content.encode(), MODE)

    def remove(self) -> bool:
        """Removes it, if it is ours, and what a killed process left beside it. Returns whether it was there."""
        for leftover in tuple(leftovers(self.path.parent, [NAME])) if self.path.parent.is_dir() else ():
            leftover.unlink(missing_ok=True)
        there = ours(self.read())
        if there:
            self.path.unlink(missing_ok=True)
        return there


def ours(labels: Mapping[str, str]) -> bool:
    """Whether labels in this order are those of a file that this plugin wrote."""
    return PRESENT in labels and list(labels) == sorted(labels)


def same(labels: Mapping[str, str], others: Mapping[str, str]) -> bool:
    """Whether both say the same, whenever they came to be and whoever wrote them."""

    def compared(all_: Mapping[str, str]) -> dict[str, str]:
        return {key: value for key, value in all_.items() if key not in _NOT_COMPARED}

    return compared(labels) == compared(others)
