"""Whether the clock is right: times in logs, events and certificates go by it."""

import datetime as dt

from gpu_plugin.config.times import utc
from gpu_plugin.doctor.check import Finding, check, failed, ok, seen, skipped, warning
from gpu_plugin.doctor.facts import Facts

EARLIEST = dt.datetime(2025, 1, 1, tzinfo=dt.UTC).timestamp()
LATEST = dt.datetime(2100, 1, 1, tzinfo=dt.UTC).timestamp()
"""This program is younger than the one, and no certificate that is in use lasts until the other."""

_SYNC = "start the node's time service (chronyd, systemd-timesyncd, ntpd): `timedatectl` and `chronyc tracking` say how it is"


@check("clock")
def clock(facts: Facts) -> Finding:
    """Fails where the year cannot be; warns where the kernel says that nobody sets the clock."""
    known = seen(facts.clock, "the clock")
    if not EARLIEST <= known.now < LATEST:
        return failed(
            f"the clock says {utc(known.now)}: certificates and tokens of the cluster do not hold then", _SYNC
        )
    if known.synchronised is None:
        return skipped(f"it is not known whether it is synchronised: {known.why}")
    if not known.synchronised:
        return warning("the kernel's clock is not synchronised", _SYNC)
    return ok(f"synchronised, within {known.may_be_off * 1000:.0f} ms")
