"""The section `health` of a config file: verdicts on Xids and health signals that replace the default verdicts."""

from collections.abc import Mapping
from typing import Any

from gpu_plugin.config import values
from gpu_plugin.config.choices import HEALTH_SIGNALS
from gpu_plugin.config.schema import Branch, Leaf, Table
from gpu_plugin.config.sharing import Verdicts
from gpu_plugin.config.values import reading

XID_VERDICTS = ("ignore", "app", "degraded", "fatal")
"""Verdicts on an Xid: only counted, an error of an application, a warning, or the GPU is unfit for use."""

SIGNAL_VERDICTS = ("ignore", "degraded", "fatal")

XID_CLASSES: Mapping[str, str] = {
    "application": "Xids that are over after ten minutes without another: applications' own errors",
    "quiet": "Xids that are over after a day without another, or a reset",
    "reset": "Xids that a reset of the GPU ends",
    "reboot": "Xids that a boot of the node ends, or rebinding the GPU",
    "rma": "Xids after which the part is to be serviced",
}
"""Classes of Xids, by the proof that an Xid is over."""

MAX_XID = 2**32 - 1
"""The largest number of an Xid: it has 32 bits in the driver's log and in its events."""


@reading({"pattern": r"^(0|[1-9]\d{0,9})$"})
def xid(written: object) -> int:
    """Read the number of an Xid from a key."""
    text = str(written)
    if not (text.isascii() and text.isdigit() and text == str(int(text[:20])) and int(text) <= MAX_XID):
        raise ValueError("unknown key; an Xid is a number such as 79")
    return int(text)


HEALTH = Branch(
    {
        "xid": Table(xid, Leaf(values.choice(*XID_VERDICTS)), "what Xids mean, by number"),
        "xidClass": Branch(
            {name: Leaf(values.choice(*XID_VERDICTS), text) for name, text in XID_CLASSES.items()},
            "what Xids mean that have no number of their own here, by what proves that one is over",
        ),
        "signals": Branch(
            {name: Leaf(values.choice(*SIGNAL_VERDICTS), about) for name, about in HEALTH_SIGNALS.items() if about},
            "what health signals mean while they are open",
        ),
    },
    "what counts against a GPU: ignore, app (for Xids only), degraded or fatal",
)


def verdicts(health: Mapping[str, Any]) -> Verdicts:
    """Return the verdicts of a section that `schema.Checked` has read by `HEALTH`, in a stable order."""
    return Verdicts(
        tuple(sorted(health.get("xid", {}).items())),
        tuple(sorted(health.get("xidClass", {}).items())),
        tuple(sorted(health.get("signals", {}).items())),
    )
