"""Asks the driver and the host what hardware there is. Each call here blocks: it runs on a driver thread.

One unreadable GPU never hides the others, and one unanswered question never hides a GPU.
"""

import logging

from msgspec.structs import replace

from gpu_plugin.devices.node import Gpu
from gpu_plugin.nvml import traits
from gpu_plugin.nvml.mig import GPU_GONE_CODES, read_partition, with_caps, with_partition
from gpu_plugin.nvml.port import Driver, Handle, HostView, NvmlError

log = logging.getLogger(__name__)


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
    whole = traits.described(driver, handle, Gpu(uuid=uuid, index=index), ("pci_bus_id",))
    node = host.numa_node(whole.pci_bus_id) if whole.pci_bus_id else None  # NVML's word only where the host has none
    whole = replace(whole, numa_node=node if node is not None and node >= 0 else None)
    whole = traits.described(driver, handle, whole, (name for name in traits.TRAITS if name != "pci_bus_id"))
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
