"""The file of labels that Node Feature Discovery's worker reads (its source "local"): a line key=value each. Blocks.

Its name is that of GPU Feature Discovery's file, so that either replaces the other's and the Node never has both. Ours lies in
alphabetical order. Nothing in it says whose it is, since older workers take every line for a label: what this plugin wrote is
remembered in the state directory. Nothing else is removed, but where nothing is remembered a file that only this plugin writes.
"""

import errno
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from gpu_plugin.config.names import DOMAIN, PRESENT, TIMESTAMP
from gpu_plugin.runtime.regular_file import UnfitFileError, leftovers, open_file, replace_file
from gpu_plugin.state.directory import StateDirectory

NAME = "gfd"
MODE = 0o644

MAX_BYTES = 64 * 1024
"""More than any such file has: NFD's own limit."""

FEATURES_FILE: Final = "features.json"
"""Its name in the state directory: which files this plugin wrote."""

_MOST_DIGESTS = 4
"""Of one path: what was written last, and what may still lie there because a write failed, hung, or was cut off by a kill."""

_ALWAYS = frozenset({PRESENT, TIMESTAMP} | {f"{DOMAIN}/{name}" for name in ("gpu.machine", "gpu.mode", "mig.capable")})
"""Labels that every file of this plugin has. GPU Feature Discovery never writes the first one."""


class AwayError(FileNotFoundError):
    """The directory of a file that this plugin wrote is not there."""


class _Written(msgspec.Struct, frozen=True):
    """SHA-256 of what this plugin wrote to each path, newest first; none where somebody else's file lies there since."""

    files: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)


class WrittenFiles:
    """The files that this plugin wrote, over restarts; for as long as this process lives where nothing can be kept.

    Only `load` and `keep` touch the disk; any thread may call any of them.
    """

    def __init__(self, state: StateDirectory) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._files: dict[str, tuple[str, ...]] = {}
        self._kept: dict[str, tuple[str, ...]] | None = None

    @property
    def loaded(self) -> bool:
        """Whether it is known what earlier processes wrote."""
        return self._kept is not None

    def read_again(self) -> None:
        """The next `load` reads the file again: another daemon may have written files."""
        self._kept = None

    def load(self) -> None:
        """Reads what earlier processes wrote, once. Blocks for as long as the disk does."""
        if self._kept is not None:
            return
        kept = (self._state.read(FEATURES_FILE, _Written) or _Written()).files
        with self._lock:
            merged = {path: _bounded(self._files.get(path, ()) + digests) for path, digests in kept.items()}
            self._files = {**self._files, **merged}
            self._kept = kept

    def keep(self) -> bool:
        """Has the state directory remember them. Blocks for as long as the disk does. Returns whether it does."""
        self.load()
        with self._lock:
            files = self._files
        if files != self._kept and self._state.write(FEATURES_FILE, _Written(files)):
            self._kept = files
        return files == self._kept

    def directories(self) -> frozenset[str]:
        """Where they are."""
        return frozenset(str(Path(path).parent) for path, digests in self._files.items() if digests)

    def remembers(self, path: Path) -> bool:
        """Whether this plugin wrote a file to this path that may be there still."""
        return bool(self._files.get(str(path)))

    def has(self, path: Path, content: bytes) -> bool:
        """Whether this plugin wrote this content to this path; of a path that it remembers nothing of, whether only it could."""
        known = self._files.get(str(path))
        return _only_ours(content) if known is None else _digest(content) in known

    def add(self, path: Path, content: bytes, there: bytes | None = None) -> None:
        """Notes that this content is about to be written to this path, in place of `there`, its content now."""
        present = (_digest(there),) if there is not None and self.has(path, there) else ()
        with self._lock:
            before = self._files.get(str(path), ())
            self._files = {**self._files, str(path): _bounded((_digest(content), *present, *before))}

    def forget(self, path: Path, *, others: bool = False) -> None:
        """Nothing of this plugin lies there any more, but perhaps a file of somebody else (`others`)."""
        with self._lock:
            known = {each: digests for each, digests in self._files.items() if each != str(path)}
            self._files = {**known, str(path): ()} if others and str(path) in self._files else known


class FeaturesFile:
    """The file in one directory. Every call raises OSError where the directory or the file cannot be read or written."""

    def __init__(self, directory: Path, written: WrittenFiles) -> None:
        self.path = directory / NAME
        self._written = written

    def read(self) -> dict[str, str]:
        """The labels that it has now, in its order, whoever wrote it; none where there is no such file."""
        return _labels_in(self._content() or b"")

    def announce(self, labels: Mapping[str, str]) -> None:
        """What `write` is about to write is this plugin's: to be remembered before it is written, where that can be done."""
        self._written.add(self.path, _content_of(labels), self._content())

    def write(self, labels: Mapping[str, str]) -> None:
        """Replaces it whole, whoever wrote it."""
        self.announce(labels)
        replace_file(self.path, _content_of(labels), MODE)

    def claim(self, labels: Mapping[str, str]) -> None:
        """Takes a file for this plugin's that is to the byte what `write` would write: the state directory may be a new one."""
        if self._content() == _content_of(labels):
            self.announce(labels)

    def remove(self) -> bool:
        """Removes it, if it is this plugin's, and what a killed process left beside it. Returns whether it was there.

        Raises:
            AwayError: there is no such directory, and this plugin wrote a file there. What is remembered of it stays.
            OSError: it cannot be read or removed.
        """
        if not self.path.parent.is_dir():
            if self._written.remembers(self.path):
                raise AwayError(errno.ENOENT, "its directory is not there")
            return False
        for leftover in tuple(leftovers(self.path.parent, [NAME])):
            leftover.unlink(missing_ok=True)
        content = self._content()
        ours = content is not None and self._written.has(self.path, content)
        if ours:
            self.path.unlink(missing_ok=True)
        self._written.forget(self.path, others=content is not None and not ours)
        return ours

    def _content(self) -> bytes | None:
        """As much of it as any such file has; None where there is none."""
        try:
            with open_file(self.path, links=False) as file:
                return file.read(MAX_BYTES)
        except (FileNotFoundError, UnfitFileError):
            return None


def same(labels: Mapping[str, str], others: Mapping[str, str]) -> bool:
    """Whether both say the same, whenever they came to be and whoever wrote them."""
    either = {PRESENT: "", TIMESTAMP: ""}
    return {**labels, **either} == {**others, **either}


def _content_of(labels: Mapping[str, str]) -> bytes:
    return "".join(f"{key}={labels[key]}\n" for key in sorted(labels)).encode()


def _labels_in(content: bytes) -> dict[str, str]:
    pairs = (line.partition("=") for line in content.decode("utf-8", "replace").splitlines())
    return {key: value for key, equals, value in pairs if equals}


def _only_ours(content: bytes) -> bool:
    """Whether nobody but this plugin writes such a file: the state directory may be a new one.

    GPU Feature Discovery's has no `gpu.present`, and its lines lie in no order.
    """
    labels = _labels_in(content)
    return labels.keys() >= _ALWAYS and content == _content_of(labels)


def _bounded(digests: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(digests))[:_MOST_DIGESTS]


def _digest(content: bytes) -> str:
    import hashlib  # noqa: PLC0415 - 1 ms that only labels in a file need

    return hashlib.sha256(content).hexdigest()
