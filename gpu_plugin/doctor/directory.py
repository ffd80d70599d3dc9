"""The state of a directory and of its file system. Blocks as long as the file system does."""

import os
import re
import stat
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpu_plugin.doctor.finding import Finding, note

_ESCAPED = re.compile(r"\\([0-7]{3})")


class Directory(msgspec.Struct, frozen=True):
    """A directory. `error` is the system's text if stat(2) failed; empty if it worked, or if there is no such directory.

    `writable` is for this process. `removed` is True if the directory was removed on the host and is still mounted here.
    `mount` and `filesystem` are the mount point and the type of its file system. `free_bytes` and `free_inodes` are -1 if the
    file system does not report them. For a missing directory, these fields and `writable` are of the nearest parent directory.
    """

    path: str
    there: bool = True
    is_directory: bool = True
    error: str = ""
    writable: bool = True
    read_only: bool = False
    removed: bool = False
    mode: int = 0o755
    mount: str = "/"
    filesystem: str = ""
    free_bytes: int = -1
    free_inodes: int = -1


def read_directory(path: str, root: Path) -> Directory:
    """Return the directory at this path. Does not raise if it is missing, or is not a directory."""
    try:
        there = os.stat(path)  # noqa: PTH116 - a single call, for a consistent result
    except (FileNotFoundError, NotADirectoryError):
        above = Path(path).parent
        while not above.exists() and above != above.parent:
            above = above.parent
        known = read_directory(str(above), root)
        return replace(
            known, path=path, there=False, is_directory=False, writable=known.writable and known.is_directory
        )
    except OSError as error:
        return Directory(path, error=error.strerror or str(error))
    space = os.statvfs(path)
    mount, filesystem = _mounted_on(os.path.realpath(path), root / "proc/self/mountinfo")
    return Directory(
        path,
        is_directory=stat.S_ISDIR(there.st_mode),
        writable=os.access(path, os.W_OK | os.X_OK, effective_ids=True),
        read_only=bool(space.f_flag & os.ST_RDONLY),
        removed=there.st_nlink == 0,
        mode=stat.S_IMODE(there.st_mode),
        mount=mount,
        filesystem=filesystem,
        free_bytes=space.f_bavail * space.f_frsize if space.f_blocks else -1,
        free_inodes=space.f_favail if space.f_files else -1,
    )


def unwritable_by(uid: int, path: str) -> Finding:
    """Return the finding that this user may not write to a directory, although the daemon may."""
    return note(f"{path} cannot be written by uid {uid}", "run doctor as root to see what the daemon may do")


def _mounted_on(path: str, mounts: Path) -> tuple[str, str]:
    """Return mount point and type of the file system of a path without links (proc_pid_mountinfo(5))."""
    best = "", ""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return best
    for line in lines:
        before, dash, after = line.partition(" - ")
        fields = before.split()
        if not dash or len(fields) < 5:
            continue
        point = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), fields[4])
        # Of two file systems at the same mount point, the later one hides the other
        if f"{path}/".startswith(f"{point.rstrip('/')}/") and len(point) >= len(best[0]):
            best = point, after.split()[0]
    return best
