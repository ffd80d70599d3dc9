"""The file of labels for the source "local" of Node Feature Discovery's worker, with one line key=value for each label. Blocks.

The file has the same name as GPU Feature Discovery's file. So each program replaces the other program's file, and the Node never
has both sets of labels. Our lines are in alphabetical order. The file has no mark of its writer, since older workers read every
line as a label. Instead, the state directory has the digests of the files that this plugin wrote, and only these files are
removed. If the state directory has no entry for a path, a file there is ours if only this plugin can have written it
(`_only_ours`).
"""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from gpu_plugin.config.names import DOMAIN, PRESENT, TIMESTAMP
from gpu_plugin.runtime.regular_file import UnfitFileError, leftovers, open_file, replace_file

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


class WrittenFiles(msgspec.Struct, frozen=True):
    """SHA-256 of the contents that this plugin wrote to each path, newest first.

    A path has no digests if another program's file is there now.
    """

    files: dict[str, tuple[str, ...]] = {}

    def directories(self) -> frozenset[str]:
        """Return the directories of the files that may still exist."""
        return frozenset(str(Path(path).parent) for path, digests in self.files.items() if digests)

    def merged(self, older: "WrittenFiles") -> "WrittenFiles":
        """Return these files together with those of an older list."""
        both = {path: _bounded(self.files.get(path, ()) + digests) for path, digests in older.files.items()}
        return WrittenFiles({**self.files, **both})

    def updated(self, path: Path, digests: tuple[str, ...] | None) -> "WrittenFiles":
        """Return the list with these digests of a path; None if this plugin has no file there."""
        others = {each: known for each, known in self.files.items() if each != str(path)}
        return WrittenFiles(others if digests is None else {**others, str(path): digests})


class FeaturesFile:
    """The file in one directory. Every method raises OSError if the directory or the file cannot be read or written."""

    def __init__(self, directory: Path, written: WrittenFiles) -> None:
        self.path = directory / NAME
        self._digests = written.files.get(str(self.path))

    def read(self) -> dict[str, str]:
        """Read the labels in the order of the file, also if another program wrote it; empty if there is no file."""
        return _labels_in(self._content() or b"")

    def digests(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """Return the path's digests if `write` writes these labels. Save them before, so that a kill does not lose them."""
        present = self._content()
        replaced = (_digest(present),) if present is not None and self._is_ours(present) else ()
        return _bounded((_digest(_content_of(labels)), *replaced, *(self._digests or ())))

    def write(self, labels: Mapping[str, str]) -> None:
        """Replace the whole file, also if another program wrote it."""
        replace_file(self.path, _content_of(labels), 0o644)

    def equals(self, labels: Mapping[str, str]) -> bool:
        """Whether the file is the same as `write` would write it. Then it is ours: the state directory may be new."""
        return self._content() == _content_of(labels)

    def remove(self) -> tuple[bool, tuple[str, ...] | None]:
        """Remove the file if it is ours, and temporary files of a killed process.

        Returns:
            Whether our file was there; and the path's digests from now on, None if it needs no entry any more.

        Raises:
            AwayError: the directory does not exist, and this plugin wrote a file there.
            OSError: the file cannot be read or removed.
        """
        if not self.path.parent.is_dir():
            if self._digests:
                raise AwayError(errno.ENOENT, "its directory is not there")
            return False, self._digests
        for leftover in tuple(leftovers(self.path.parent, [NAME])):
            leftover.unlink(missing_ok=True)
        content = self._content()
        if content is None:
            return False, None
        if not self._is_ours(content):
            return False, None if self._digests is None else ()
        self.path.unlink(missing_ok=True)
        return True, None

    def _is_ours(self, content: bytes) -> bool:
        """Whether this plugin wrote this content. If the path is unknown: whether only we write such a file."""
        return _only_ours(content) if self._digests is None else _digest(content) in self._digests

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
