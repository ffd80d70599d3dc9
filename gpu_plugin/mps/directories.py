"""The directories of MPS daemons on this node, and the memory that daemons share with clients. All functions block."""

import ctypes
import errno
import os
from contextlib import suppress
from pathlib import Path

from gpu_plugin.containers.cdi.host_files import Kind
from gpu_plugin.containers.driver_root.safe import judge
from gpu_plugin.devices.mps_paths import IN_CONTAINERS
from gpu_plugin.mps.errors import MpsError

# Containers of any user can enter and find the daemon's sockets, whose own modes let them connect. Only root can write: otherwise
# one pod could pretend to be the daemon of the other pods.
OPEN_TO_ALL = 0o755

SHM_MODE = 0o1777  # as /dev/shm, which it replaces in containers
MAX_LOG_BYTES = 16 * 1024 * 1024  # bytes that a log may occupy; the MPS root is often on a tmpfs

# The label of files that containers may use under the targeted policy. NVIDIA's daemon sets the same label.
_SELINUX_LABEL = b"system_u:object_r:container_file_t:s0\0"
_SELINUX_FILESYSTEM = Path("/sys/fs/selinux/enforce")

_MS_NOSUID = 2  # mount(2), linux/mount.h
_MS_NODEV = 4
_MS_NOEXEC = 8
_MS_NOSYMFOLLOW = 256  # from Linux 5.10 on; earlier kernels ignore it
_MS_RELATIME = 1 << 21

MOUNT = Path(IN_CONTAINERS)


def root_here(configured: str) -> Path:
    """Return the path of the MPS root in this process. Blocks.

    `configured` (--mps-root) is the root's path on the host, which the mounts of pods use. If this process has that path, use
    it; else use `MOUNT` if a volume is mounted there. If `MOUNT` is a directory without a mount, it belongs to another program.
    """
    here = Path(configured)
    return MOUNT if not here.is_dir() and os.path.ismount(MOUNT) else here


def shm_fault(shm: Path, mine: Path) -> str:
    """Return why clients in pods would not share memory with servers of this process; empty if they would. Blocks.

    Pods have `shm` as their /dev/shm, and servers have this process's /dev/shm, `mine`: both must be the same directory.
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

    Each directory is checked before the next directory is made in it: the daemon runs as root and follows links.

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
    fault = judge("", os.path.abspath(directory), (Kind.DIRECTORY,), links=links).seen.fault  # noqa: PTH100 - follows no link
    if fault:
        raise MpsError(f"{directory} is not safe for MPS daemons, which run as root: {fault}")


def make_directory(directory: Path, mode: int = OPEN_TO_ALL) -> None:
    """Make a directory, or correct its mode. If the path is a link, keep the mode: any user may have made the link.

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
                os.fchmod(descriptor, mode)  # mkdir applies the umask
        finally:
            os.close(descriptor)
    except OSError as error:
        raise MpsError(f"the directory {directory} cannot be made: {error.strerror}; is --mps-root writable?") from None


def _label(directory: Path) -> None:
    try:
        os.setxattr(directory, "security.selinux", _SELINUX_LABEL)
    except OSError as error:
        # The file system may have no labels, or the policy may lack this type.
        if error.errno not in (errno.ENOTSUP, errno.EINVAL):
            raise MpsError(
                f"{directory} cannot be labelled for containers (SELinux is on): {error.strerror}; run as root, privileged"
            ) from None


def trim_logs(log: Path) -> None:
    """Empty logs that are larger than `MAX_LOG_BYTES`: the daemon logs each command and client and never rotates logs.

    The occupied blocks count, not the size: a program that does not append keeps its offset, and so the file keeps its size.
    """
    for file in log.glob("*.log"):
        with suppress(OSError):  # an error with a log must not stop a daemon
            if file.stat().st_blocks * 512 > MAX_LOG_BYTES:
                os.truncate(file, 0)


def mount_shm(shm: Path, bytes_in_all: int) -> bool:
    """Mount a tmpfs of this size at `shm`, which is made if missing. Return False if a file system is mounted there already.

    Raises:
        MpsError: it cannot be mounted, as without the capability SYS_ADMIN, or users other than root can write to the MPS root.
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
