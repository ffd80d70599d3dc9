"""Reads a GPU's description from the driver. Blocks: run it on a driver thread.

A trait that the driver refuses temporarily is read again later; only a refusal for lack of support is final. An unreadable GPU
does not hide other GPUs, and an unreadable trait does not hide its GPU.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec.structs import astuple, replace

from gpu_plugin.containers.host_view import HostView
from gpu_plugin.devices import nvml_h
from gpu_plugin.devices.node import Gpu, Thresholds
from gpu_plugin.devices.nvml_h import Return, Threshold
from gpu_plugin.nvml.mig import GPU_GONE_CODES, read_partition, with_caps, with_partition
from gpu_plugin.nvml.plausible import MARGIN, THRESHOLD, plausible_limits
from gpu_plugin.nvml.port import Driver, Field, Handle, NvmlError, is_permanent
from gpu_plugin.nvml.questions import LINK_FIELDS, PROBED

log = logging.getLogger(__name__)

T = TypeVar("T")

# NVML fields in the order of `Thresholds`; °C, signed
MARGIN_FIELDS = (
    nvml_h.FI_TEMPERATURE_SHUTDOWN_TLIMIT,
    nvml_h.FI_TEMPERATURE_SLOWDOWN_TLIMIT,
    nvml_h.FI_TEMPERATURE_MEM_MAX_TLIMIT,
    nvml_h.FI_TEMPERATURE_GPU_MAX_TLIMIT,
)


class TraitQuery(msgspec.Struct):
    """Reads one trait of a GPU. `open` is set if the driver refused it temporarily, which is logged at `level`."""

    driver: Driver
    handle: Handle
    known: Gpu
    level: int
    open: bool = False

    def ask(self, call: Callable[..., T], *arguments: object, default: T) -> T:
        """Make a call of the driver about this GPU. Return the answer, or `default` if the driver refuses the call.

        Raises:
            NvmlError: the GPU is lost.
        """
        try:
            return call(self.handle, *arguments)
        except NvmlError as error:
            if error.code in GPU_GONE_CODES:
                raise
            if not error.unsupported:
                self.open = True
                log.log(self.level, "GPU %s: a property cannot be read for now: %s", self.known.uuid, error)
            return default


def _simple(name: str, call: str, query: TraitQuery) -> dict[str, Any]:
    return {name: query.ask(getattr(query.driver, call), default=getattr(query.known, name))}


def _numa_node(query: TraitQuery) -> dict[str, Any]:
    """Return the NUMA node whose memory is nearest, if sysfs does not name a node and NVML names exactly one node.

    nvmlDeviceGetNumaNodeId is not suitable: it returns the node of the GPU's own memory, without CPUs (GB200: 2 and 10).
    """
    if query.known.numa_node is not None:
        return {}
    nodes: frozenset[int] = query.ask(query.driver.memory_affinity, default=frozenset())
    return {"numa_node": next(iter(nodes)) if len(nodes) == 1 else None}


def _thresholds(query: TraitQuery) -> dict[str, Any]:
    def limit(kind: Threshold, known: int | None) -> int | None:
        return query.ask(query.driver.temperature_threshold, kind, default=known)

    limits = Thresholds(*map(limit, Threshold, astuple(query.known.thresholds)))
    return {"thresholds": plausible_limits(limits, THRESHOLD)}


def _remaps_rows(query: TraitQuery) -> dict[str, Any]:
    rows = query.ask(query.driver.remapped_rows, default=None)
    return {"remaps_rows": rows is not None or query.known.remaps_rows}


def _nvlinks(query: TraitQuery) -> dict[str, Any]:
    """Return the number of NVLinks, and whether they lead to switches: the first active link decides, as all are of one kind."""
    none: tuple[bool, ...] = ()
    states = query.ask(query.driver.nvlink_states, default=none)
    first = next((link for link, active in enumerate(states) if active), None)
    if first is None:
        return {"nvlinks": len(states)}
    switched = query.ask(query.driver.nvlink_to_switch, first, default=query.known.nvswitch)
    return {"nvlinks": len(states), "nvswitch": switched}


def _fields(query: TraitQuery) -> dict[str, Any]:
    """Return the NVML fields that the GPU supports, where one supported link is enough, and its temperature margins."""
    whole = [Field(number) for number in (*PROBED, *MARGIN_FIELDS) if number not in LINK_FIELDS]
    of_links = [Field(number, link) for number in sorted(LINK_FIELDS) for link in range(query.known.nvlinks)]
    wanted = (*whole, *of_links)
    none: tuple[int | NvmlError, ...] = ()
    answers = query.ask(query.driver.field_values, wanted, default=none)
    if not answers:
        return {}
    by_field = dict(zip(wanted, answers, strict=True))
    answered = {field: answer for field, answer in by_field.items() if not isinstance(answer, NvmlError)}
    refused = {field: answer for field, answer in by_field.items() if isinstance(answer, NvmlError)}
    if gone := next((error for error in refused.values() if error.code in GPU_GONE_CODES), None):
        raise gone
    numbers = query.known.fields.union(field.number for field in answered)
    for_now = {field.number for field, error in refused.items() if not is_permanent(error)} - numbers
    query.open |= bool(for_now) or (not query.known.nvlinks and "nvlinks" in query.known.unsettled)
    margins = [answered.get(Field(number)) for number in MARGIN_FIELDS]
    known = astuple(query.known.margins)
    limits = Thresholds(*(old if now is None else _signed(now) for now, old in zip(margins, known, strict=True)))
    return {"fields": numbers, "margins": plausible_limits(limits, MARGIN)}


def _signed(value: int) -> int:
    """Convert to a signed 32-bit number, even if a driver reports it as unsigned: no margin is 2^31 °C."""
    return value - (1 << 32) if value >> 31 == 1 else value


# The function that reads each trait and returns fields of a Gpu. `Gpu.unsettled` has these names. Order matters.
TRAITS: Mapping[str, Callable[[TraitQuery], Mapping[str, Any]]] = {
    "pci_bus_id": partial(_simple, "pci_bus_id", "pci_bus_id"),
    "minor": partial(_simple, "minor", "minor_number"),
    "model": partial(_simple, "model", "name"),
    "architecture": partial(_simple, "architecture", "architecture"),
    "compute_capability": partial(_simple, "compute_capability", "compute_capability"),
    "memory_bytes": partial(_simple, "memory_bytes", "memory_total"),
    "numa_node": _numa_node,
    "thresholds": _thresholds,
    "remaps_rows": _remaps_rows,
    "nvlinks": _nvlinks,
    "fields": _fields,
}


def described(
    driver: Driver, handle: Handle, gpu: Gpu, names: Iterable[str] = TRAITS, level: int = logging.WARNING
) -> Gpu:
    """Return the GPU with these traits; traits that the driver refuses temporarily are `unsettled`.

    Raises NvmlError if the GPU is lost or must be reset.
    """
    for name in names:
        query = TraitQuery(driver, handle, gpu, level)
        found = TRAITS[name](query)
        unsettled = gpu.unsettled | {name} if query.open else gpu.unsettled - {name}
        gpu = replace(gpu, **found, unsettled=unsettled)
    return gpu


def settled(driver: Driver, handle: Handle, gpu: Gpu) -> Gpu:
    """Read the unsettled traits again and return the GPU; the same object if nothing changed."""
    if not gpu.unsettled:
        return gpu
    try:
        known = described(driver, handle, gpu, [name for name in TRAITS if name in gpu.unsettled], logging.DEBUG)
    except NvmlError:
        return gpu  # lost in between: the next look reports that
    if known == gpu:
        return gpu
    log.info(
        "GPU %s: the driver now reports %s", gpu.uuid, ", ".join(sorted(gpu.unsettled - known.unsettled)) or "more"
    )
    return known


def reach(driver: Driver, index: int, known: str = "", bus_id: str = "") -> tuple[Handle, str]:
    """Return the handle and uuid of a GPU: by its `bus_id` if given, else by its uuid if `known`, else by its NVML index.

    The index may change when another GPU disappears. Use the bus id if other GPUs must not be affected: with an index or uuid,
    NVML may wake them. Raises NvmlError if the driver returns no handle or uuid, or if another GPU is at that place.
    """
    if known and not bus_id:
        return driver.handle_by_uuid(known), known
    handle = driver.handle_by_pci_bus_id(bus_id) if bus_id else driver.handle_by_index(index)
    uuid = driver.uuid(handle)
    if known and uuid != known:
        text = f"not found, another GPU, {uuid}, is at {bus_id} now"
        raise NvmlError(Return.NOT_FOUND, "nvmlDeviceGetHandleByPciBusId_v2", text)
    return handle, uuid


def probe_gpu(driver: Driver, host: HostView, index: int, known: str = "", *, bus_id: str = "") -> tuple[Handle, Gpu]:
    """Probe one GPU, found with `reach`.

    Raises:
        NvmlError: it cannot be reached. If other values cannot be read, they are None. If the GPU is lost during the probe, it is
            returned as `unreadable`.
    """
    handle, uuid = reach(driver, index, known, bus_id)
    try:
        return handle, _describe(driver, host, handle, uuid, index)
    except NvmlError as error:
        return handle, Gpu(uuid=uuid, index=index, unreadable=f"the driver cannot describe it: {error}")


def _describe(driver: Driver, host: HostView, handle: Handle, uuid: str, index: int) -> Gpu:
    whole = described(driver, handle, Gpu(uuid=uuid, index=index), ("pci_bus_id",))
    # `_numa_node` reads the node from NVML if sysfs has no node.
    node = host.numa_node(whole.pci_bus_id) if whole.pci_bus_id else None
    whole = replace(whole, numa_node=node if node is not None and node >= 0 else None)
    whole = described(driver, handle, whole, (name for name in TRAITS if name != "pci_bus_id"))
    try:
        partition = read_partition(driver, handle, memory_bytes=whole.memory_bytes)
    except NvmlError as error:
        if error.code in GPU_GONE_CODES:
            raise
        log.warning("GPU %s: its MIG devices cannot be read now: %s", uuid, error)
        return whole
    if partition is None:
        return whole
    if not partition.enabled:
        return with_partition(whole, partition)
    for at, why in partition.unreadable.items():
        log.warning("GPU %s: MIG device %d cannot be read and is not offered: %s", uuid, at, why)
    # NVML does not report rows of a partitioned GPU; all GPU models with MIG (since Ampere) remap rows.
    whole = replace(whole, remaps_rows=whole.remaps_rows or bool(partition.devices))
    return with_caps(with_partition(whole, partition), host.mig_minors())
