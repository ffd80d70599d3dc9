"""The file of labels that Node Feature Discovery's worker reads (its source "local"): a line key=value each. Blocks.

Its name is that of GPU Feature Discovery's file, so that either replaces the other's and the Node never has both. Ours lies in
alphabetical order. Nothing in it says whose it is, since older workers take every line for a label: what this plugin wrote is
remembered in the state directory, and nothing else is removed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from gpu_plugin.cluster.labels.keys import PRESENT, TIMESTAMP
from gpu_plugin.runtime.atomic import leftovers, replace_file
from gpu_plugin.runtime.regular_file import UnfitFileError, open_file
from gpu_plugin.state.directory import StateDirectory

NAME = "gfd"
MODE = 0o644

MAX_BYTES = 64 * 1024
"""More than any such file has: NFD's own limit."""

FEATURES_FILE: Final = "features.json"
"""Its name in the state directory: which files this plugin wrote."""

_NOT_COMPARED = frozenset({PRESENT, TIMESTAMP})


class _Written(msgspec.Struct, frozen=True):
    """SHA-256 of what was written last to each path, and of what was before it: a kill may come between memory and file."""

    files: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)


class WrittenFiles:
    """The files that this plugin wrote, over restarts; for as long as this process lives where nothing can be kept."""

    def __init__(self, state: StateDirectory) -> None:
        self._state = state
        self._known: _Written | None = None

    def directories(self) -> frozenset[str]:
        """Where they are."""
        return frozenset(str(Path(path).parent) for path in self._files())

    def has(self, path: Path, content: bytes) -> bool:
        """Whether this plugin wrote this content to this path."""
        return _digest(content) in self._files().get(str(path), ())

    def add(self, path: Path, content: bytes) -> None:
        """This content is about to be written there."""
        before = [digest for digest in self._files().get(str(path), ()) if digest != _digest(content)]
        self._keep({**self._files(), str(path): (_digest(content), *before[:1])})

    def forget(self, path: Path) -> None:
        """What lies there, if anything does, is not this plugin's any more."""
        if str(path) in self._files():
            self._keep({known: digests for known, digests in self._files().items() if known != str(path)})

    def _files(self) -> Mapping[str, tuple[str, ...]]:
        if self._known is None:
            self._known = self._state.read(FEATURES_FILE, _Written) or _Written()
        return self._known.files

    def _keep(self, files: dict[str, tuple[str, ...]]) -> None:
        self._known = _Written(files)
        self._state.write(FEATURES_FILE, self._known)


class FeaturesFile:
    """The file in one directory. Every call raises OSError where the directory or the file cannot be read or written."""

    def __init__(self, directory: Path, written: WrittenFiles) -> None:
        self.path = directory / NAME
        self._written = written

    def read(self) -> dict[str, str]:
        """The labels that it has now, in its order, whoever wrote it; none where there is no such file."""
        pairs = (line.partition("=") for line in (self._content() or b"").decode("utf-8", "replace").splitlines())
        return {key: value for key, equals, value in pairs if equals}

    def write(self, labels: Mapping[str, str]) -> None:
        """Replaces it whole, whoever wrote it."""
        content = _content_of(labels)
        self._written.add(self.path, content)
        replace_file(self.path, content, MODE)

    def claim(self, labels: Mapping[str, str]) -> None:
        """Takes a file for this plugin's that is to the byte what `write` would write: the state directory may be a new one."""
        content = _content_of(labels)
        if not self._written.has(self.path, content) and self._content() == content:
            self._written.add(self.path, content)

    def remove(self) -> bool:
        """Removes it, if it is this plugin's, and what a killed process left beside it. Returns whether it was there."""
        if not self.path.parent.is_dir():  # not mounted, say: what is remembered of it stays
            return False
        for leftover in tuple(leftovers(self.path.parent, [NAME])):
            leftover.unlink(missing_ok=True)
        content = self._content()
        there = content is not None and self._written.has(self.path, content)
        if there:
            self.path.unlink(missing_ok=True)
        self._written.forget(self.path)
        return there

    def _content(self) -> bytes | None:
        """As much of it as any such file has; None where there is none."""
        try:
            with open_file(self.path, links=False) as file:
                return file.read(MAX_BYTES)
        except (FileNotFoundError, UnfitFileError):
            return None


def same(labels: Mapping[str, str], others: Mapping[str, str]) -> bool:
    """Whether both say the same, whenever they came to be and whoever wrote them."""

    def compared(all_: Mapping[str, str]) -> dict[str, str]:
        return {key: value for key, value in all_.items() if key not in _NOT_COMPARED}

    return compared(labels) == compared(others)


def _content_of(labels: Mapping[str, str]) -> bytes:
    return "".join(f"{key}={labels[key]}\n" for key in sorted(labels)).encode()


def _digest(content: bytes) -> str:
    import hashlib  # noqa: PLC0415 - 1 ms that only labels in a file need

    return hashlib.sha256(content).hexdigest()
