"""The operator's own verdicts, as the config file says them: words by Xid, by class of Xids and by health signal."""

import msgspec

XID_VERDICTS = ("ignore", "app", "degraded", "fatal")
"""What an Xid may be said to mean: counted only, an application's error, worth a look, or unfit for use."""

SIGNAL_VERDICTS = ("ignore", "degraded", "fatal")

XID_CLASSES = ("application", "quiet", "reset", "reboot", "rma")
"""Classes of Xids, by what proves that one is over."""

SIGNALS = (
    "unanswered",
    "temperature",
    "slowdown-temperature",
    "margin",
    "hw-slowdown",
    "ecc-uncorrected",
    "sram-threshold",
    "remap-pending",
    "remap-failure",
    "retired-pages",
    "unrepairable-memory",
    "driver-event",
    "recovery-action",
    "nvlink",
    "nvlink-errors",
    "fabric",
    "pcie-width",
    "pcie-errors",
    "events",
    "application-errors",
    "flapping",
)
"""Health signals that an operator may judge otherwise. Xids have keys of their own; who is lost or hung cannot be served."""

MAX_XID = 2**32 - 1
"""The largest number that an Xid can have: the driver's log and its events have 32 bits for it."""


class Verdicts(msgspec.Struct, frozen=True):
    """Words of `XID_VERDICTS` by Xid and by one of `XID_CLASSES`, and of `SIGNAL_VERDICTS` by one of `SIGNALS`."""

    xids: tuple[tuple[int, str], ...] = ()
    xid_classes: tuple[tuple[str, str], ...] = ()
    signals: tuple[tuple[str, str], ...] = ()
