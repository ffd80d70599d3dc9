"""The section `health` of a config file: what Xids and health signals mean instead of what they mean by default."""

from collections.abc import Mapping
from typing import Any

from gpu_plugin.config import values
from gpu_plugin.config.choices import HEALTH_SIGNALS
from gpu_plugin.config.schema import Branch, Leaf, Table
from gpu_plugin.config.values import reading
from gpu_plugin.config.verdicts import MAX_XID, SIGNAL_VERDICTS, XID_CLASSES, XID_VERDICTS, Verdicts


@reading({"pattern": r"^(0|[1-9]\d{0,9})$"})
def xid(written: object) -> int:
    """The number of an Xid, as a key."""
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
    """What the section asks for, as `schema.Checked` read it by `HEALTH`; in a stable order."""
    return Verdicts(
        tuple(sorted(health.get("xid", {}).items())),
        tuple(sorted(health.get("xidClass", {}).items())),
        tuple(sorted(health.get("signals", {}).items())),
    )
