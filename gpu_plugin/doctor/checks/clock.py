"""Check the clock, on which times in logs and events depend, and the validity of certificates."""

import ctypes
import datetime as dt
import os
import struct
import time

import msgspec

from gpu_plugin.config.times import utc
from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, failed, ok, seen, skipped, warning
from gpu_plugin.doctor.node import Node

# This program was written after the first of these times, and present certificates expire before the second
_EARLIEST = dt.datetime(2025, 1, 1, tzinfo=dt.UTC).timestamp()
_LATEST = dt.datetime(2100, 1, 1, tzinfo=dt.UTC).timestamp()

_UNSYNCHRONISED = 0x0040  # STA_UNSYNC (linux/timex.h)

# The first fields of struct timex of glibc (bits/timex.h): modes, offset, freq, maxerror, esterror, status
TIMEX = struct.Struct("I4li")
TIMEX_BYTES = 256  # more than the size of struct timex, which is 208 if a long has 8 bytes

_SYNC = "start the node's time service (chronyd, systemd-timesyncd, ntpd): `timedatectl` and `chronyc tracking` show its state"


class Clock(msgspec.Struct, frozen=True):
    """The system's clock: Unix time in seconds, and the kernel's state of it (adjtimex(2)).

    `synchronised` is None if unknown; then `why` is the reason. `may_be_off` is in seconds.
    """

    now: float
    synchronised: bool | None = None
    may_be_off: float = 0.0
    why: str = ""


def read_clock() -> Clock:
    """Return the present state of the clock. It changes nothing, and needs no capability."""
    now = time.time()
    libc = ctypes.CDLL(None, use_errno=True)
    timex = ctypes.create_string_buffer(TIMEX_BYTES)
    if not hasattr(libc, "adjtimex"):
        return Clock(now, why="this system's C library cannot ask the kernel for it")
    if libc.adjtimex(timex) < 0:
        return Clock(now, why=f"adjtimex: {os.strerror(ctypes.get_errno())}")
    *_, maxerror, _, status = TIMEX.unpack_from(timex)
    return Clock(now, not status & _UNSYNCHRONISED, maxerror / 1e6)


@check("clock")
def clock(node: Node) -> Finding:
    """Fail if the year is impossible; warn if the kernel reports that no time service sets the clock."""
    known = seen(node.known("clock", read_clock), "the clock")
    if not _EARLIEST <= known.now < _LATEST:
        return failed(
            f"the clock says {utc(known.now)}: certificates and tokens of the cluster are not valid then", _SYNC
        )
    if known.synchronised is None:
        return skipped(f"it is not known whether it is synchronised: {known.why}")
    if not known.synchronised:
        return warning("the kernel's clock is not synchronised", _SYNC)
    return ok(f"synchronised, within {known.may_be_off * 1000:.0f} ms")
