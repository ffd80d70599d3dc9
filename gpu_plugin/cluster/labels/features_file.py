"""The file of labels for the source "local" of Node Feature Discovery's worker, with one line key=value for each label. Blocks.

The file has the same name as GPU Feature Discovery's file. So each program replaces the other program's file, and the Node never
has both sets of labels. Our lines are in alphabetical order. The file has no mark of its writer, since older workers read every
line as a label. Instead, the state directory has the digests of the files that this plugin wrote, and only these files are
removed. If the state directory has no entry for a path, a file there is ours if only this plugin can have written it
(`_only_ours`).
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
MAX_BYTES = 64 * 1024  # to read; no valid file exceeds it, since NFD has the same limit

FEATURES_FILE: Final = "features.json"  # lists the files of labels that this plugin wrote, in the state directory

# The most digests of one path: the last content, and earlier contents that may still be there if a write failed, hung, or was
# interrupted by a kill.
_MOST_DIGESTS = 4

# Labels that every file of this plugin has. GPU Feature Discovery never writes the label PRESENT.
_ALWAYS = frozenset({PRESENT, TIMESTAMP} | {f"{DOMAIN}/{name}" for name in ("gpu.machine", "gpu.mode", "mig.capable")})


class AwayError(FileNotFoundError):
    """The directory of a file that this plugin wrote does not exist."""


class _Written(msgspec.Struct, frozen=True):
    """SHA-256 of the contents that this plugin wrote to each path, newest first.

    A path has no digests if another program's file is there now.
    """

    files: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)


class WrittenFiles:
    """The files that this plugin wrote. The list survives restarts if the state directory can be written.

    Only `load` and `keep` use the disk. Any thread may call any method.
    """

    def __init__(self, state: StateDirectory) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._files: dict[str, tuple[str, ...]] = {}
        self._kept: dict[str, tuple[str, ...]] | None = None

    @property
    def loaded(self) -> bool:
        """Whether the list of earlier processes has been read."""
        return self._kept is not None

    def read_again(self) -> None:
        """Make the next `load` read the list again, since another daemon may have written files."""
        self._kept = None

    def load(self) -> None:
        """Read the list of earlier processes, unless it has been read. Blocks for as long as the disk does."""
        if self._kept is not None:
            return
        kept = (self._state.read(FEATURES_FILE, _Written) or _Written()).files
        with self._lock:
            merged = {path: _bounded(self._files.get(path, ()) + digests) for path, digests in kept.items()}
            self._files = {**self._files, **merged}
            self._kept = kept

    def keep(self) -> bool:
        """Write the list to the state directory. Returns whether the directory has it. Blocks for as long as the disk does."""
        self.load()
        with self._lock:
            files = self._files
        if files != self._kept and self._state.write(FEATURES_FILE, _Written(files)):
            self._kept = files
        return files == self._kept

    def directories(self) -> frozenset[str]:
        """Return the directories of the files."""
        return frozenset(str(Path(path).parent) for path, digests in self._files.items() if digests)

    def remembers(self, path: Path) -> bool:
        """Whether this plugin wrote a file to this path that may still exist."""
        return bool(self._files.get(str(path)))

    def has(self, path: Path, content: bytes) -> bool:
        """Whether this plugin wrote this content to this path. If the path is unknown: whether only we write such a file."""
        known = self._files.get(str(path))
        return _only_ours(content) if known is None else _digest(content) in known

    def add(self, path: Path, content: bytes, there: bytes | None = None) -> None:
        """Add content that is about to be written to this path. `there` is the present content, which it replaces."""
        present = (_digest(there),) if there is not None and self.has(path, there) else ()
        with self._lock:
            before = self._files.get(str(path), ())
            self._files = {**self._files, str(path): _bounded((_digest(content), *present, *before))}

    def discard(self, path: Path, *, others: bool = False) -> None:
        """Remove the digests of a path that has no file of this plugin. `others`: it has another program's file."""
        with self._lock:
            known = {each: digests for each, digests in self._files.items() if each != str(path)}
            self._files = {**known, str(path): ()} if others and str(path) in self._files else known


class FeaturesFile:
    """The file in one directory. Every method raises OSError if the directory or the file cannot be read or written."""

    def __init__(self, directory: Path, written: WrittenFiles) -> None:
        self.path = directory / NAME
        self._written = written

    def read(self) -> dict[str, str]:
        """Read the labels in the order of the file, also if another program wrote it; empty if there is no file."""
        return _labels_in(self._content() or b"")

    def announce(self, labels: Mapping[str, str]) -> None:
        """Add the content that `write` will write to `WrittenFiles`, so that it can be saved before the file is written."""
        self._written.add(self.path, _content_of(labels), self._content())

    def write(self, labels: Mapping[str, str]) -> None:
        """Replace the whole file, also if another program wrote it."""
        self.announce(labels)
        replace_file(self.path, _content_of(labels), 0o644)

    def claim(self, labels: Mapping[str, str]) -> None:
        """Treat the file as ours if it equals the content that `write` would write: the state directory may be new."""
        if self._content() == _content_of(labels):
            self.announce(labels)

    def remove(self) -> bool:
        """Remove the file if it is ours, and temporary files of a killed process. Returns whether our file was there.

        Raises:
            AwayError: the directory does not exist, and this plugin wrote a file there. Its entry in `WrittenFiles` stays.
            OSError: the file cannot be read or removed.
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
        self._written.discard(self.path, others=content is not None and not ours)
        return ours

    def _content(self) -> bytes | None:
        """Read at most MAX_BYTES of the file; None if there is no regular file."""
        try:
            with open_file(self.path, links=False) as file:
                return file.read(MAX_BYTES)
        except (FileNotFoundError, UnfitFileError):
            return None


def same(labels: Mapping[str, str], others: Mapping[str, str]) -> bool:
    """Whether both are equal except for the timestamp and the label PRESENT, which only this plugin writes."""
    either = {PRESENT: "", TIMESTAMP: ""}
    return {**labels, **either} == {**others, **either}


def _content_of(labels: Mapping[str, str]) -> bytes:
    return "".join(f"{key}={labels[key]}\n" for key in sorted(labels)).encode()


def _labels_in(content: bytes) -> dict[str, str]:
    pairs = (line.partition("=") for line in content.decode("utf-8", "replace").splitlines())
    return {key: value for key, equals, value in pairs if equals}


def _only_ours(content: bytes) -> bool:
    """Whether only this plugin writes such a file. This identifies our file if the state directory is new.

    GPU Feature Discovery's file has no `gpu.present`, and its lines are in random order.
    """
    labels = _labels_in(content)
    return labels.keys() >= _ALWAYS and content == _content_of(labels)


def _bounded(digests: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(digests))[:_MOST_DIGESTS]


def _digest(content: bytes) -> str:
    import hashlib  # noqa: PLC0415 - takes 1 ms, and only labels in a file need it

    return hashlib.sha256(content).hexdigest()
