"""The directories of MPS daemons on this node, and the memory that all of them and their clients share. Every call blocks."""

import ctypes
import errno
import os
from contextlib import suppress
from pathlib import Path

from gpu_plugin.devices.mps_paths import IN_CONTAINERS
from gpu_plugin.mps.errors import MpsError

OPEN_TO_ALL = 0o755
"""Containers of any user enter and find the daemon's sockets, whose own modes let them connect; only root puts any there.

A pipe directory that all may write to would let one pod stand in for the daemon of the others.
"""

SHM_MODE = 0o1777  # as /dev/shm, whose place it takes in containers
MAX_LOG_BYTES = 16 * 1024 * 1024  # bytes that a log may occupy; the MPS root is often on a tmpfs

SELINUX_LABEL = b"system_u:object_r:container_file_t:s0\0"
"""What containers may touch under SELinux's targeted policy (NVIDIA's daemon sets the same)."""

_SELINUX = "security.selinux"
_SELINUX_FILESYSTEM = Path("/sys/fs/selinux/enforce")

_MS_NOSUID = 2  # mount(2), linux/mount.h
_MS_NODEV = 4
_MS_NOEXEC = 8
_MS_RELATIME = 1 << 21


MOUNT = Path(IN_CONTAINERS)


def root_here(configured: str) -> Path:
    """Where the MPS root is found by this process. Blocks.

    `configured` (--mps-root) is the root's path on the host, which pods' mounts name. A process that has it under that path
    looks there; else, one that has a volume mounted at `MOUNT` has it there. A directory at `MOUNT` that is no mount point
    is somebody else's.
    """
    here = Path(configured)
    return MOUNT if not here.is_dir() and os.path.ismount(MOUNT) else here


def shm_fault(shm: Path, mine: Path) -> str:
    """Why clients in pods would not share memory with the servers that this process starts; empty if they would. Blocks.

    Pods get `shm` as their /dev/shm, and servers have that of this process, `mine`: the two must be one directory.
    """
    try:
        if os.path.samefile(shm, mine):  # noqa: PTH121 - as ismount
            return ""
        why = f"{mine} of this process is not {shm}"
    except OSError as error:
        why = f"{mine} of this process cannot be compared with {shm} ({error.strerror})"
    return (
        f"{why}, which pods get as their /dev/shm: clients will not reach their MPS servers; mount the host's directory shm of "
        f"--mps-root at /dev/shm of this container, or without a container run mount --bind /dev/shm {shm}"
    )


def make(root: Path, pipe: Path, log: Path, shm: Path) -> None:
    """Makes what one daemon needs, and whatever leads there below `root`, or mends its modes where it is.

    Raises MpsError where one of them cannot be made.
    """
    for leaf in (pipe, log):
        for directory in (*reversed(leaf.parents), leaf):
            if directory.is_relative_to(root):
                make_directory(directory)
    if not os.path.ismount(shm):
        make_directory(shm, SHM_MODE)
    if _SELINUX_FILESYSTEM.exists():
        _label(pipe)


def make_directory(directory: Path, mode: int = OPEN_TO_ALL) -> None:
    """Makes a directory, or mends its mode. Raises MpsError where that cannot be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if directory.stat().st_mode & 0o7777 != mode:
            directory.chmod(mode)  # mkdir heeds the umask
    except OSError as error:
        raise MpsError(f"the directory {directory} cannot be made: {error.strerror}; is --mps-root writable?") from None


def _label(directory: Path) -> None:
    try:
        os.setxattr(directory, _SELINUX, SELINUX_LABEL)
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.EINVAL):  # no labels on this file system, or no such type here
            raise MpsError(
                f"{directory} cannot be labelled for containers (SELinux is on): {error.strerror}; run as root, privileged"
            ) from None


def trim_logs(log: Path) -> None:
    """Empties logs that have grown past `MAX_LOG_BYTES`: the daemon writes lines for every command and client, for ever.

    What it occupies counts, not its size: one that is not written at its end keeps its size when it is emptied.
    """
    for file in log.glob("*.log"):
        with suppress(OSError):  # a log is not worth a daemon
            if file.stat().st_blocks * 512 > MAX_LOG_BYTES:
                os.truncate(file, 0)


def mount_shm(shm: Path, bytes_in_all: int) -> bool:
    """Mounts a tmpfs of so many bytes at `shm`, made if need be; False where something is mounted there already.

    Raises MpsError where it cannot be mounted, as without the capability SYS_ADMIN.
    """
    make_directory(shm.parent)
    if os.path.ismount(shm):
        return False
    make_directory(shm, SHM_MODE)
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | _MS_RELATIME
    options = f"mode={SHM_MODE:o},size={bytes_in_all}".encode()
    if libc.mount(b"shm", os.fsencode(shm), b"tmpfs", ctypes.c_ulong(flags), options) != 0:
        why = os.strerror(ctypes.get_errno())
        raise MpsError(f"{shm}: a tmpfs cannot be mounted there: {why}; run it as root with the capability SYS_ADMIN")
    return True


def half_of_memory() -> int:
    """Half of the node's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
