"""The operator's own verdicts, as the config file says them: words by Xid, by class of Xids and by health signal."""

import msgspec

XID_VERDICTS = ("ignore", "app", "degraded", "fatal")
"""What an Xid may be said to mean: counted only, an application's error, worth a look, or unfit for use."""

SIGNAL_VERDICTS = ("ignore", "degraded", "fatal")

XID_CLASSES = ("application", "quiet", "reset", "reboot", "rma")
"""Classes of Xids, by what proves that one is over."""

MAX_XID = 2**32 - 1
"""The largest number that an Xid can have: the driver's log and its events have 32 bits for it."""


class Verdicts(msgspec.Struct, frozen=True):
    """Words of `XID_VERDICTS` by Xid and by one of `XID_CLASSES`, and of `SIGNAL_VERDICTS` by health signal."""

    xids: tuple[tuple[int, str], ...] = ()
    xid_classes: tuple[tuple[str, str], ...] = ()
    signals: tuple[tuple[str, str], ...] = ()
