"""The kernel's state of its clock (adjtimex(2)). Reading it changes nothing, and needs no capability."""

import ctypes
import os
import struct
import time

from gpu_plugin.doctor.facts import Clock

_UNSYNCHRONISED = 0x0040
"""STA_UNSYNC (linux/timex.h)."""


_TIMEX = struct.Struct("I4li")
"""The first fields of struct timex of glibc (bits/timex.h): modes, offset, freq, maxerror, esterror, status."""

_TIMEX_BYTES = 256
"""More than the size of struct timex, which is 208 if a long has 8 bytes."""


def clock() -> Clock:
    """Return the present state of the clock."""
    now = time.time()
    libc = ctypes.CDLL(None, use_errno=True)
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    if not hasattr(libc, "adjtimex"):
        return Clock(now, why="this system's C library cannot ask the kernel for it")
    if libc.adjtimex(timex) < 0:
        return Clock(now, why=f"adjtimex: {os.strerror(ctypes.get_errno())}")
    *_, maxerror, _, status = _TIMEX.unpack_from(timex)
    return Clock(now, not status & _UNSYNCHRONISED, maxerror / 1e6)
