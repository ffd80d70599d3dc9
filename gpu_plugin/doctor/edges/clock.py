"""What the kernel says of its clock (adjtimex(2)). Asking changes nothing, and takes no right."""

import ctypes
import os
import struct
import time

from gpu_plugin.doctor.facts import Clock

_UNSYNCHRONISED = 0x0040
"""STA_UNSYNC (linux/timex.h)."""


_TIMEX = struct.Struct("I4li")
"""How struct timex of glibc begins (bits/timex.h): modes, offset, freq, maxerror, esterror, status."""

_TIMEX_BYTES = 256
"""More than all of it takes: 208, where a long has 8."""


def clock() -> Clock:
    """The clock as it is now."""
    now = time.time()
    libc = ctypes.CDLL(None, use_errno=True)
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    if not hasattr(libc, "adjtimex"):
        return Clock(now, why="this system's C library cannot ask the kernel for it")
    if libc.adjtimex(timex) < 0:
        return Clock(now, why=f"adjtimex: {os.strerror(ctypes.get_errno())}")
    *_, maxerror, _, status = _TIMEX.unpack_from(timex)
    return Clock(now, not status & _UNSYNCHRONISED, maxerror / 1e6)
