"""The section `sharing` of a config file: its keys, and its shared resources.

Keys, forms and rules are the same as in NVIDIA's plugin v0.20.0 (api/config/v1/sharing.go, replicas.go), with three differences:
`rename` and `devices` take effect, several entries may divide the devices of one resource, and contradictions are refused.
"""

from collections.abc import Collection, Iterator
from typing import Annotated

import msgspec

from gpu_plugin.config.device_names import LISTED, listed_device, resource_name
from gpu_plugin.config.document import Place, spell
from gpu_plugin.config.names import resource_name_fault
from gpu_plugin.config.schema import Reader, Rows
from gpu_plugin.config.sharing import MPS, TIME_SLICING, DeviceChoice, MpsLimits, SharedResource
from gpu_plugin.config.values import ItemError, Reading, boolean, read_items, reading

# The most devices in a list: a kubelet reads 4 MiB at most, and each device takes about 50 bytes at least.
MAX_REPLICAS = 4 * 1024 * 1024 // 50
# Clients of an MPS daemon on Volta and later GPUs (CUDA MPS documentation, "Volta MPS"). Older GPUs allow fewer.
MAX_MPS_REPLICAS = 48
MAX_ENTRIES = 1000  # under `sharing`; each entry is compared with all other entries of its resource


@reading(
    {
        "anyOf": [
            {"const": "all"},
            {"type": "integer", "minimum": 1},
            {"type": "array", "items": LISTED, "minItems": 1, "uniqueItems": True},
        ],
        "default": "all",
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
    listed = read_items(listed_device, written)
    first: dict[str, int] = {}
    for index, name in enumerate(listed):
        if first.setdefault(name, index) != index:
            raise ItemError(index, f"device {name} appears twice")
    return DeviceChoice(listed=listed)


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


_REPLICAS = "how many times each device is offered; 1: it is not shared"
_Single = Annotated[bool, boolean, "refuse a container that asks for more than one"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A resource, or some devices of it. The default of `devices` is None."""

    name: Annotated[str, resource_name, "the resource whose devices are shared; without a domain, one of nvidia.com/"]
    rename: Annotated[str, resource_name, "the resource that the shared devices are offered as"] = ""
    devices: Annotated[
        DeviceChoice | None,
        device_choice,
        "which devices: all that no other entry takes, how many, or a list of GPU indices, MIG indices, uuids",
    ] = None
    replicas: Annotated[
        int, _replicas(MAX_REPLICAS, "a longer list of devices than any kubelet reads (4 MiB)"), _REPLICAS
    ]


class MpsRow(Row, frozen=True, kw_only=True):
    """A resource, or some devices of it, with the limits of each client."""

    replicas: Annotated[int, _replicas(MAX_MPS_REPLICAS, "the most clients that an MPS daemon takes"), _REPLICAS]
    limits: Annotated[MpsLimits, "limits of each client, in place of equal shares"] = MpsLimits()


class TimeSlicing(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Devices offered several times."""

    rename_by_default: Annotated[bool, boolean, "offer shared devices as <name>.shared"] = False
    fail_requests_greater_than_one: _Single = False
    resources: Annotated[tuple[Row | None, ...], Rows(Row), "what is shared"]


class Mps(TimeSlicing, frozen=True, kw_only=True, rename="camel"):
    """GPUs shared through MPS."""

    fail_requests_greater_than_one: _Single = True
    resources: Annotated[tuple[MpsRow | None, ...], Rows(MpsRow), "what is shared"]


class Sharing(msgspec.Struct, frozen=True, rename="camel"):
    """Resources that several containers use at once."""

    time_slicing: Annotated[
        TimeSlicing, "devices offered several times; whoever gets one takes turns with the others"
    ] = TimeSlicing(resources=())
    mps: Annotated[Mps, "GPUs shared through CUDA's Multi-Process Service"] = Mps(resources=())

    def rows(self) -> Iterator[tuple[Place, str, TimeSlicing, Row]]:
        """Return the valid rows: the place, the strategy, the section and the row."""
        for key, strategy, section in (("timeSlicing", TIME_SLICING, self.time_slicing), ("mps", MPS, self.mps)):
            for index, row in enumerate(section.resources):
                if row is not None:
                    yield ("sharing", key, "resources", index), strategy, section, row


class _Entry(msgspec.Struct, frozen=True):
    place: Place
    line: int
    shared: SharedResource
    all_written: bool  # whether the file has `devices: all`
    devices: frozenset[str]  # the listed devices

    @property
    def where(self) -> str:
        """The place with its line."""
        return f"{spell(self.place)} (line {self.line})" if self.line else spell(self.place)


def shared_resources(reader: Reader, sharing: Sharing, mig_names: Collection[str]) -> tuple[SharedResource, ...]:
    """Return the shared resources of a section, and add faults for its contradictions.

    `mig_names` has the operator's resource names for MIG devices.
    """
    entries: list[_Entry] = []
    for place, strategy, section, row in sharing.rows():
        if len(entries) == MAX_ENTRIES:
            reader.fault(place, f"more than {MAX_ENTRIES} entries; no node has that number of devices to share")
            break
        shared = _shared(strategy, section, row)
        if fault := resource_name_fault(shared.offered_as):
            reader.fault(place, f"renamed by default, {fault}")
        if shared.strategy == MPS and (shared.name.partition("/")[2].startswith("mig-") or shared.name in mig_names):
            reader.fault((*place, "name"), "sharing using MPS is not supported for MIG devices")
        all_written = row.devices is not None and row.devices.everything
        entry = _Entry(place, reader.document.line(place), shared, all_written, frozenset(shared.devices.listed))
        contradictions = (_contradiction(other, entry) for other in entries)
        if contradiction := next(filter(None, contradictions), None):
            reader.fault(*contradiction)
        entries.append(entry)
    return tuple(entry.shared for entry in entries)


def _shared(strategy: str, section: TimeSlicing, row: Row) -> SharedResource:
    several = row.replicas > 1
    by_default = f"{row.name}.shared" if several and section.rename_by_default else row.name
    return SharedResource(
        name=row.name,
        offered_as=row.rename or by_default,
        replicas=row.replicas,
        strategy=strategy if several else TIME_SLICING,  # no MPS daemon is needed for devices that are not shared
        devices=row.devices or DeviceChoice(),
        single_requests=section.fail_requests_greater_than_one,
        limits=row.limits if isinstance(row, MpsRow) else MpsLimits(),
    )


def _contradiction(first: _Entry, second: _Entry) -> tuple[Place, str] | None:
    """Return the place and the reason if the second entry contradicts the first, else None."""
    one, other = first.shared, second.shared
    if one.strategy != other.strategy and 1 not in {one.replicas, other.replicas}:
        if one.name == other.name:
            reason = f"{one.name} is shared by {one.strategy} too, at {first.where}"
            return (*second.place, "name"), f"{reason}: a resource is shared by {TIME_SLICING} or {MPS}"
        if one.offered_as == other.offered_as:
            reason = f"{one.offered_as} is offered by {one.strategy} too, from {one.name} at {first.where}"
            return second.place, f"{reason}; rename one of them"
        return None
    same_daemon = one.strategy == other.strategy == MPS and one.offered_as == other.offered_as
    if same_daemon and (one.replicas, one.limits) != (other.replicas, other.limits):
        reason = f"{one.offered_as} has other replicas or limits at {first.where}"
        return second.place, f"{reason}: one MPS daemon has the same for all; rename one"
    if one.name != other.name:
        return None
    if one.devices.everything and other.devices.everything:
        return (*second.place, "name"), f"all devices of {one.name} are shared by the entry at {first.where} already"
    if first.all_written or second.all_written:
        reason = f"all devices of {one.name} are in one entry and some in another, at {first.where}"
        return (*second.place, "devices"), f"{reason}; leave out 'all' for the rest"
    for index, name in enumerate(() if first.devices.isdisjoint(second.devices) else other.devices.listed):
        if name in first.devices:
            return (
                *second.place,
                "devices",
                index,
            ), f"device {name} of {one.name} is in the entry at {first.where} already"
    return None
