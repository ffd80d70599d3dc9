"""The section `sharing` of a config file: its keys, and its shared resources.

Keys, forms and rules are the same as in NVIDIA's plugin v0.20.0 (api/config/v1/sharing.go, replicas.go), with three differences:
`rename` and `devices` take effect, several entries may divide the devices of one resource, and contradictions are refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gpu_plugin.config import values
from gpu_plugin.config.device_names import LISTED, listed_device
from gpu_plugin.config.document import Document, Place, spell
from gpu_plugin.config.errors import Fault
from gpu_plugin.config.names import resource_name_fault, whole_name
from gpu_plugin.config.schema import Branch, Leaf, Rows
from gpu_plugin.config.sharing import MPS, SECTIONS, TIME_SLICING, DeviceChoice, MpsLimits, SharedResource
from gpu_plugin.config.values import ItemError, Reading, reading

MAX_REPLICAS = 4 * 1024 * 1024 // 50
"""The most devices in a list. A kubelet reads 4 MiB at most, and each device takes about 50 bytes at least."""

MAX_MPS_REPLICAS = 48
"""Clients of an MPS daemon on Volta and later GPUs (CUDA MPS documentation, "Volta MPS"). Older GPUs allow fewer."""

MAX_ENTRIES = 1000
"""Entries under `sharing`. Each entry is compared with all other entries of its resource."""

_MEMORY = re.compile(r"(\d{1,9})([MG]i)", re.ASCII)
_MIB = {"Mi": 1, "Gi": 1024}


@reading({"type": "string", "minLength": 1})
def resource_name(written: object) -> str:
    """Read the name of a resource. A name without a domain gets nvidia.com/."""
    name = whole_name(values.text(written))
    fault = resource_name_fault(name)
    if fault:
        hint = "; the + of a MIG profile is written . in names" if "+" in name else ""
        raise ValueError(f"incorrect format for resource name {fault}{hint}")
    return name


@reading(
    {
        "anyOf": [
            {"const": "all"},
            {"type": "integer", "minimum": 1},
            {"type": "array", "items": LISTED, "minItems": 1, "uniqueItems": True},
        ]
    }
)
def device_choice(written: object) -> DeviceChoice:
    """Read the devices of an entry: "all", a number, or a list."""
    if isinstance(written, str):
        if written != "all":
            raise ValueError(f"devices set as {written!r} but the only valid string input is 'all'")
        return DeviceChoice()
    if isinstance(written, int) and not isinstance(written, bool):
        if written < 1:
            raise ValueError(f"devices set as '{written}' but a count of devices must be > 0")
        return DeviceChoice(count=written)
    if not isinstance(written, list | tuple):
        raise ValueError(f"unrecognized type for devices spec: {written!r} is neither 'all' nor a count nor a list")
    if not written:
        raise ValueError("devices set as an empty list: name some, or leave it out for all")
    listed: dict[str, None] = {}
    for index, item in enumerate(written):
        try:
            name = listed_device(item)
        except ValueError as error:
            raise ItemError(index, str(error)) from None
        if name in listed:
            raise ItemError(index, f"device {name} appears twice")
        listed[name] = None
    return DeviceChoice(listed=tuple(listed))


def _replicas(most: int, why: str) -> Reading[int]:
    @reading({"type": "integer", "minimum": 1, "maximum": most})
    def parse(written: object) -> int:
        if not isinstance(written, int) or isinstance(written, bool):
            raise ValueError(f"{written!r} is not a whole number")
        if written < 1:
            raise ValueError(f"number of replicas must be >= 1, not {written}")
        if written > most:
            raise ValueError(f"maximum allowed replicas exceeded: {written} > {most}, {why}")
        return written

    return parse


@reading({"type": "number", "minimum": 1, "maximum": 100})
def thread_percentage(written: object) -> float:
    """Read the percentage of a GPU's threads that a client may use."""
    if not isinstance(written, int | float) or isinstance(written, bool) or not 1 <= written <= 100:
        raise ValueError(f"{written!r} is not a percentage from 1 to 100")
    return float(written)


@reading({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^0*[1-9]\d{0,8}[MG]i$"}]})
def memory_mib(written: object) -> int:
    """Read an amount of memory in MiB, from text such as 8Gi or 8192Mi, or a number of MiB."""
    size = written if isinstance(written, int) and not isinstance(written, bool) else 0
    form = _MEMORY.fullmatch(written) if isinstance(written, str) else None
    if form:
        size = int(form[1]) * _MIB[form[2]]
    if size < 1:
        raise ValueError(f"{written!r} is not an amount of memory such as 8Gi, 8192Mi or 8192 (MiB)")
    return size


def _section(text: str, single: bool, replicas: Reading[int], more: Mapping[str, Branch]) -> Branch:  # noqa: FBT001
    row = Branch(
        {
            "name": Leaf(
                resource_name,
                "the resource whose devices are shared; without a domain, one of nvidia.com/",
                missing="no resource name specified",
            ),
            "rename": Leaf(resource_name, "the resource that the shared devices are offered as"),
            "devices": Leaf(
                device_choice,
                "which devices: all that no other entry takes, how many, or a list of GPU indices, MIG indices, uuids",
                "all",
            ),
            "replicas": Leaf(
                replicas, "how many times each device is offered; 1: it is not shared", missing="no replicas specified"
            ),
            **more,
        },
        "a resource, or some devices of it",
    )
    return Branch(
        {
            "renameByDefault": Leaf(values.boolean, "offer shared devices as <name>.shared", default=False),
            "failRequestsGreaterThanOne": Leaf(
                values.boolean, "refuse a container that asks for more than one", default=single
            ),
            "resources": Rows(row, "what is shared", missing="no resources specified"),
        },
        text,
    )


_LIMITS = Branch(
    {
        "activeThreadPercentage": Leaf(thread_percentage, "percent of a GPU's threads that each client may use"),
        "pinnedMemory": Leaf(memory_mib, "device memory that each client may use: 8Gi, 8192Mi, or a number of MiB"),
    },
    "limits of each client, in place of equal shares",
)

SHARING = Branch(
    {
        "timeSlicing": _section(
            "devices offered several times; whoever gets one takes turns with the others",
            False,
            _replicas(MAX_REPLICAS, "a longer list of devices than any kubelet reads (4 MiB)"),
            {},
        ),
        "mps": _section(
            "GPUs shared through CUDA's Multi-Process Service",
            True,
            _replicas(MAX_MPS_REPLICAS, "the most clients that an MPS daemon takes"),
            {"limits": _LIMITS},
        ),
    },
    "resources that several containers use at once",
)


class _Entry(msgspec.Struct, frozen=True):
    place: Place
    shared: SharedResource
    all_written: bool  # whether the file has `devices: all`
    devices: frozenset[str]  # the listed devices


def shared_resources(
    document: Document, sharing: Mapping[str, Any], mig_names: Sequence[str]
) -> tuple[tuple[SharedResource, ...], list[Fault]]:
    """Return the shared resources of a section, and its contradictions.

    Args:
        document: the document of the section.
        sharing: the section that `schema.Checked` has read by `SHARING`.
        mig_names: the operator's resource names for MIG devices.
    """
    faults: list[Fault] = []
    entries: list[_Entry] = []
    for entry in _entries(document, sharing, faults):
        if len(entries) == MAX_ENTRIES:
            faults.append(
                document.fault(
                    entry.place, f"more than {MAX_ENTRIES} entries; no node has that number of devices to share"
                )
            )
            break
        name, place = entry.shared.name, entry.place
        if entry.shared.strategy == MPS and (name.partition("/")[2].startswith("mig-") or name in mig_names):
            faults.append(document.fault((*place, "name"), "sharing using MPS is not supported for MIG devices"))
        fault = next(filter(None, (_contradiction(document, other, entry) for other in entries)), None)
        if fault:
            faults.append(fault)
        entries.append(entry)
    return tuple(entry.shared for entry in entries), faults


def _entries(document: Document, sharing: Mapping[str, Any], faults: list[Fault]) -> Iterator[_Entry]:
    """Return the entries that have both name and replicas, so that they can be compared."""
    for key, strategy in SECTIONS.items():
        section = sharing.get(key, {})
        single = section.get("failRequestsGreaterThanOne", strategy == MPS)
        for index, row in enumerate(section.get("resources", ())):
            if not {"name", "replicas"} <= row.keys():
                continue
            place = ("sharing", key, "resources", index)
            name = row["name"]
            several = row["replicas"] > 1
            by_default = f"{name}.shared" if several and section.get("renameByDefault") else name
            offered = row.get("rename") or by_default
            fault = resource_name_fault(offered)
            if fault:
                faults.append(document.fault(place, f"renamed by default, {fault}"))
            shared = SharedResource(
                name=name,
                offered_as=offered,
                replicas=row["replicas"],
                strategy=strategy
                if several
                else TIME_SLICING,  # no MPS daemon is needed for devices that are not shared
                devices=row.get("devices", DeviceChoice()),
                single_requests=single,
                limits=msgspec.convert(row.get("limits", {}), MpsLimits),
            )
            all_written = "devices" in row and shared.devices.everything
            yield _Entry(place, shared, all_written, frozenset(shared.devices.listed))


def _contradiction(document: Document, first: _Entry, second: _Entry) -> Fault | None:
    """Return the contradiction between two entries as a fault of the second entry; None without a contradiction."""
    one, other = first.shared, second.shared

    def there() -> str:
        line = document.line(first.place)
        return f"{spell(first.place)} (line {line})" if line else spell(first.place)

    if one.strategy != other.strategy and 1 not in {one.replicas, other.replicas}:
        if one.name == other.name:
            reason = f"{one.name} is shared by {one.strategy} too, at {there()}: a resource is shared by {TIME_SLICING} or {MPS}"
            return document.fault((*second.place, "name"), reason)
        if one.offered_as == other.offered_as:
            reason = (
                f"{one.offered_as} is offered by {one.strategy} too, from {one.name} at {there()}; rename one of them"
            )
            return document.fault(second.place, reason)
        return None
    same_daemon = one.strategy == other.strategy == MPS and one.offered_as == other.offered_as
    if same_daemon and (one.replicas, one.limits) != (other.replicas, other.limits):
        reason = f"{one.offered_as} has other replicas or limits at {there()}: one MPS daemon has the same for all; rename one"
        return document.fault(second.place, reason)
    if one.name != other.name:
        return None
    if one.devices.everything and other.devices.everything:
        return document.fault(
            (*second.place, "name"), f"all devices of {one.name} are shared by the entry at {there()} already"
        )
    if first.all_written or second.all_written:
        reason = f"all devices of {one.name} are in one entry and some in another, at {there()}; leave out 'all' for the rest"
        return document.fault((*second.place, "devices"), reason)
    for index, name in enumerate(() if first.devices.isdisjoint(second.devices) else other.devices.listed):
        if name in first.devices:
            reason = f"device {name} of {one.name} is in the entry at {there()} already"
            return document.fault((*second.place, "devices", index), reason)
    return None
