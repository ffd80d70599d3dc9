"""Becomes another program that is killed when its parent ends, however that ends: `tether.py PARENT PROGRAM ARGUMENT...`.

A program of its own, run by its path: what a fork may do before it becomes another program, in a process that has threads, is
too little for this.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2), linux/prctl.h


def main(parent: int, command: list[str]) -> None:
    """Ties this process to `parent` and becomes `command`; exits with status 127 where that cannot be started."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before it could be told
        sys.exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)  # noqa: T201
        sys.exit(127)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
