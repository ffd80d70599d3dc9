"""Schema v1 of the config file: NVIDIA's keys (api/config/v1/config.go, flags.go, resources.go) and some of our own."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from gpu_plugin.config.choices import HEALTH_SIGNALS
from gpu_plugin.config.schema import Reader, Rows, Table
from gpu_plugin.config.sharing import NamePattern, Verdicts
from gpu_plugin.config.sharing_section import Sharing
from gpu_plugin.config.values import Reading, boolean, choice, reading

VERSION = "v1"

# The places of values for gpu-feature-discovery in the same file, and their help
FOREIGN = (("flags", "useNodeFeatureAPI"), ("flags", "gfd"))
_THEIRS = "read by gpu-feature-discovery"

# Verdicts on an Xid: only counted, an error of an application, a warning, or the GPU is unfit for use. Health signals have no
# verdict "app".
XID_VERDICTS = ("ignore", "app", "degraded", "fatal")
SIGNAL_VERDICTS = ("ignore", "degraded", "fatal")

# Classes of Xids, by the proof that an Xid is over
XID_CLASSES: Mapping[str, str] = {
    "application": "Xids that are over after ten minutes without another: applications' own errors",
    "quiet": "Xids that are over after a day without another, or a reset",
    "reset": "Xids that a reset of the GPU ends",
    "reboot": "Xids that a boot of the node ends, or rebinding the GPU",
    "rma": "Xids after which the part is to be serviced",
}

MAX_XID = 2**32 - 1  # an Xid has 32 bits in the driver's log and in its events


@reading({"enum": [VERSION, ""]})
def _version(written: object) -> str:
    if written not in (VERSION, ""):
        raise ValueError(f"unknown version {written!r}; this plugin reads {VERSION}")
    return VERSION


@reading({"type": ["string", "number", "boolean"]})
def _single(written: object) -> object:
    """Read a value of another program."""
    if not isinstance(written, str | int | float | bool):
        raise ValueError(f"{written!r} is not a single value")
    return written


@reading({"pattern": r"^(0|[1-9]\d{0,9})$"})
def xid_number(written: object) -> int:
    """Read the number of an Xid from a key."""
    text = str(written)
    if not (text.isascii() and text.isdigit() and text == str(int(text[:20])) and int(text) <= MAX_XID):
        raise ValueError("unknown key; an Xid is a number such as 79")
    return int(text)


_GFD = ("oneshot", "noTimestamp", "sleepInterval", "outputFile", "machineTypeFile")
Gfd = msgspec.defstruct("Gfd", [(key, Annotated[object, _single, _THEIRS], None) for key in _GFD], frozen=True)


class Options(msgspec.Struct, frozen=True):
    """A section whose keys are options."""


class Flags(msgspec.Struct, frozen=True):
    """Options, and values of gpu-feature-discovery."""

    plugin: Annotated[Options, "of the device plugin only"] = Options()
    use_node_feature_api: Annotated[bool | None, boolean, _THEIRS] = msgspec.field(
        name="useNodeFeatureAPI", default=None
    )
    gfd: Annotated[msgspec.Struct, Gfd, _THEIRS] = Gfd()


Patterns = tuple[NamePattern | None, ...]


class Resources(msgspec.Struct, frozen=True):
    """Resource names by pattern. The first matching pattern counts."""

    gpus: Annotated[
        Patterns, Rows(NamePattern), "the resources of whole GPUs by model; the first pattern that matches counts"
    ] = ()
    mig: Annotated[
        Patterns, Rows(NamePattern), "the resources of MIG devices by profile; the first pattern that matches counts"
    ] = ()


def _words(name: str, about: Mapping[str, str], verdict: Reading[str]) -> type[msgspec.Struct]:
    """Return a section with a verdict for each name with a description."""
    fields = [(key.replace("-", "_"), Annotated[str, verdict, text], "") for key, text in about.items() if text]
    return msgspec.defstruct(name, fields, rename="kebab", omit_defaults=True, frozen=True)


_on_xids = choice(*XID_VERDICTS)
XidClasses = _words("XidClasses", XID_CLASSES, _on_xids)
Signals = _words("Signals", HEALTH_SIGNALS, choice(*SIGNAL_VERDICTS))


class Health(msgspec.Struct, frozen=True, rename="camel"):
    """Verdicts on Xids by number, on other Xids by class, and on health signals. They replace the default verdicts."""

    xid: Annotated[Mapping[int, str], Table(xid_number, _on_xids), "what Xids mean, by number"] = {}
    xid_class: Annotated[
        msgspec.Struct,
        XidClasses,
        "what Xids mean that have no number of their own here, by what proves that one is over",
    ] = XidClasses()
    signals: Annotated[msgspec.Struct, Signals, "what health signals mean while they are open"] = Signals()

    def verdicts(self) -> Verdicts:
        """Return the verdicts in a stable order."""
        classes, signals = msgspec.to_builtins(self.xid_class), msgspec.to_builtins(self.signals)
        return Verdicts(dict(sorted(self.xid.items())), dict(sorted(classes.items())), dict(sorted(signals.items())))


class File(msgspec.Struct, frozen=True):
    """A config file."""

    version: Annotated[str, _version, "version of this schema"] = VERSION
    flags: Annotated[Flags, "what flags say as well"] = Flags()
    resources: Annotated[Resources, "names of resources by pattern"] = Resources()
    sharing: Annotated[Sharing, "resources that several containers use at once"] = Sharing()
    imex: Annotated[Options, "IMEX channels"] = Options()
    selection: Annotated[Options, "which GPUs are served at all"] = Options()
    health: Annotated[Health, "what counts against a GPU: ignore, app (for Xids only), degraded or fatal"] = Health()


def name_patterns(reader: Reader, key: str, rows: Patterns) -> Sequence[NamePattern]:
    """Return the patterns under resources.gpus or resources.mig, and add a fault for each repeated pattern."""
    found: dict[str, NamePattern] = {}
    for index, row in enumerate(rows):
        if row is not None and found.setdefault(row.pattern, row) is not row:
            reason = f"the pattern {row.pattern!r} is already listed above; the first that matches counts"
            reader.fault(("resources", key, index, "pattern"), reason)
    return tuple(found.values())
