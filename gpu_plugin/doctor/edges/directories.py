"""The state of a directory and of its file system. Blocks as long as the file system does."""

import os
import re
import stat
from pathlib import Path

from msgspec.structs import replace

from gpu_plugin.doctor.facts import Directory

_ESCAPED = re.compile(r"\\([0-7]{3})")


def directory(path: str, mounts: Path = Path("/proc/self/mountinfo")) -> Directory:
    """Return the directory at this path. Does not raise if it is missing, or is not a directory."""
    try:
        there = os.stat(path)  # noqa: PTH116 - a single call, for a consistent result
    except (FileNotFoundError, NotADirectoryError):
        return _absent(path, mounts)
    except OSError as error:
        return Directory(path, error=error.strerror or str(error))
    space = os.statvfs(path)
    mount, filesystem = _mounted_on(os.path.realpath(path), mounts)
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


def cdi_conflicts(path: str) -> tuple[str, ...]:
    """Return a sentence for each device of this plugin that two files of a directory define, so that runtimes refuse it."""
    from gpu_plugin.containers.cdi_files.files import NameConflicts  # noqa: PLC0415 - only CDI needs it

    return tuple(NameConflicts(Path(path)).find().values())


def _absent(path: str, mounts: Path) -> Directory:
    """Return a missing directory. `writable` is True if it can be created in its nearest parent directory."""
    above = Path(path).parent
    while not above.exists() and above != above.parent:
        above = above.parent
    known = directory(str(above), mounts)
    return replace(known, path=path, there=False, is_directory=False, writable=known.writable and known.is_directory)


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
