"""Check the clock, on which times in logs and events depend, and the validity of certificates."""

import ctypes
import datetime as dt
import os
import struct
import time

from gpu_plugin.config.times import utc
from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, failed, ok, skipped, warning
from gpu_plugin.doctor.node import Node

# This program was written after the first of these times, and present certificates expire before the second
_EARLIEST = dt.datetime(2025, 1, 1, tzinfo=dt.UTC).timestamp()
_LATEST = dt.datetime(2100, 1, 1, tzinfo=dt.UTC).timestamp()

_UNSYNCHRONISED = 0x0040  # STA_UNSYNC (linux/timex.h)

# The first fields of struct timex of glibc (bits/timex.h): modes, offset, freq, maxerror, esterror, status
TIMEX = struct.Struct("I4li")
TIMEX_BYTES = 256  # more than the size of struct timex, which is 208 if a long has 8 bytes

_SYNC = "start the node's time service (chronyd, systemd-timesyncd, ntpd): `timedatectl` and `chronyc tracking` show its state"


@check("clock")
def clock(_: Node) -> Finding:
    """Fail if the year is impossible; warn if the kernel reports that no time service sets the clock."""
    now = time.time()
    if not _EARLIEST <= now < _LATEST:
        return failed(f"the clock says {utc(now)}: certificates and tokens of the cluster are not valid then", _SYNC)
    try:
        synchronised, may_be_off = kernel_clock()
    except OSError as error:
        return skipped(f"it is not known whether it is synchronised: {error.strerror}")
    if not synchronised:
        return warning("the kernel's clock is not synchronised", _SYNC)
    return ok(f"synchronised, within {may_be_off * 1000:.0f} ms")


def kernel_clock() -> tuple[bool, float]:
    """Return whether the kernel's clock is synchronised, and its greatest error in seconds (adjtimex(2)). Changes nothing.

    Raises OSError if the kernel cannot be asked.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    timex = ctypes.create_string_buffer(TIMEX_BYTES)
    if not hasattr(libc, "adjtimex"):
        raise OSError(None, "this system's C library cannot ask the kernel for it")
    if libc.adjtimex(timex) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"adjtimex: {os.strerror(number)}")
    *_, maxerror, _, status = TIMEX.unpack_from(timex)
    return not status & _UNSYNCHRONISED, maxerror / 1e6
