"""Check the clock, on which times in logs and events depend, and the validity of certificates."""

import datetime as dt

from gpu_plugin.config.times import utc
from gpu_plugin.doctor.check import Finding, check, failed, ok, seen, skipped, warning
from gpu_plugin.doctor.facts import Facts

EARLIEST = dt.datetime(2025, 1, 1, tzinfo=dt.UTC).timestamp()
LATEST = dt.datetime(2100, 1, 1, tzinfo=dt.UTC).timestamp()
"""Plausible times: this program was written after `EARLIEST`, and present certificates expire before `LATEST`."""

_SYNC = "start the node's time service (chronyd, systemd-timesyncd, ntpd): `timedatectl` and `chronyc tracking` show its state"


@check("clock")
def clock(facts: Facts) -> Finding:
    """Fail if the year is impossible; warn if the kernel reports that no time service sets the clock."""
    known = seen(facts.clock, "the clock")
    if not EARLIEST <= known.now < LATEST:
        return failed(
            f"the clock says {utc(known.now)}: certificates and tokens of the cluster are not valid then", _SYNC
        )
    if known.synchronised is None:
        return skipped(f"it is not known whether it is synchronised: {known.why}")
    if not known.synchronised:
        return warning("the kernel's clock is not synchronised", _SYNC)
    return ok(f"synchronised, within {known.may_be_off * 1000:.0f} ms")
