"""Convert the record of devices to devices. Entries are checked separately: only damaged entries are dropped. No I/O."""

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from gpu_plugin.config.names import resource_name_fault
from gpu_plugin.config.sharing import SharedResource
from gpu_plugin.config.words import shortened
from gpu_plugin.devices.device import GPU, MAX_NUMA_NODE, MIG, Device, Resource, device_id_fault
from gpu_plugin.devices.sharing import REPLICA
from gpu_plugin.state.records import ListedDevice, WrittenDevices

_MAX_SHOWN = 80  # limit in characters for a text of the record in a message


class Remembered(msgspec.Struct, frozen=True):
    """Devices that an earlier process listed, and devices that pods held under names that it did not list.

    `foreign` also has the devices of damaged entries if their hardware is known: they cannot be listed, but a pod may hold the
    hardware. `faults` has a sentence for each damaged entry.
    """

    listed: tuple[Resource, ...] = ()
    foreign: tuple[Resource, ...] = ()
    faults: tuple[str, ...] = ()


def remembered(written: WrittenDevices) -> Remembered:
    """Return the devices in the record."""
    faults: list[str] = []
    foreign = {name: _read(name, raw, faults, foreign=True)[0] for name, raw in written.foreign.items()}
    listed = {}
    for name, raw in written.resources.items():
        listed[name], unlisted = _read(name, raw, faults)
        if unlisted:
            foreign[name] = {**unlisted, **foreign.get(name, {})}
    return Remembered(_resources(listed), _resources(foreign), tuple(faults))


def _resources(devices: Mapping[str, Mapping[str, Device]]) -> tuple[Resource, ...]:
    return tuple(
        Resource(name, tuple(of.values())) for name, of in devices.items() if of and not resource_name_fault(name)
    )


def _read(
    name: str, raw: msgspec.Raw, faults: list[str], *, foreign: bool = False
) -> tuple[dict[str, Device], dict[str, Device]]:
    """Return the devices of a resource by id, and the devices that cannot be listed. A foreign device may have any id."""
    found: dict[str, Device] = {}
    unlisted: dict[str, Device] = {}
    shown_name = _shown(name)
    if fault := resource_name_fault(name):
        faults.append(f"the resource {shown_name} is left out: {shortened(fault, 3 * _MAX_SHOWN)}")
        return found, unlisted
    try:
        entries = msgspec.json.decode(raw, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        faults.append(f"the devices of {shown_name} are left out: {error}")
        return found, unlisted
    for place, entry in enumerate(entries):
        try:
            known = _DECODER.decode(entry)
            fault = _fault(known, foreign=foreign)
        except (msgspec.MsgspecError, RecursionError) as error:
            known, fault = _readable_names(entry), str(error)
        if fault:
            faults.append(f"entry {place} of {shown_name} ({_shown(known.id)}) is left out: {fault}")
            if device := _by_name(known):
                unlisted[device.id] = device
            continue
        if any(not 0 <= node <= MAX_NUMA_NODE for node in known.numa):
            faults.append(
                f"entry {place} of {shown_name} ({_shown(known.id)}) has no NUMA node: {known.numa} cannot be"
            )
            known = replace(known, numa=())
        device = _device(name, known)
        if found.setdefault(known.id, device) is not device:
            faults.append(f"entry {place} of {shown_name} ({_shown(known.id)}) is left out: its id occurs twice")
            if found[known.id] != device:  # the two entries differ, so only the name is known
                found[known.id] = _by_name(replace(known, gpu="")) or device
    return found, unlisted


_DECODER = msgspec.json.Decoder(ListedDevice)


class _Names(msgspec.Struct, frozen=True):
    """The names in an entry that cannot be decoded."""

    id: object = None
    gpu: object = None
    visible_id: object = None


def _readable_names(entry: msgspec.Raw) -> ListedDevice:
    """Return a device with the names in an entry; a missing name is empty."""
    try:
        names = msgspec.json.decode(entry, type=_Names)
    except (msgspec.MsgspecError, RecursionError):
        names = _Names()
    identifier, gpu, visible = (
        name if isinstance(name, str) else "" for name in (names.id, names.gpu, names.visible_id)
    )
    return ListedDevice(identifier, gpu, visible, "", "")


def _fault(known: ListedDevice, *, foreign: bool) -> str:
    """Return the reason why an entry cannot be listed; empty if it can be listed."""
    if not foreign and (fault := device_id_fault(known.id)):
        return fault
    if known.kind not in {GPU, MIG}:
        return f"{_shown(known.kind)} is not a kind of device"
    if not known.gpu or not known.visible_id:
        return "the name of its hardware is missing"
    if known.id.partition(REPLICA)[0] != known.visible_id:
        return f"its id does not contain the name of its hardware, {_shown(known.visible_id)}"
    return ""


def _by_name(known: ListedDevice) -> Device | None:
    """Return an unshared device for the hardware in an entry's names; None if the names have no hardware."""
    named = known.id.partition(REPLICA)[0]
    visible = known.visible_id or named
    kind = MIG if visible.startswith("MIG-") else GPU
    parent = known.gpu if kind == MIG and known.gpu else visible
    return Device(known.id if named == visible else visible, parent, visible, "", kind=kind) if visible else None


def _device(resource: str, known: ListedDevice) -> Device:
    """Return the device of an entry. Its number of replicas is not stored: code does not use that number of a retired device."""
    fields = msgspec.structs.asdict(known)
    shared = fields.pop("shared")
    return Device(**fields, sharing=SharedResource(resource, resource, 2, shared) if shared else None)


def _shown(text: str) -> str:
    return shortened(ascii(text), _MAX_SHOWN)
