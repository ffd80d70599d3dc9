"""Schema v1 of the config file: NVIDIA's keys (api/config/v1/config.go, flags.go, resources.go) and some of our own.

The single values are the options of `settings.OPTIONS` with a key in the file.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

from gpu_plugin.config import values
from gpu_plugin.config.device_names import MAX_PATTERN, bounded_pattern
from gpu_plugin.config.document import Document
from gpu_plugin.config.errors import Fault
from gpu_plugin.config.health_section import HEALTH
from gpu_plugin.config.options import Option
from gpu_plugin.config.schema import Branch, Leaf, Node, Rows
from gpu_plugin.config.settings import OPTIONS
from gpu_plugin.config.sharing import NamePattern
from gpu_plugin.config.sharing_section import SHARING, resource_name
from gpu_plugin.config.values import reading

VERSION = "v1"

_PATTERNS = {"gpus": "whole GPUs by model", "mig": "MIG devices by profile"}


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


@reading({"type": "string", "pattern": rf"^[^\n\u0000]{{1,{MAX_PATTERN}}}$"})
def _pattern(written: object) -> str:
    if not values.text(written):
        raise ValueError("no pattern specified")
    return bounded_pattern(values.text(written))


def _names(of: str) -> Rows:
    row = Branch(
        {
            "pattern": Leaf(_pattern, '"*" stands for any text, all else for itself', missing="no pattern specified"),
            "name": Leaf(
                resource_name,
                "the resource; without a domain, one of nvidia.com/",
                missing="no resource name specified",
            ),
        }
    )
    return Rows(row, f"the resources of {of}; the first pattern that matches counts")


_FOREIGN: Mapping[str, Node] = {
    "useNodeFeatureAPI": Leaf(values.boolean, "read by gpu-feature-discovery"),
    "gfd": Branch(
        {
            key: Leaf(_single, "read by gpu-feature-discovery")
            for key in ("oneshot", "noTimestamp", "sleepInterval", "outputFile", "machineTypeFile")
        },
        "read by gpu-feature-discovery",
    ),
}

FOREIGN = (("flags", "useNodeFeatureAPI"), ("flags", "gfd"))
"""The places of other programs' values in the same file."""


def schema(options: Iterable[Option]) -> Branch:
    """Return the tree of the whole file. Raises LookupError if the section of an option does not exist."""
    plugin: dict[str, Node] = {}
    flags: dict[str, Node] = {}
    branches: dict[str, dict[str, Node]] = {"flags": flags, "flags.plugin": plugin, "imex": {}, "selection": {}}
    for option in options:
        branch, _, key = option.file.rpartition(".")
        if branch and branch not in branches:
            raise LookupError(
                f"the option {option.name!r} has a key in {branch} of the config file, and this section does not exist: "
                "add it to `schema` in gpu_plugin/config/schema_v1.py"
            )
        if branch:
            branches[branch][key] = Leaf(option.parse, option.help, option.default)
    return Branch(
        {
            "version": Leaf(_version, "version of this schema", VERSION),
            "flags": Branch(
                {**flags, "plugin": Branch(plugin, "of the device plugin only"), **_FOREIGN}, "what flags say as well"
            ),
            "resources": Branch(
                {key: _names(text) for key, text in _PATTERNS.items()}, "names of resources by pattern"
            ),
            "sharing": SHARING,
            "imex": Branch(branches["imex"], "IMEX channels"),
            "selection": Branch(branches["selection"], "which GPUs are served at all"),
            "health": HEALTH,
        },
        "Configuration of gpu-plugin: NVIDIA's schema v1, read strictly.",
    )


SCHEMA = schema(OPTIONS)


def name_patterns(
    document: Document, content: Mapping[str, object], key: str
) -> tuple[tuple[NamePattern, ...], list[Fault]]:
    """Return the patterns under resources.gpus or resources.mig of a document, and a fault for each repeated pattern."""
    faults: list[Fault] = []
    found: dict[str, NamePattern] = {}
    rows = cast("Mapping[str, Any]", content.get("resources", {})).get(key, ())
    for index, row in enumerate(rows):
        pattern = row.get("pattern", "")
        if pattern in found:
            reason = f"the pattern {pattern!r} is already listed above; the first that matches counts"
            faults.append(document.fault(("resources", key, index, "pattern"), reason))
        elif {"pattern", "name"} <= row.keys():
            found[pattern] = NamePattern(pattern, row["name"])
    return tuple(found.values()), faults
