"""The operator's own verdicts, as the config file says them: words by Xid, by class of Xids and by health signal."""

from collections.abc import Mapping

import msgspec

XID_VERDICTS = ("ignore", "app", "degraded", "fatal")
"""What an Xid may be said to mean: counted only, an application's error, worth a look, or unfit for use."""

SIGNAL_VERDICTS = ("ignore", "degraded", "fatal")

XID_CLASSES: Mapping[str, str] = {
    "application": "Xids that are over after ten minutes without another: applications' own errors",
    "quiet": "Xids that are over after a day without another, or a reset",
    "reset": "Xids that a reset of the GPU ends",
    "reboot": "Xids that a boot of the node ends, or rebinding the GPU",
    "rma": "Xids after which the part is to be serviced",
}
"""Classes of Xids, by what proves that one is over."""

MAX_XID = 2**32 - 1
"""The largest number that an Xid can have: the driver's log and its events have 32 bits for it."""


class Verdicts(msgspec.Struct, frozen=True):
    """Words of `XID_VERDICTS` by Xid and by one of `XID_CLASSES`, and of `SIGNAL_VERDICTS` by health signal."""

    xids: tuple[tuple[int, str], ...] = ()
    xid_classes: tuple[tuple[str, str], ...] = ()
    signals: tuple[tuple[str, str], ...] = ()
