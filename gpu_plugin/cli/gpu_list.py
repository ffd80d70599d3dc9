"""Lists of hardware on a command line: indices, ranges, uuids, bus ids, `all`; with a number of replicas for each."""

import re
from collections.abc import Sequence

import click
import msgspec

from gpu_plugin.config.words import counted
from gpu_plugin.devices.gpu_names import is_bus_id, named
from gpu_plugin.devices.node import Gpu
from gpu_plugin.devices.sharing import REPLICA
from gpu_plugin.placement.views.groups import called, mig_spans
from gpu_plugin.placement.views.report import Offered

ALL = "all"

_SPAN = re.compile(r"([0-9]{1,18}:)?([0-9]{1,18})-([0-9]{1,18})")  # of GPUs, or of the MIG devices of a GPU
_INDEX = re.compile(r"[0-9]+(:[0-9]+)?")
_COUNTED = re.compile(r"(.*):([0-9]{1,18})")
_ID = re.compile(f"(.+){REPLICA}([0-9]+)")
_UUID = re.compile(r"(gpu|mig)(-.*)?", re.IGNORECASE)


class Amount(msgspec.Struct, frozen=True):
    """The selected part of a GPU or MIG device: `count` of its replicas, the replicas with these ids, or (neither) all."""

    count: int | None = None
    ids: tuple[str, ...] = ()

    def of(self, ids: Sequence[str]) -> tuple[str, ...]:
        """Return the selected ids of these. A count selects the last ids, since the first ids are given out first."""
        if self.ids:
            return tuple(each for each in ids if each in self.ids)
        return tuple(ids if self.count is None else ids[max(0, len(ids) - self.count) :])

    def left_of(self, ids: Sequence[str]) -> tuple[str, ...]:
        """Return the ids that are not selected. Here a count selects the first ids."""
        if self.ids:
            return tuple(each for each in ids if each not in self.ids)
        return () if self.count is None else tuple(ids[self.count :])

    def __str__(self) -> str:
        """Return the amount in words."""
        return "without a number" if self.count is None else f"as {self.count}"


class Hardware(msgspec.Struct, frozen=True):
    """The hardware that a list can name: `offered` on the GPUs of a node. `whose` is `this node` or a resource's name."""

    offered: Sequence[Offered]
    gpus: Sequence[Gpu]
    whose: str


def amounts(option: str, given: Sequence[str], hardware: Hardware) -> dict[int, Amount]:
    """Return the selected amounts of an option's value, by the place of the hardware, ascending.

    Args:
        option: its name, for messages.
        given: texts such as `0,2-5`, `GPU-6f1c`, `1b:00.0`, `0-1:3`, `MIG-...` or `GPU-...::2`; `all` names all hardware.
        hardware: the hardware that can be named.

    Raises:
        UsageError: a name fits no hardware or several, or hardware is named twice with different counts.
    """
    found: dict[int, Amount] = {}
    try:
        for item in (item.strip() for text in given for item in text.split(",")):
            for at, amount in (_meant(item, hardware) if item else {}).items():
                before = found.get(at, amount)
                if before.ids and amount.ids:
                    found[at] = Amount(ids=tuple(dict.fromkeys((*before.ids, *amount.ids))))
                elif before == amount:
                    found[at] = amount
                else:
                    how = "by its ids and otherwise" if before.ids or amount.ids else f"{before} and {amount}"
                    raise ValueError(f"{hardware.offered[at].name} is given twice, {how}: give it once")
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}") from None
    return dict(sorted(found.items()))


def _meant(item: str, hardware: Hardware) -> dict[int, Amount]:
    """Return the amounts that an item of a list names, by the place of the hardware."""
    offered = hardware.offered
    if match := _ID.fullmatch(item):
        places = _named(match[1], hardware)
        for at in places:
            if item not in offered[at].ids:
                raise ValueError(f"{item}: {_no_id(offered[at], match[1])}")
        return dict.fromkeys(places, Amount(ids=(item,)))
    match = None if is_bus_id(item) or _is_mig_index(item, offered) else _COUNTED.fullmatch(item)
    name, amount = (match[1], Amount(int(match[2]))) if match else (item, Amount())
    places = _named(name, hardware)
    for at in places if match else ():
        if not offered[at].shared:
            raise ValueError(
                f"{item}: counts go with replicas, and {offered[at].name} is given out once, with no MIG device here"
            )
        if int(match[2]) > len(offered[at].ids):  # type: ignore[index] # the loop has places only if there is a match
            raise ValueError(f"{item}: {offered[at].name} has {counted(len(offered[at].ids), 'replica')}")
    return dict.fromkeys(places, amount)


def _is_mig_index(item: str, hardware: Sequence[Offered]) -> bool:
    """Return True if 0:3 is MIG device 3 of GPU 0, and not three replicas of GPU 0."""
    gpu, colon, _ = item.partition(":")
    partitioned = any(":" in each.index for each in hardware)
    return bool(partitioned and colon and _INDEX.fullmatch(item) and not any(each.index == gpu for each in hardware))


def _no_id(piece: Offered, uuid: str) -> str:
    if not piece.shared:
        return f"{piece.name} is given out once, so its only id is {piece.visible_id}"
    if uuid != piece.visible_id:
        return f"an id has the whole uuid, {piece.visible_id}"
    return f"{piece.name} has {counted(len(piece.ids), 'replica')}, numbered from 0"


def _named(name: str, hardware: Hardware) -> list[int]:
    """Return the places of the hardware with this name. Raises ValueError."""
    if name == ALL:
        return list(range(len(hardware.offered)))
    if match := _SPAN.fullmatch(name):
        gpu, first, last = match[1] or "", int(match[2]), int(match[3])
        if first > last:
            raise ValueError(f"{name}: a range begins with the lower index")
        last = min(last, first + len(hardware.offered))  # the first missing index raises an error
        indices = [f"{gpu}{index}" for index in range(first, last + 1)]
        return [at for index in indices for at in _one(index, hardware)]
    return _one(name, hardware)


def _one(name: str, hardware: Hardware) -> list[int]:
    offered = list(enumerate(hardware.offered))
    if _INDEX.fullmatch(name):
        found = [at for at, each in offered if each.index == name]
        kind = "index"
        if not found:  # the index of a partitioned GPU names all of its MIG devices
            return [at for at, each in offered if each.index.partition(":")[0] == name] or _of_gpu(name, hardware)
    else:
        found = [at for at, each in offered if name and each.visible_id.lower().startswith(name.lower())]
        kind = "uuid"
    if len(found) > 1:
        which = " and ".join(hardware.offered[at].visible_id for at in found[:2])
        more = f" and {len(found) - 2} more" if len(found) > 2 else ""
        raise ValueError(f"{name} is the {kind}, or its beginning, of {which}{more}: give its uuid")
    return found or _of_gpu(name, hardware)


def _of_gpu(name: str, hardware: Hardware) -> list[int]:
    """Return the places of all hardware of the GPU with this name."""
    gpu = named(name, hardware.gpus)
    found = [at for at, each in enumerate(hardware.offered) if gpu is not None and each.gpu == gpu.uuid]
    return found or _none(name, hardware)


def _none(name: str, hardware: Hardware) -> list[int]:
    """Raise ValueError: no hardware has this name, or the text is not a name."""
    gpus = sorted({int(each.index) for each in hardware.offered if each.index.isdecimal()})
    migs = [each.index for each in hardware.offered if ":" in each.index]
    there = [called(gpus)] if gpus else []
    if migs:
        there.append(f"MIG {'device' if len(migs) == 1 else 'devices'} {mig_spans(migs)}")
    has = f"{hardware.whose} has {' and '.join(there) or 'no GPU'}"
    if _INDEX.fullmatch(name):
        raise ValueError(f"{name}: nothing there has this index; {has}")
    if _UUID.fullmatch(name):
        raise ValueError(f"{name}: nothing there has this uuid; {has}")
    if is_bus_id(name):
        raise ValueError(f"{name}: nothing there has this PCI bus id; {has}")
    raise ValueError(f"{name}: neither an index, a range, a uuid nor a PCI bus id; {has}")
