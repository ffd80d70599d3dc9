"""The section `health` of a config file: verdicts on Xids and health signals that replace the default verdicts."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from gpu_plugin.config.choices import HEALTH_SIGNALS
from gpu_plugin.config.sharing import Verdicts
from gpu_plugin.config.values import Doc, Reading, Table, choice, reading

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

MAX_XID = 2**32 - 1  # an Xid has 32 bits in the driver's log and in its events


@reading({"pattern": r"^(0|[1-9]\d{0,9})$"})
def xid_number(written: object) -> int:
    """Read the number of an Xid from a key."""
    text = str(written)
    if not (text.isascii() and text.isdigit() and text == str(int(text[:20])) and int(text) <= MAX_XID):
        raise ValueError("unknown key; an Xid is a number such as 79")
    return int(text)


def _words(name: str, about: Mapping[str, str], verdict: Reading[str]) -> type[msgspec.Struct]:
    """Return a section with a verdict for each name with a description."""
    fields = [(key.replace("-", "_"), Annotated[str, verdict, Doc(text)], "") for key, text in about.items() if text]
    return msgspec.defstruct(name, fields, rename="kebab", omit_defaults=True, frozen=True)


_on_xids = choice(*XID_VERDICTS)
XidClasses = _words("XidClasses", XID_CLASSES, _on_xids)
Signals = _words("Signals", HEALTH_SIGNALS, choice(*SIGNAL_VERDICTS))


class Health(msgspec.Struct, frozen=True, rename="camel"):
    """Verdicts on Xids by number, on other Xids by class, and on health signals."""

    xid: Annotated[Mapping[int, str], Table(xid_number, _on_xids), Doc("what Xids mean, by number")] = {}
    xid_class: Annotated[
        msgspec.Struct,
        XidClasses,
        Doc("what Xids mean that have no number of their own here, by what proves that one is over"),
    ] = XidClasses()
    signals: Annotated[msgspec.Struct, Signals, Doc("what health signals mean while they are open")] = Signals()


def verdicts(health: Health) -> Verdicts:
    """Return the verdicts of a section in a stable order."""
    classes, signals = (sorted(msgspec.to_builtins(each).items()) for each in (health.xid_class, health.signals))
    return Verdicts(tuple(sorted(health.xid.items())), tuple(classes), tuple(signals))
