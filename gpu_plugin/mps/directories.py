"""The directories of MPS daemons on this node, and the memory that all of them and their clients share. Every call blocks."""

import ctypes
import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from gpu_plugin.containers.cdi.host_files import Kind
from gpu_plugin.containers.driver_root.safe import judge
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
_MS_NOSYMFOLLOW = 256  # from Linux 5.10 on; earlier kernels ignore it
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
    """Make the directories that one daemon needs below `root`, with their parents, and correct the modes of existing ones.

    Each directory is checked before the next one is made in it: the daemon runs as root and follows links.

    Raises:
        MpsError: a directory cannot be made, or others than root can write to it or to a directory above it.
    """
    for leaf in (pipe, log):
        for directory in (*reversed(leaf.parents), leaf):
            if directory.is_relative_to(root):
                make_directory(directory)
                _require_safe(directory, links=directory == root)
    if not os.path.ismount(shm):
        make_directory(shm, SHM_MODE)
    if _SELINUX_FILESYSTEM.exists():
        _label(pipe)


def _require_safe(directory: Path, *, links: bool) -> None:
    fault = judge("", os.path.abspath(directory), (Kind.DIRECTORY,), links=links).seen.fault  # noqa: PTH100 - it follows no link
    if fault:
        raise MpsError(f"{directory} is not safe for MPS daemons, which run as root: {fault}")


def make_directory(directory: Path, mode: int = OPEN_TO_ALL) -> None:
    """Make a directory, or correct its mode. The mode of a directory that a link leads to stays: it may be anybody's link.

    Raises:
        MpsError: the directory cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if directory.is_symlink():
            return
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_mode & 0o7777 != mode:
                os.fchmod(descriptor, mode)  # mkdir heeds the umask
        finally:
            os.close(descriptor)
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


def is_socket(path: Path) -> bool:
    """Whether a path itself is a socket."""
    with suppress(OSError):
        return stat.S_ISSOCK(path.lstat().st_mode)
    return False


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

    Raises:
        MpsError: it cannot be mounted, as without the capability SYS_ADMIN, or others than root can write to the MPS root.
    """
    make_directory(shm.parent)
    _require_safe(shm.parent, links=True)
    if os.path.ismount(shm):
        return False
    make_directory(shm, SHM_MODE)
    libc = ctypes.CDLL(None, use_errno=True)
    # All containers write here, and MPS servers of uid 0 open files here.
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | _MS_NOSYMFOLLOW | _MS_RELATIME
    options = f"mode={SHM_MODE:o},size={bytes_in_all}".encode()
    if libc.mount(b"shm", os.fsencode(shm), b"tmpfs", ctypes.c_ulong(flags), options) != 0:
        why = os.strerror(ctypes.get_errno())
        raise MpsError(f"{shm}: a tmpfs cannot be mounted there: {why}; run it as root with the capability SYS_ADMIN")
    return True


def half_of_memory() -> int:
    """Half of the node's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
