"""The pipe directory of an MPS control daemon: emptied before each start, and the lock of the daemon in it. Every call blocks.

NVIDIA's daemon runs as root and follows links: it opens `control_lock` and `log` to write and changes the mode of `log` and
`control` (seen with driver 535). Containers of NVIDIA's plugin can write to the directory: its mounts are
not read-only.
"""

import errno
import fcntl
import os
import shutil
import stat
import struct
from contextlib import suppress
from pathlib import Path

from gpu_plugin.devices.mps_paths import CONTROL_LOCK, LOG_FIFO
from gpu_plugin.mps.errors import MpsError

_MAX_READS = 64  # of the FIFO at a time: a client may write without end

_FLOCK = "hhqqi4x"  # struct flock of fcntl(2) on 64-bit Linux: type, whence, start, length, process


def lock_holder(pipe: Path) -> int:
    """Return the id of the process that holds a daemon's lock in a pipe directory: 0 for none, -1 in another pid namespace.

    A daemon has a write lock. Read locks do not count: any pod that may read the file can have one. Takes no lock.
    """
    # The kernel answers a request for a read lock with the write lock that is in its way.
    request = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    with suppress(OSError):  # the file is missing, or its file system has no locks
        descriptor = _opened(pipe / CONTROL_LOCK, stat.S_IFREG)
        try:
            kind, _, _, _, process = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, request))
            return 0 if kind == fcntl.F_UNLCK else process or -1
        finally:
            os.close(descriptor)
    return 0


def prepare(pipe: Path) -> None:
    """Remove everything from a pipe directory without following links, and make `control_lock` for root alone.

    NVIDIA's daemon makes `control_lock` with mode 0666. A read lock of any pod would then prevent every later start. The daemon
    keeps the mode of a file that exists, and the new file has no locks.

    Raises:
        MpsError: a living daemon has the directory, or something in it cannot be removed or made.
    """
    if process := lock_holder(pipe):
        raise MpsError(
            f"another MPS daemon{f' (process {process})' if process > 0 else ''} has {pipe}: stop it, or run gpu-plugin mps with "
            "another --mps-root"
        )
    at, remedy = pipe, ""
    try:
        directory = os.open(pipe, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in os.listdir(directory):  # noqa: PTH208 - a descriptor
                at = pipe / name
                remedy = f"; remove {at} by hand"
                with suppress(FileNotFoundError):  # removed by another process
                    _remove(name, directory)
            at, remedy = pipe / CONTROL_LOCK, ""
            os.close(
                os.open(CONTROL_LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
            )
        finally:
            os.close(directory)
    except OSError as error:
        raise MpsError(
            f"the pipe directory of the MPS daemon cannot be emptied and prepared: {at}: {error.strerror}{remedy}"
            if at != pipe
            else f"the pipe directory {pipe} cannot be opened: {error.strerror}"
        ) from None


def follows_links(process: int, pipe: Path) -> bool:
    """Whether a daemon would follow links in its pipe directory: its mounts lack the mount that `tether` makes."""
    place = os.path.realpath(pipe).replace(" ", "\\040")  # as in proc_pid_mountinfo(5)
    try:
        mounts = [line.split() for line in Path(f"/proc/{process}/mountinfo").read_text().splitlines()]
    except OSError:  # the daemon has ended
        return False
    return not any(mount[4] == place and "nosymfollow" in mount[5].split(",") for mount in mounts)


def drain_log(pipe: Path) -> None:
    """Read the FIFO of the daemon's log empty.

    Any client may write to it. Bytes that are no log record end the daemon's reader thread, and then the daemon itself waits
    in its next write for room in the FIFO (seen with driver 535).
    """
    with suppress(OSError):  # gone, replaced, or empty, which is a BlockingIOError
        descriptor = _opened(pipe / LOG_FIFO, stat.S_IFIFO)
        try:
            for _ in range(_MAX_READS):
                if not os.read(descriptor, 64 * 1024):
                    break
        finally:
            os.close(descriptor)


def _opened(path: Path, kind: int) -> int:
    """Open a file of this kind (`S_IFREG`, ...) to be read, without following a link and without waiting. Return a descriptor.

    A file of another kind is not opened at all: to open a device node can start the device, such as a watchdog.

    Raises:
        OSError: the file is missing, of another kind, or cannot be opened.
    """
    named = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if stat.S_IFMT(os.fstat(named).st_mode) != kind:
            raise OSError(errno.EINVAL, "is another kind of file")
        return os.open(f"/proc/self/fd/{named}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(named)


def _remove(name: str, directory: int) -> None:
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        try:
            shutil.rmtree(name, dir_fd=directory)
        except RecursionError:
            raise OSError(errno.ENAMETOOLONG, "its directories are nested too deeply") from None
    else:
        os.unlink(name, dir_fd=directory)
