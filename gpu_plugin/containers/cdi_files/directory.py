"""The directory of CDI specifications that container runtimes read. Every call blocks for as long as the disk does.

The directory has a record of the specifications that this plugin wrote, in the form of sha256sum(1). This plugin removes a file
only if its SHA-256 is in the record. The specifications themselves cannot have it, since CDI has annotations only from 0.6.0 on,
and older runtimes refuse newer files.
"""

import errno
import fcntl
import os
import re
import stat
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import msgspec

from gpu_plugin.containers import cdi_names
from gpu_plugin.containers.cdi.host_files import Kind
from gpu_plugin.containers.cdi.spec import MAX_BYTES, Spec, from_json
from gpu_plugin.containers.cdi.written import encoded
from gpu_plugin.containers.driver_root.safe import judge, trusted
from gpu_plugin.runtime.regular_file import UnfitFileError, leftovers, read_file, replace_file

RECORD = ".gpu-plugin.sha256"  # runtimes read only names that end in .json or .yaml

_DIRECTORY_MODE = 0o755
_FILE_MODE = 0o644  # of the record and of the specifications
_MAX_RECORD_BYTES = 64 * 1024  # a record of all classes has 1 KiB
_RECORD_LINE = re.compile(rb"([0-9a-f]{64})  ([\w.-]+)", re.ASCII)

OURS = tuple(map(cdi_names.file_name, cdi_names.CLASSES))  # every file that this plugin ever writes there

# The hexadecimal SHA-256 of each content that this plugin wrote, by file name. A file has two while it is replaced.
Digests = Mapping[str, frozenset[str]]


class Outcome(msgspec.Struct, frozen=True):
    """The result of one round of writing."""

    changed: tuple[str, ...] = ()  # the names of files that were written or removed
    refused: Mapping[str, str] = {}  # by file name, the path and the error of each write or removal that failed
    invalid: Mapping[str, str] = {}  # by file name, the faults of new specifications; their old files stay
    foreign: tuple[str, ...] = ()  # the names of files that stay because another program wrote or changed them


class SpecDirectory:
    """Writes valid specifications below `path`, each only if the file there differs. Safe from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._swept = False
        self._closed = False
        self._turn = threading.Lock()
        self._encoded: dict[str, tuple[Spec, bytes]] = {}  # valid specifications by file name, and their bytes

    def write(self, specs: Mapping[str, Spec]) -> Outcome:
        """Write these specifications by file name, and remove our other files if they are on record.

        A file that another program changed or removed is written again. A failed write does not stop the other writes. An
        invalid specification is not written, and its old file stays. The first call also removes the temporary files of
        killed processes. After `remove`, no call writes.
        """
        with self._turn:
            if self._closed:
                return Outcome()
            self._swept = self._swept or self._sweep()
            return self._replace_all(specs)

    def remove(self) -> Outcome:
        """Remove the files that this plugin wrote. Later calls of `write` do nothing."""
        with self._turn:
            self._closed = True
            self._sweep()
            return self._replace_all({})

    def _replace_all(self, specs: Mapping[str, Spec]) -> Outcome:
        changed, foreign, refused, invalid = [], [], {}, {}
        contents: dict[str, bytes] = {}
        for name, spec in specs.items():
            try:
                contents[name] = self._content(name, spec)
            except ValueError as error:
                invalid[name] = str(error)
        digests = dict(_recorded(self.path))
        for name, content in contents.items():
            digests[name] = digests.get(name, frozenset()) | {_digest(content)}
        self._record(digests)  # before the files, so that every file of ours is on record even after a kill
        for name, content in contents.items():
            try:
                changed += [name] if self._put(self.path / name, content) else []
                digests[name] = frozenset({_digest(content)})
            except OSError as error:
                refused[name] = said(error)
        for name in (each for each in OURS if each not in specs):
            try:
                if _remove(self.path / name, digests.get(name, frozenset())):
                    changed.append(name)
                elif os.path.lexists(self.path / name):
                    foreign.append(name)
                digests.pop(name, None)
            except OSError as error:
                refused[name] = said(error)
        trouble = self._record(digests)
        if trouble and not refused:  # else the other errors have the same reason
            refused[RECORD] = trouble
        return Outcome(tuple(changed), refused, invalid, tuple(foreign))

    def _record(self, digests: Digests) -> str:
        """Write the record if these digests differ from it. Return why that failed; empty if it did not."""
        if digests == _recorded(self.path):
            return ""
        try:
            if digests:
                self._make()
            with _locked(self.path, fcntl.LOCK_SH):
                lines = [f"{digest}  {name}\n" for name in sorted(digests) for digest in sorted(digests[name])]
                if lines:
                    _replace(self.path / RECORD, "".join(lines).encode())
                else:
                    (self.path / RECORD).unlink(missing_ok=True)
        except OSError as error:
            return f"{said(error)}; without this record, no cleanup removes the specifications"
        return ""

    def complaints(self) -> tuple[str, ...]:
        """Return a sentence if other users than root can replace files in the directory."""
        seen = judge("", str(self.path.absolute()), (Kind.DIRECTORY,)).seen
        if seen.kind is not Kind.DIRECTORY or not seen.fault:
            return ()  # if the directory is missing, the next write reports it
        why = "other users than root can replace CDI specifications there, and so give containers any file of this node"
        return (f"{self.path}: {why}: {seen.fault}",)

    def read(self, name: str) -> Spec | None:
        """Read the specification in the file of that name, of any program; None if it is missing or not valid."""
        try:
            return from_json(read_file(self.path / name, MAX_BYTES))
        except (OSError, ValueError):
            return None

    def _content(self, name: str, spec: Spec) -> bytes:
        """Return a specification's bytes. Raises ValueError if it must not be written."""
        if name not in self._encoded or self._encoded[name][0] is not spec:
            self._encoded[name] = (spec, encoded(spec))
        return self._encoded[name][1]

    def _put(self, file: Path, content: bytes) -> bool:
        if _is_written(file, content):
            return False
        self._make()
        with _locked(self.path, fcntl.LOCK_SH):
            _replace(file, content)
        return True

    def _make(self) -> None:
        """Make the directory if it is missing. Every user may read it under any umask."""
        if self.path.is_dir():
            return
        try:
            self.path.mkdir(mode=_DIRECTORY_MODE, parents=True)
        except FileExistsError:
            if not self.path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path)) from None
        else:
            self.path.chmod(_DIRECTORY_MODE)

    def _sweep(self) -> bool:
        """Remove the temporary files of killed processes. Return False if another process is writing now."""
        try:
            with _locked(self.path, fcntl.LOCK_EX) as locked:
                for path in tuple(leftovers(self.path, (*OURS, RECORD))) if locked else ():
                    path.unlink(missing_ok=True)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # temporary files do no harm; a later call removes them
        return locked


def not_ours(file: Path) -> str:
    """Say why a file with one of our names is not removed."""
    return (
        f"{file}: another program, such as NVIDIA's plugin, or an operator wrote or edited it: remove it by hand if no program "
        "needs it"
    )


def said(error: OSError) -> str:
    """Return the system's error text, after the path of the file."""
    text = error.strerror or str(error)
    return f"{error.filename}: {text}" if error.filename else text


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()


def _recorded(directory: Path) -> Digests:
    """Read the record of a directory. It is empty if it cannot be read, so that no file counts as ours."""
    try:
        content = read_file(directory / RECORD, _MAX_RECORD_BYTES)
    except OSError:
        return {}
    found: dict[str, frozenset[str]] = {}
    for match in filter(None, map(_RECORD_LINE.fullmatch, content.splitlines())):
        name = match[2].decode()
        found[name] = found.get(name, frozenset()) | {match[1].decode()}
    return found


def _replace(file: Path, content: bytes) -> None:
    """Replace a file, which every user may read then. Raises OSError, which names the file itself and not the temporary file."""
    try:
        replace_file(file, content, _FILE_MODE)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(file)) from None


@contextmanager
def _locked(directory: Path, kind: int) -> Iterator[bool]:
    """Lock a directory: LOCK_SH to write there, LOCK_EX to remove temporary files. Yields whether that succeeded."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        got = False
        with suppress(OSError):  # another process holds the lock, or this file system has no locks
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            got = True
        yield got
    finally:
        os.close(descriptor)


def _remove(file: Path, known: Collection[str]) -> bool:
    """Remove a regular file if the digest of its content is known. Return False if nothing was removed."""
    try:
        if _digest(read_file(file, MAX_BYTES, links=False)) not in known:
            return False
    except (FileNotFoundError, NotADirectoryError, UnfitFileError):
        return False
    file.unlink(missing_ok=True)
    return True


def _is_written(file: Path, content: bytes) -> bool:
    """Whether the file is a regular file of root, with the right mode and this content."""
    try:
        there = file.lstat()
        # A file of another user could change later.
        sound = there.st_mode == stat.S_IFREG | _FILE_MODE and trusted(there)
        return sound and read_file(file, MAX_BYTES) == content
    except OSError:
        return False
