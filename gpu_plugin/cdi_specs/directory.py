"""The directory of CDI specifications that container runtimes read. Every call blocks for as long as the disk does."""

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpu_plugin.access.cdi import names
from gpu_plugin.access.cdi.spec import MAX_BYTES, Spec, from_json, to_json
from gpu_plugin.atomic import replace_file

MODE = 0o644
DIRECTORY_MODE = 0o755

OURS = tuple(map(names.file_name, names.CLASSES))
"""Every file that this plugin ever writes there, and no other."""

_Signature = tuple[int, int, int, int, int]


@dataclass(slots=True)
class SpecDirectory:
    """Writes specifications below `path`, each only where the file there is another one."""

    path: Path
    _written: dict[str, tuple[Spec, _Signature]] = field(default_factory=dict)

    def write(self, specs: Mapping[str, Spec]) -> list[str]:
        """Makes these files, by their names, the only ones of ours that are there. Returns those that were written or removed.

        A file that somebody else changed or removed is written again. Where one cannot be, the others are, all the same.

        Raises:
            OSError: of the first file that could not be written or removed, with its name.
        """
        changed, refused = [], None
        for name in OURS:
            try:
                done = self._put(name, specs[name]) if name in specs else self._remove(name)
            except OSError as error:
                refused = refused or OSError(error.errno, error.strerror or str(error), str(self.path / name))
            else:
                changed += [name] if done else []
        if refused is not None:
            raise refused
        return changed

    def remove(self) -> list[str]:
        """Takes our files away. Returns which were there. Raises OSError where one cannot be removed."""
        return [name for name in OURS if self._remove(name)]

    def read(self, name: str) -> Spec | None:
        """What a file of that name says, ours or another's; None where there is none that makes sense."""
        try:
            return from_json(read_bounded(self.path / name))
        except (OSError, ValueError):
            return None

    def _put(self, name: str, spec: Spec) -> bool:
        file = self.path / name
        there = _signature(file)
        known = self._written.get(name)
        if known is not None and known[0] == spec and known[1] == there:
            return False
        content = to_json(spec)
        if there is None or not _same(file, content):
            self.path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            replace_file(file, content, MODE)
            there = None
        now = _signature(file)
        if now is not None:
            self._written[name] = spec, now
        return there is None

    def _remove(self, name: str) -> bool:
        self._written.pop(name, None)
        with suppress(FileNotFoundError, NotADirectoryError):
            (self.path / name).unlink()
            return True
        return False


def read_bounded(file: Path) -> bytes:
    """The content of a regular file of sensible size. Raises OSError for anything else."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is no regular file")
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(f"it is larger than {MAX_BYTES} bytes")
    return content


def _signature(file: Path) -> _Signature | None:
    """What tells one version of a regular file with the right mode from another; None for anything else."""
    try:
        status = file.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) != MODE:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _same(file: Path, content: bytes) -> bool:
    try:
        return read_bounded(file) == content
    except OSError:
        return False
