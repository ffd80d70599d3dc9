"""`tether.py PARENT DIRECTORY PROGRAM ARGUMENT...`: become PROGRAM, which the kernel kills when the process PARENT ends.

The program follows no symbolic link and opens no device node in DIRECTORY, if the kernel and the rights of this process allow
that.

This is a program of its own, run by its path. After a fork in a process with threads, few calls are safe before exec.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2), linux/prctl.h

_CLONE_NEWNS = 0x20000  # unshare(2), linux/sched.h

# Flags of mount(2), from linux/mount.h.
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_NOEXEC = 8
_MS_REMOUNT = 32
_MS_NOSYMFOLLOW = 256  # from Linux 5.10 on; earlier kernels ignore it
_MS_BIND = 4096
_MS_REC = 16384
_MS_SLAVE = 1 << 19

_CLOSED = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | _MS_NOSYMFOLLOW


def main(parent: int, directory: str, command: list[str]) -> None:
    """Ties this process to `parent` and becomes `command`; exits with status 127 where that cannot be started."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # the parent has ended already
        sys.exit(1)
    _close(libc, os.fsencode(directory))
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)  # noqa: T201
        sys.exit(127)


def _close(libc: ctypes.CDLL, directory: bytes) -> None:
    """Mount a directory over itself so that links and device nodes in it lead nowhere, in a mount namespace of this process.

    The caller has emptied the directory already. This protects against containers that can still write to it. So the daemon
    is started without it if this process may not mount.
    """
    if libc.unshare(_CLONE_NEWNS) != 0:
        return
    if libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None) != 0:
        return
    if libc.mount(directory, directory, None, ctypes.c_ulong(_MS_BIND), None) != 0:
        return
    read_only = os.statvfs(directory).f_flag & os.ST_RDONLY  # a remount drops it unless it repeats it
    flags = _MS_REMOUNT | _MS_BIND | _CLOSED | read_only
    libc.mount(None, directory, None, ctypes.c_ulong(flags), None)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
