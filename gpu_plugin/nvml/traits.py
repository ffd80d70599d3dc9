"""What a GPU is, as the driver describes it. Blocks: runs on a driver thread.

What the driver refuses for the moment is asked again until it is settled: only a refusal for lack of support is an answer.
One unreadable GPU never hides the others, and one unanswered question never hides a GPU.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.structs import astuple, replace

from gpu_plugin.containers.host_view import HostView
from gpu_plugin.devices import nvml_h
from gpu_plugin.devices.node import Gpu, Thresholds
from gpu_plugin.devices.nvml_h import Return, Threshold
from gpu_plugin.nvml.mig import GPU_GONE_CODES, read_partition, with_caps, with_partition
from gpu_plugin.nvml.plausible import MARGIN, THRESHOLD, plausible_limits
from gpu_plugin.nvml.port import Driver, Field, Handle, NvmlError, never
from gpu_plugin.nvml.questions import LINK_FIELDS, PROBED

log = logging.getLogger(__name__)

T = TypeVar("T")

MARGIN_FIELDS = (
    nvml_h.FI_TEMPERATURE_SHUTDOWN_TLIMIT,
    nvml_h.FI_TEMPERATURE_SLOWDOWN_TLIMIT,
    nvml_h.FI_TEMPERATURE_MEM_MAX_TLIMIT,
    nvml_h.FI_TEMPERATURE_GPU_MAX_TLIMIT,
)
"""In the order of `Thresholds`: °C, signed."""


class TraitQuery(msgspec.Struct):
    """Asks for one trait of a GPU. `open` is set where the driver did not tell for the moment, which is logged at `level`."""

    driver: Driver
    handle: Handle
    known: Gpu
    level: int
    open: bool = False

    def ask(self, question: Callable[[], T], default: T) -> T:
        """The answer, or `default` where the part or the driver has none. A lost GPU is everybody's business: raised."""
        try:
            return question()
        except NvmlError as error:
            if error.code in GPU_GONE_CODES:
                raise
            if not error.unsupported:
                self.open = True
                log.log(self.level, "GPU %s: a question stays unanswered for now: %s", self.known.uuid, error)
            return default


def _simple(name: str, call: Callable[[Driver, Handle], object]) -> Callable[[TraitQuery], dict[str, Any]]:
    return lambda query: {name: query.ask(lambda: call(query.driver, query.handle), getattr(query.known, name))}


def _numa_node(query: TraitQuery) -> dict[str, Any]:
    """The NUMA node whose memory is nearest, if sysfs names none and NVML names exactly one.

    nvmlDeviceGetNumaNodeId would not do: it is the node of the GPU's own memory, which has no CPUs (GB200: 2 and 10).
    """
    if query.known.numa_node is not None:
        return {}
    nodes: frozenset[int] = query.ask(lambda: query.driver.memory_affinity(query.handle), frozenset())
    return {"numa_node": next(iter(nodes)) if len(nodes) == 1 else None}


def _thresholds(query: TraitQuery) -> dict[str, Any]:
    def limit(kind: Threshold, known: int | None) -> int | None:
        return query.ask(lambda: query.driver.temperature_threshold(query.handle, kind), known)

    limits = Thresholds(*map(limit, Threshold, astuple(query.known.thresholds)))
    return {"thresholds": plausible_limits(limits, THRESHOLD)}


def _remaps_rows(query: TraitQuery) -> dict[str, Any]:
    rows = query.ask(lambda: query.driver.remapped_rows(query.handle), None)
    return {"remaps_rows": rows is not None or query.known.remaps_rows}


def _nvlinks(query: TraitQuery) -> dict[str, Any]:
    """How many there are, and whether the first that is active leads to a switch: those of a GPU all lead to the same kind."""
    none: tuple[bool, ...] = ()
    states = query.ask(lambda: query.driver.nvlink_states(query.handle), none)
    first = next((link for link, active in enumerate(states) if active), None)
    if first is None:
        return {"nvlinks": len(states)}
    switched = query.ask(lambda: query.driver.nvlink_to_switch(query.handle, first), query.known.nvswitch)
    return {"nvlinks": len(states), "nvswitch": switched}


def _fields(query: TraitQuery) -> dict[str, Any]:
    """NVML's fields that are answered, of a link's by any link, and the margins, which some of them are."""
    whole = [Field(number) for number in (*PROBED, *MARGIN_FIELDS) if number not in LINK_FIELDS]
    of_links = [Field(number, link) for number in sorted(LINK_FIELDS) for link in range(query.known.nvlinks)]
    wanted = (*whole, *of_links)
    none: tuple[int | NvmlError, ...] = ()
    answers = query.ask(lambda: query.driver.field_values(query.handle, wanted), none)
    if not answers:
        return {}
    by_field = dict(zip(wanted, answers, strict=True))
    told = {field: answer for field, answer in by_field.items() if not isinstance(answer, NvmlError)}
    refused = {field: answer for field, answer in by_field.items() if isinstance(answer, NvmlError)}
    if gone := next((error for error in refused.values() if error.code in GPU_GONE_CODES), None):
        raise gone
    numbers = query.known.fields.union(field.number for field in told)
    for_now = {field.number for field, error in refused.items() if not never(error)} - numbers
    query.open |= bool(for_now) or (not query.known.nvlinks and "nvlinks" in query.known.unsettled)
    margins = [told.get(Field(number)) for number in MARGIN_FIELDS]
    known = astuple(query.known.margins)
    limits = Thresholds(*(old if now is None else _signed(now) for now, old in zip(margins, known, strict=True)))
    return {"fields": numbers, "margins": plausible_limits(limits, MARGIN)}


def _signed(value: int) -> int:
    """A signed number of 32 bits, also where a driver declares it unsigned: no part is 2^31 °C away from its limit."""
    return value - (1 << 32) if value >> 31 == 1 else value


TRAITS: Mapping[str, Callable[[TraitQuery], Mapping[str, Any]]] = {
    "pci_bus_id": _simple("pci_bus_id", lambda driver, handle: driver.pci_bus_id(handle)),
    "minor": _simple("minor", lambda driver, handle: driver.minor_number(handle)),
    "model": _simple("model", lambda driver, handle: driver.name(handle)),
    "architecture": _simple("architecture", lambda driver, handle: driver.architecture(handle)),
    "compute_capability": _simple("compute_capability", lambda driver, handle: driver.compute_capability(handle)),
    "memory_bytes": _simple("memory_bytes", lambda driver, handle: driver.memory_total(handle)),
    "numa_node": _numa_node,
    "thresholds": _thresholds,
    "remaps_rows": _remaps_rows,
    "nvlinks": _nvlinks,
    "fields": _fields,
}
"""By what `Gpu.unsettled` calls it, what is asked for, and the fields of a Gpu that it makes. A later one may rest on earlier."""


def described(
    driver: Driver, handle: Handle, gpu: Gpu, names: Iterable[str] = TRAITS, level: int = logging.WARNING
) -> Gpu:
    """The GPU with these traits, as the driver tells them; what it does not tell for the moment is `unsettled`.

    Raises NvmlError where the GPU is lost, or must be reset.
    """
    for name in names:
        query = TraitQuery(driver, handle, gpu, level)
        found = TRAITS[name](query)
        unsettled = gpu.unsettled | {name} if query.open else gpu.unsettled - {name}
        gpu = replace(gpu, **found, unsettled=unsettled)
    return gpu


def settled(driver: Driver, handle: Handle, gpu: Gpu) -> Gpu:
    """The GPU once more, with what was unsettled asked again; the very same object where nothing is news."""
    if not gpu.unsettled:
        return gpu
    try:
        known = described(driver, handle, gpu, [name for name in TRAITS if name in gpu.unsettled], logging.DEBUG)
    except NvmlError:
        return gpu  # lost meanwhile, as the next look finds
    if known == gpu:
        return gpu
    log.info(
        "GPU %s: the driver now reports %s", gpu.uuid, ", ".join(sorted(gpu.unsettled - known.unsettled)) or "more"
    )
    return known


def reach(driver: Driver, index: int, known: str = "", bus_id: str = "") -> tuple[Handle, str]:
    """The handle and the uuid of a GPU: by its `bus_id`, by its uuid if that is `known`, else by its NVML index.

    The index may change when another GPU goes. The bus id is the way where another GPU must not be touched: by index or uuid,
    NVML may wake others too. Raises NvmlError where the driver gives no handle or no uuid for it, or another GPU is there.
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
    """One GPU, as `reach` finds it.

    Raises:
        NvmlError: it cannot be reached. What else the driver does not say is None in the answer; one lost midway comes back
            `unreadable`.
    """
    handle, uuid = reach(driver, index, known, bus_id)
    try:
        return handle, _describe(driver, host, handle, uuid, index)
    except NvmlError as error:
        return handle, Gpu(uuid=uuid, index=index, unreadable=f"the driver cannot describe it: {error}")


def _describe(driver: Driver, host: HostView, handle: Handle, uuid: str, index: int) -> Gpu:
    whole = described(driver, handle, Gpu(uuid=uuid, index=index), ("pci_bus_id",))
    node = host.numa_node(whole.pci_bus_id) if whole.pci_bus_id else None  # NVML's word only where the host has none
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
    # While a GPU is partitioned NVML tells nothing of its rows; every part that has MIG remaps them (Ampere and later).
    whole = replace(whole, remaps_rows=whole.remaps_rows or bool(partition.devices))
    return with_caps(with_partition(whole, partition), host.mig_minors())
