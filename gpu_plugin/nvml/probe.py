"""Asks the driver and the host what hardware there is. Each call here blocks: it runs on a driver thread.

One unreadable GPU never hides the others, and one unanswered question never hides a GPU.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from gpu_plugin.devices.node import Gpu, Thresholds
from gpu_plugin.devices.nvml_h import Threshold
from gpu_plugin.nvml.mig import GONE, cut, read_partition, with_caps
from gpu_plugin.nvml.port import Driver, Handle, HostView, NvmlError
from gpu_plugin.nvml.sample import SAMPLED_FIELDS

log = logging.getLogger(__name__)

T = TypeVar("T")

MARGIN_FIELDS = (193, 194, 195, 196)
"""NVML_FI_DEV_TEMPERATURE_*_TLIMIT for shutdown, slowdown, memory and GPU, in the order of `Thresholds`: °C, signed."""

PROBED_FIELDS = (*(number for numbers in SAMPLED_FIELDS.values() for number in numbers), *MARGIN_FIELDS)


def probe_gpu(driver: Driver, host: HostView, index: int, known: str = "", *, bus_id: str = "") -> tuple[Handle, Gpu]:
    """One GPU by its `bus_id`, by its uuid if that is `known`, else by its NVML index (which may change when another GPU goes).

    Its bus id is the way where another GPU must not be touched: by index or uuid, NVML may wake others too.

    Raises:
        NvmlError: the driver gives no handle or no uuid for it. What else it does not say is None in the answer; one lost
            midway comes back `unreadable`.
    """
    if bus_id:
        handle = driver.handle_by_pci_bus_id(bus_id)
    else:
        handle = driver.handle_by_uuid(known) if known else driver.handle_by_index(index)
    uuid = driver.uuid(handle)
    try:
        return handle, _describe(driver, host, handle, uuid, index)
    except NvmlError as error:
        return handle, Gpu(uuid=uuid, index=index, unreadable=f"the driver cannot describe it: {error}")


def _describe(driver: Driver, host: HostView, handle: Handle, uuid: str, index: int) -> Gpu:
    bus_id = _ask(lambda: driver.pci_bus_id(handle), "")
    fields = _fields(driver, handle)
    whole = Gpu(
        uuid=uuid,
        index=index,
        minor=_ask(lambda: driver.minor_number(handle), None),
        pci_bus_id=bus_id,
        model=_ask(lambda: driver.name(handle), ""),
        architecture=_ask(lambda: driver.architecture(handle), None),
        memory_bytes=_ask(lambda: driver.memory_total(handle), None),
        numa_node=_numa_node(driver, host, handle, bus_id),
        thresholds=Thresholds(
            *(_ask(lambda kind=kind: driver.temperature_threshold(handle, kind), None) for kind in Threshold),  # type: ignore[misc]
        ),
        margins=Thresholds(*(_signed(fields.get(number)) for number in MARGIN_FIELDS)),
        remaps_rows=_ask(lambda: driver.remapped_rows(handle), None) is not None,
        nvswitch=_ask(lambda: _nvswitch(driver, handle), default=False),
        event_types=_ask(lambda: driver.supported_event_types(handle), 0),
        fields=frozenset(fields),
    )
    partition = _ask(lambda: read_partition(driver, handle, memory_bytes=whole.memory_bytes), None)
    if partition is None or not partition.enabled:
        return whole
    for at, why in partition.unreadable.items():
        log.warning("GPU %s: MIG device %d cannot be read and is not offered: %s", uuid, at, why)
    # While a GPU is cut NVML tells nothing of its rows; every part that can be cut remaps them (Ampere and later).
    whole = replace(whole, remaps_rows=whole.remaps_rows or bool(partition.devices))
    return with_caps(cut(whole, partition), host.mig_minors())


def _ask(question: Callable[[], T], default: T) -> T:
    """The answer, or `default` where the part or the driver has none. A lost GPU is everybody's business: raised."""
    try:
        return question()
    except NvmlError as error:
        if error.code in GONE:
            raise
        if not error.unsupported:
            log.warning("a question stays unanswered: %s", error)
        return default


def _numa_node(driver: Driver, host: HostView, handle: Handle, bus_id: str) -> int | None:
    """The host's word first; NVML's where the host has none, and never a negative one."""
    node = host.numa_node(bus_id) if bus_id else None
    if node is None:
        node = _ask(lambda: driver.numa_node(handle), None)
    return node if node is not None and node >= 0 else None


def _fields(driver: Driver, handle: Handle) -> dict[int, int]:
    """The fields that are answered, and what with."""
    unanswered: tuple[int | None, ...] = (None,) * len(PROBED_FIELDS)
    answers = _ask(lambda: driver.field_values(handle, PROBED_FIELDS), unanswered)
    return {field: value for field, value in zip(PROBED_FIELDS, answers, strict=True) if value is not None}


def _signed(value: int | None) -> int | None:
    """A signed number of 32 bits, also where a driver declares it unsigned: no part is 2^31 °C away from its limit."""
    return value - (1 << 32) if value is not None and value >> 31 == 1 else value


def _nvswitch(driver: Driver, handle: Handle) -> bool:
    """Whether the first NVLink that is active leads to a switch: those of a GPU all lead to the same kind."""
    first = next((link for link, active in enumerate(driver.nvlink_states(handle)) if active), None)
    return first is not None and driver.nvlink_to_switch(handle, first)
