"""Shared devices: one piece of hardware offered several times, under its own or another name."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.sharing import MPS, MpsLimits, SharedResource
from gpu_plugin.config.words import are
from gpu_plugin.devices.device import MAX_LIST_BYTES, MIG, Device, first_few, withhold

REPLICA = "::"  # separator of the shared device's id and the replica's number, as in NVIDIA's plugin


class Named(msgspec.Struct, frozen=True):
    """A device with its resource name."""

    name: str
    device: Device
    aliases: tuple[str, ...]  # the names that an operator may use for it: index, uuid, legacy MIG name


class MpsShared(msgspec.Struct, frozen=True):
    """A resource that is shared by MPS."""

    name: str
    gpus: tuple[str, ...]  # the uuids of its usable GPUs
    replicas: int  # of each GPU
    limits: MpsLimits = msgspec.field(default_factory=MpsLimits)
    root: str = ""  # the host's MPS root, which contains the directory of its daemon


def share(
    named: Mapping[str, Sequence[Named]], entries: Sequence[SharedResource]
) -> tuple[dict[str, list[Device]], list[str]]:
    """Return the devices by the resource name that they are offered under, after sharing, and warnings for the operator.

    Of the entries of a resource, those with a list of devices come first, then those with a count in their order, then the
    entry for all remaining devices. An entry for a resource that the node does not have is a warning.

    Raises:
        ConfigError: two entries list the same device, perhaps by index and by uuid, or there are more replicas than a list of
            devices can have.
    """
    offered: dict[str, list[Device]] = {}
    warnings = [
        f"sharing of {name}: no device of this node is counted under that name"
        for name in dict.fromkeys(entry.name for entry in entries)
        if name not in named
    ]
    taken = {
        name: _taken(devices, [entry for entry in entries if entry.name == name], warnings)
        for name, devices in named.items()
    }
    _check_lengths(taken.values())
    for name, devices in named.items():
        for one in devices:
            entry = taken[name].get(one.device.id)
            if entry is None:
                offered.setdefault(name, []).append(one.device)
            elif entry.replicas == 1:
                offered.setdefault(entry.offered_as, []).append(one.device)
            else:
                offered.setdefault(entry.offered_as, []).extend(_replicas(one.device, entry))
    return offered, warnings


def _check_lengths(taken: Iterable[Mapping[str, SharedResource]]) -> None:
    """Raise ConfigError if there are more replicas than any list can have, before making them, which would take seconds."""
    least: dict[str, int] = {}
    count: dict[str, int] = {}
    for of_one_name in taken:
        for identifier, entry in of_one_name.items():
            # The least bytes of a replica: its id, "::", a digit, and 13 for "Healthy" with all tags and lengths (2, 2 and 9)
            each = len(identifier) + len(REPLICA) + 1 + 13
            least[entry.offered_as] = least.get(entry.offered_as, 0) + entry.replicas * each
            count[entry.offered_as] = count.get(entry.offered_as, 0) + entry.replicas
    for name, size in least.items():
        if size > MAX_LIST_BYTES:
            raise ConfigError(
                f"{name}: {count[name]} devices make a list of at least {size} bytes and the kubelet reads "
                f"{MAX_LIST_BYTES}: ask for fewer replicas"
            )


def _taken(
    devices: Sequence[Named], entries: Sequence[SharedResource], warnings: list[str]
) -> dict[str, SharedResource]:
    """Return the entry for each device by device id. A device that is not shared has no entry."""
    taken: dict[str, SharedResource] = {}
    by_alias = {alias: one.device.id for one in devices for alias in one.aliases}
    for entry in entries:
        absent: list[str] = []
        for item in entry.devices.listed:
            identifier = by_alias.get(item)
            if identifier is None:
                absent.append(item)
            elif taken.setdefault(identifier, entry) is not entry:
                raise ConfigError(
                    f"sharing of {entry.name}: device {identifier} is listed in two entries, here as {item}"
                )
        if absent:
            warnings.append(
                f"sharing of {entry.name}: {first_few(absent)} {are(len(absent))} none of its devices on this node"
            )
    for entry in sorted((e for e in entries if not e.devices.listed), key=lambda e: e.devices.everything):
        free = [one.device.id for one in devices if one.device.id not in taken]
        wanted = len(free) if entry.devices.everything else entry.devices.count
        if wanted > len(free):
            warnings.append(
                f"sharing of {entry.name}: {wanted} devices should be shared, but there are only {len(free)}"
            )
        taken |= dict.fromkeys(free[:wanted], entry)
    return taken


def _replicas(device: Device, entry: SharedResource) -> Iterable[Device]:
    reason = device.withheld
    if not reason and entry.strategy == MPS and device.kind == MIG:
        reason = "sharing using MPS is not supported for MIG devices"
    one = withhold(replace(device, sharing=entry), reason)
    return [replace(one, id=f"{device.id}{REPLICA}{number}") for number in range(entry.replicas)]
