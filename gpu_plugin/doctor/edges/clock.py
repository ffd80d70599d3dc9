"""What the kernel says of its clock (adjtimex(2)). Asking changes nothing, and takes no right."""

import ctypes
import os
import time

from gpu_plugin.doctor.facts import Clock

_UNSYNCHRONISED = 0x0040
"""STA_UNSYNC (linux/timex.h)."""


class _Timex(ctypes.Structure):
    """struct timex as glibc has it (bits/timex.h)."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("time", ctypes.c_long * 2),
        ("tick", ctypes.c_long),
        ("ppsfreq", ctypes.c_long),
        ("jitter", ctypes.c_long),
        ("shift", ctypes.c_int),
        ("stabil", ctypes.c_long),
        ("jitcnt", ctypes.c_long),
        ("calcnt", ctypes.c_long),
        ("errcnt", ctypes.c_long),
        ("stbcnt", ctypes.c_long),
        ("tai", ctypes.c_int),
        ("reserved", ctypes.c_int * 11),
    )


def clock() -> Clock:
    """The clock as it is now."""
    now = time.time()
    libc = ctypes.CDLL(None, use_errno=True)
    asked = _Timex()
    if not hasattr(libc, "adjtimex"):
        return Clock(now, why="this system's C library cannot ask the kernel for it")
    if libc.adjtimex(ctypes.byref(asked)) < 0:
        return Clock(now, why=f"adjtimex: {os.strerror(ctypes.get_errno())}")
    return Clock(now, not asked.status & _UNSYNCHRONISED, asked.maxerror / 1e6)
