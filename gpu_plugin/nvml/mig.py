"""How a GPU is partitioned into MIG devices. The reading blocks: run it on a driver thread. The rest is pure.

While a GPU is being repartitioned, the driver reports temporary states: MIG mode without devices, or indices that it cannot
describe. These are not faults of the GPU.
"""

import math
import re
from collections.abc import Iterable, Mapping
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from gpu_plugin.devices.node import Gpu, MigDevice
from gpu_plugin.devices.nvml_h import FEATURE_ENABLED, Return
from gpu_plugin.nvml.plausible import flag
from gpu_plugin.nvml.port import Driver, Handle, MigAttributes, NvmlError

# Looks in a row in which a known MIG device may be unreadable before it counts as gone, as many as for a whole GPU
UNREADABLE_LOOKS = 3

GPU_GONE_CODES = frozenset({Return.GPU_IS_LOST, Return.RESET_REQUIRED})  # Codes with which a lost GPU answers all calls

# The end of a MIG device's name, as in "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb" and "... MIG 1g.5gb+me".
_PROFILE = re.compile(r" MIG ((?:[0-9]+c\.)?[0-9]+g\.[0-9]+gb(?:[+-][A-Za-z0-9][A-Za-z0-9.,]*)*)$")


class Partition(msgspec.Struct, frozen=True):
    """The result of one reading: whether MIG mode is on, the MIG devices, and the reason for each unreadable MIG index.

    `pending` is the MIG mode after the next reset of the GPU, or None if the mode does not change.
    """

    enabled: bool = False
    devices: tuple[MigDevice, ...] = ()
    unreadable: Mapping[int, str] = msgspec.field(default_factory=dict)
    pending: bool | None = None


def read_partition(
    driver: Driver,
    handle: Handle,
    *,
    memory_bytes: int | None = None,
    known: Iterable[MigDevice] = (),
) -> Partition | None:
    """Read how the GPU is partitioned now; None if it can never be partitioned.

    Devices in `known` that still exist are returned unchanged; each costs two calls, for its handle and uuid. New devices have
    no capability minors yet. `memory_bytes` is the GPU's memory. Raises NvmlError if the driver does not report the partition,
    or the GPU is gone.
    """
    try:
        enabled, pending = mig_mode(driver, handle)
    except NvmlError as error:
        if error.unsupported:
            return None
        raise
    if not enabled:
        return Partition(pending=pending)
    before = {(device.index, device.uuid): device for device in known}
    devices: dict[str, MigDevice] = {}
    unreadable: dict[int, str] = {}
    try:
        indices = driver.max_mig_devices(handle)
    except NvmlError as error:
        if not error.unsupported:
            raise
        indices = 0  # the driver has no MIG indices
    for index in range(indices):
        try:
            mig = driver.mig_handle(handle, index)
        except NvmlError as error:
            if error.code in GPU_GONE_CODES:
                raise
            if error.code != Return.NOT_FOUND and not error.unsupported:
                unreadable[index] = str(error)
            continue
        try:
            uuid = driver.uuid(mig)
            if uuid in devices:
                unreadable[index] = f"it claims the uuid of MIG device {devices[uuid].index}, {uuid}"
            else:
                devices[uuid] = before.get((index, uuid)) or _describe(driver, mig, index, uuid, memory_bytes)
        except NvmlError as error:
            if error.code in GPU_GONE_CODES:
                raise
            unreadable[index] = str(error)
    return Partition(enabled, tuple(devices.values()), unreadable, pending)


def mig_mode(driver: Driver, handle: Handle) -> tuple[bool, bool | None]:
    """Return whether MIG mode is on, and the mode after the next reset: None if it does not change, or is unknown.

    Raises NvmlError if the driver does not report the mode, or the GPU model has no MIG.
    """
    current, after = driver.mig_mode(handle)
    enabled, pending = current == FEATURE_ENABLED, flag(after)
    return enabled, None if pending == enabled else pending


def with_partition(gpu: Gpu, partition: Partition, *, hold: bool = False) -> Gpu:
    """Return the GPU with this partition; the same object if nothing changes.

    `hold` keeps the known devices at indices that were unreadable this time.
    """
    there = {device.uuid for device in partition.devices}
    retained = [d for d in gpu.mig_devices if hold and d.index in partition.unreadable and d.uuid not in there]
    devices = tuple(sorted([*partition.devices, *retained], key=attrgetter("index")))
    found = replace(
        gpu, mig_capable=True, mig_enabled=partition.enabled, mig_devices=devices, mig_pending=partition.pending
    )
    return gpu if found == gpu else found


def with_caps(gpu: Gpu, minors: Mapping[str, int]) -> Gpu:
    """Return the GPU with the capability minors of its MIG devices; the same object if nothing changes."""
    devices = tuple(_with_caps(device, gpu.minor, minors) for device in gpu.mig_devices)
    return gpu if devices == gpu.mig_devices else replace(gpu, mig_devices=devices)


def profile_of(name: str, attributes: MigAttributes | None, memory_bytes: int | None) -> str:
    """Return NVIDIA's profile name of a MIG device: from its name, else computed as NVIDIA does; empty if neither is known."""
    if match := _PROFILE.search(name):
        return match[1]
    if attributes is None:
        return ""
    compute, slices = attributes.compute_instance_slices, attributes.gpu_instance_slices
    size = f"{slices}g.{_gigabytes(attributes.memory_mb, memory_bytes)}gb"
    return size if compute == slices else f"{compute}c.{size}"


def _describe(driver: Driver, mig: Handle, index: int, uuid: str, memory_bytes: int | None) -> MigDevice:
    """Describe a MIG device. Raises NvmlError if the driver does not report its instance or its size."""
    gpu_instance, compute_instance = driver.gpu_instance_id(mig), driver.compute_instance_id(mig)
    name, attributes, refusal = "", None, None
    try:
        name = driver.name(mig)
    except NvmlError as error:
        refusal = error
    try:
        attributes = driver.mig_attributes(mig)
    except NvmlError as error:
        refusal = error
    if refusal is not None and refusal.code in GPU_GONE_CODES:
        raise refusal
    profile = profile_of(name, attributes, memory_bytes)
    if not profile:
        raise refusal or NvmlError(Return.UNKNOWN, "nvmlDeviceGetName", f"the name has no MIG profile: {name!r}")
    whole = "c." not in profile
    if attributes is not None:
        whole = attributes.compute_instance_slices == attributes.gpu_instance_slices
    return MigDevice(
        uuid=uuid,
        index=index,
        gpu_instance=gpu_instance,
        compute_instance=compute_instance,
        profile=profile,
        whole=whole,
        memory_bytes=None if attributes is None else attributes.memory_mb << 20,
        gpu_slices=None if attributes is None else attributes.gpu_instance_slices,
        compute_slices=None if attributes is None else attributes.compute_instance_slices,
        engines=None if attributes is None else attributes.engines,
    )


def _gigabytes(memory_mb: int, memory_bytes: int | None) -> int:
    """Return the size in a profile's name (go-nvlib, mig_profile.go): the memory in eighths of the GPU's, as whole GiB."""
    if not memory_bytes:
        return math.ceil(memory_mb / 1024)
    eighths = math.ceil((memory_mb << 23) / memory_bytes)
    return math.floor(eighths / 8 * math.ceil(memory_bytes / (1 << 30)) + 0.5)


def _with_caps(device: MigDevice, minor: int | None, minors: Mapping[str, int]) -> MigDevice:
    instance = f"gpu{minor}/gi{device.gpu_instance}"
    caps = minors.get(f"{instance}/access"), minors.get(f"{instance}/ci{device.compute_instance}/access")
    if caps == (device.gpu_instance_cap, device.compute_instance_cap):
        return device
    return replace(device, gpu_instance_cap=caps[0], compute_instance_cap=caps[1])
