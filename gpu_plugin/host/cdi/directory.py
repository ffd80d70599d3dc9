"""The directory of CDI specifications that container runtimes read. Every call blocks for as long as the disk does."""

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from gpu_plugin.access import cdi_names
from gpu_plugin.access.cdi.spec import MAX_BYTES, Spec, from_json, to_json
from gpu_plugin.runtime.regular_file import leftovers, read_file, replace_file

MODE = 0o644
DIRECTORY_MODE = 0o755

OURS = tuple(map(cdi_names.file_name, cdi_names.CLASSES))  # every file that this plugin ever writes there, and no other


class Outcome(msgspec.Struct, frozen=True):
    """The names of the files that were written or removed, and of those where that failed, with the path and why."""

    changed: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}


class SpecDirectory:
    """Writes specifications below `path`, each only where the file there is another one. Safe from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._swept = False
        self._closed = False
        self._turn = threading.Lock()

    def write(self, specs: Mapping[str, Spec]) -> Outcome:
        """Makes these files, by their names, the only ones of ours that are there.

        A file that somebody else changed or removed is written again. Where one cannot be, the others are, all the same.
        The first call takes away what processes that were killed while they wrote have left. After `remove`, nothing is
        written any more.
        """
        with self._turn:
            if self._closed:
                return Outcome()
            self._swept = self._swept or self._sweep()
            return self._replace_all(specs)

    def remove(self) -> Outcome:
        """Takes our files away, as the last thing that is done here."""
        with self._turn:
            self._closed = True
            self._sweep()
            return self._replace_all({})

    def _replace_all(self, specs: Mapping[str, Spec]) -> Outcome:
        changed, refused = [], {}
        for name in OURS:
            try:
                done = self._put(name, specs[name]) if name in specs else self._remove(name)
            except OSError as error:
                refused[name] = said(error)
            else:
                changed += [name] if done else []
        return Outcome(tuple(changed), refused)

    def read(self, name: str) -> Spec | None:
        """What a file of that name says, ours or another's; None where there is none that makes sense."""
        try:
            return from_json(read_file(self.path / name, MAX_BYTES))
        except (OSError, ValueError):
            return None

    def _put(self, name: str, spec: Spec) -> bool:
        file, content = self.path / name, to_json(spec)
        if _says(file, content):
            return False
        self._make()
        with _locked(self.path, fcntl.LOCK_SH):
            _replace(file, content)
        return True

    def _make(self) -> None:
        """Makes the directory, if need be, open to all for reading whatever the umask is."""
        if self.path.is_dir():
            return
        try:
            self.path.mkdir(mode=DIRECTORY_MODE, parents=True)
        except FileExistsError:
            if not self.path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path)) from None
        else:
            self.path.chmod(DIRECTORY_MODE)

    def _remove(self, name: str) -> bool:
        if not os.path.lexists(self.path / name):  # on a read-only file system unlink refuses this, too
            return False
        with suppress(FileNotFoundError, NotADirectoryError):
            (self.path / name).unlink()
            return True
        return False

    def _sweep(self) -> bool:
        """Removes what killed processes left of our files, unless somebody is writing now. Returns whether that was done."""
        try:
            with _locked(self.path, fcntl.LOCK_EX) as locked:
                for path in tuple(leftovers(self.path, OURS)) if locked else ():
                    path.unlink(missing_ok=True)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # they do no harm, and can be removed when the directory can be written
        return locked


def said(error: OSError) -> str:
    """What the system says, with the path it says it of."""
    text = error.strerror or str(error)
    return f"{error.filename}: {text}" if error.filename else text


@contextmanager
def _locked(directory: Path, kind: int) -> Iterator[bool]:
    """Gives whether a directory could be locked: LOCK_SH to write there, LOCK_EX to remove what killed writers left."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        got = False
        with suppress(OSError):  # somebody has it, or this file system has no locks
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            got = True
        yield got
    finally:
        os.close(descriptor)


def _replace(file: Path, content: bytes) -> None:
    """Writes a file whole. Raises OSError with the file's own name, not with that of what is written first."""
    try:
        replace_file(file, content, MODE)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(file)) from None


def _says(file: Path, content: bytes) -> bool:
    """Whether there is a regular file of the right mode with this content."""
    try:
        return file.lstat().st_mode == stat.S_IFREG | MODE and read_file(file, MAX_BYTES) == content
    except OSError:
        return False
