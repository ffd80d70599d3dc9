"""Schema v1 of the config file: NVIDIA's keys (api/config/v1/config.go, flags.go, resources.go) and some of our own."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from gpu_plugin.config.document import Document
from gpu_plugin.config.errors import Fault
from gpu_plugin.config.health_section import Health
from gpu_plugin.config.sharing import NamePattern
from gpu_plugin.config.sharing_section import Sharing
from gpu_plugin.config.values import Doc, Rows, boolean, reading

VERSION = "v1"

FOREIGN = (("flags", "useNodeFeatureAPI"), ("flags", "gfd"))
"""The places of values for gpu-feature-discovery in the same file."""

_theirs = Doc("read by gpu-feature-discovery")


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


_GFD = ("oneshot", "noTimestamp", "sleepInterval", "outputFile", "machineTypeFile")
Gfd = msgspec.defstruct("Gfd", [(key, Annotated[object, _single, _theirs], None) for key in _GFD], frozen=True)


class Options(msgspec.Struct, frozen=True):
    """A section whose keys are options."""


class Flags(msgspec.Struct, frozen=True):
    """Options, and values of gpu-feature-discovery."""

    plugin: Annotated[Options, Doc("of the device plugin only")] = Options()
    use_node_feature_api: Annotated[bool, boolean, _theirs] = msgspec.field(name="useNodeFeatureAPI", default=False)
    gfd: Annotated[msgspec.Struct, Gfd, _theirs] = Gfd()


class Resources(msgspec.Struct, frozen=True):
    """Resource names by pattern. The first matching pattern counts."""

    gpus: Annotated[
        tuple[NamePattern | None, ...],
        Rows(NamePattern),
        Doc("the resources of whole GPUs by model; the first pattern that matches counts"),
    ] = ()
    mig: Annotated[
        tuple[NamePattern | None, ...],
        Rows(NamePattern),
        Doc("the resources of MIG devices by profile; the first pattern that matches counts"),
    ] = ()


class File(msgspec.Struct, frozen=True):
    """A config file."""

    version: Annotated[str, _version, Doc("version of this schema", VERSION)] = VERSION
    flags: Annotated[Flags, Doc("what flags say as well")] = Flags()
    resources: Annotated[Resources, Doc("names of resources by pattern")] = Resources()
    sharing: Annotated[Sharing, Doc("resources that several containers use at once")] = Sharing()
    imex: Annotated[Options, Doc("IMEX channels")] = Options()
    selection: Annotated[Options, Doc("which GPUs are served at all")] = Options()
    health: Annotated[Health, Doc("what counts against a GPU: ignore, app (for Xids only), degraded or fatal")] = (
        Health()
    )


def name_patterns(
    document: Document, key: str, rows: Sequence[NamePattern | None]
) -> tuple[tuple[NamePattern, ...], list[Fault]]:
    """Return the patterns under resources.gpus or resources.mig of a document, and a fault for each repeated pattern."""
    faults: list[Fault] = []
    found: dict[str, NamePattern] = {}
    for index, row in enumerate(rows):
        if row is not None and found.setdefault(row.pattern, row) is not row:
            reason = f"the pattern {row.pattern!r} is already listed above; the first that matches counts"
            faults.append(document.fault(("resources", key, index, "pattern"), reason))
    return tuple(found.values()), faults
