"""Compute the resources for the kubelet from the node's hardware and the settings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter

import msgspec

from gpu_plugin.config.choices import MIG_STRATEGIES, Functions
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.names import DOMAIN, resource_name_fault
from gpu_plugin.config.settings import Settings
from gpu_plugin.config.sharing import NamePattern
from gpu_plugin.config.words import are, counted
from gpu_plugin.devices.device import (
    MAX_LIST_BYTES,
    Device,
    Resource,
    device_id_fault,
    first_few,
    mig_device,
    mig_resource,
    shown_id,
    whole_gpu,
    withhold,
)
from gpu_plugin.devices.gpu_names import matches, selected, unmatched
from gpu_plugin.devices.node import Gpu, MigDevice, Node
from gpu_plugin.devices.sharing import Named, share

GPU_RESOURCE = f"{DOMAIN}/gpu"

# The display part of a DGX Station, which NVIDIA's own library leaves out, too (go-nvlib, device/api.go)
_SKIPPED_MODELS = frozenset({"DGX Display", "NVIDIA DGX Display"})

STRATEGIES: Functions[Callable[[Sequence[Gpu], Settings], tuple[list[Named], list[str]]]] = Functions(
    "MIG strategy", MIG_STRATEGIES, "MIG_STRATEGIES in gpu_plugin/config/choices.py", "gpu_plugin/devices/plan.py"
)
"""MIG strategies by name: functions from GPUs and settings to devices with their resource names, and warnings."""


class Plan(msgspec.Struct, frozen=True):
    """The resources of a node, and a warning for everything in it that the operator may not expect."""

    resources: tuple[Resource, ...] = ()
    warnings: tuple[str, ...] = ()


def served(gpu: Gpu) -> bool:
    """Return True if workloads may use a GPU of this model."""
    return gpu.model not in _SKIPPED_MODELS


def counted_as(gpu: Gpu, settings: Settings, mig: MigDevice | None = None) -> str:
    """Return the resource name of a whole GPU, or of a MIG device of it, before sharing."""
    if mig is None:
        return _named_by(settings.gpu_names, gpu.model) or GPU_RESOURCE
    default = mig_resource(mig.profile) if settings.mig_strategy == "mixed" else GPU_RESOURCE
    return _named_by(settings.mig_names, mig.profile) or default


def served_gpus(node: Node, settings: Settings) -> tuple[Gpu, ...]:
    """Return the GPUs that workloads may use and the operator has not excluded, by index."""
    known = [gpu for gpu in sorted(node.gpus, key=attrgetter("index", "uuid")) if served(gpu)]
    return tuple(selected(known, settings.include_gpus, settings.exclude_gpus))


def plan(node: Node, settings: Settings) -> Plan:
    """Return the resources of a node, in the order of their first device; devices in the order of their indices.

    Args:
        node: the result of the probe.
        settings: the operator's settings.

    Raises:
        ConfigError: the settings are impossible on this node: they have a device in two sharing entries, or lead to a list of
            devices that is longer than the kubelet reads.
    """
    known = [gpu for gpu in sorted(node.gpus, key=attrgetter("index", "uuid")) if served(gpu)]
    gpus = served_gpus(node, settings)
    warnings = [
        f"{first_few(items)} on the list of GPUs to {word} {are(len(items))} none of this node's GPUs"
        for word, listed in (("include", settings.include_gpus), ("exclude", settings.exclude_gpus))
        if (items := unmatched([*known, *node.absent], listed))
    ]
    if known and not gpus:
        warnings.append(
            f"no GPU is served: the lists of GPUs to include and exclude leave none of this node's {len(known)}"
        )
    named, more = STRATEGIES[settings.mig_strategy](gpus, settings)
    shared, and_more = share(_valid(named, warnings), settings.sharing)
    resources = tuple(Resource(name, _listable(name, devices, warnings)) for name, devices in shared.items())
    for resource in resources:
        check_length(resource)
    return Plan(resources, (*warnings, *more, *and_more))


@STRATEGIES("none")
def _none(gpus: Sequence[Gpu], settings: Settings) -> tuple[list[Named], list[str]]:
    """Offer whole GPUs. A GPU in MIG mode is withheld: CUDA only uses its MIG devices (MIG User Guide, CUDA visibility)."""
    in_mig_mode = [gpu for gpu in gpus if gpu.mig_enabled and not gpu.unreadable]
    if not in_mig_mode:
        return [_whole(gpu, settings) for gpu in gpus], []
    indices = ",".join(str(gpu.index) for gpu in in_mig_mode)
    why = (
        f"MIG mode is on and MIG strategy none offers no MIG devices: set the strategy to single or mixed, or turn MIG mode off "
        f"(nvidia-smi -i {indices} -mig 0)"
    )
    named = [_whole(gpu, settings, why if gpu in in_mig_mode else "") for gpu in gpus]
    return named, [f"{counted(len(in_mig_mode), 'GPU')} ({indices}) {are(len(in_mig_mode))} not offered: {why}"]


def _as_partitioned(gpus: Sequence[Gpu], settings: Settings) -> list[Named]:
    """Return the MIG devices of GPUs in MIG mode, and all other GPUs as whole GPUs."""
    return [
        named
        for gpu in gpus
        for named in (
            [_mig_device(gpu, mig, settings) for mig in gpu.mig_devices] if gpu.mig_enabled else [_whole(gpu, settings)]
        )
    ]


@STRATEGIES("mixed")
def _mixed(gpus: Sequence[Gpu], settings: Settings) -> tuple[list[Named], list[str]]:
    """Offer MIG devices by profile, and whole GPUs. A compute instance smaller than its GPU instance has a name, too."""
    return _as_partitioned(gpus, settings), _empty(gpus)


@STRATEGIES("single")
def _single(gpus: Sequence[Gpu], settings: Settings) -> tuple[list[Named], list[str]]:
    """Offer MIG devices as GPUs. If the GPUs of the node are not all partitioned equally, withhold all devices, and warn."""
    named = _as_partitioned(gpus, settings)
    why = _unequal(gpus)
    if not why:
        return named, _empty(gpus)
    withheld = [Named(n.name, withhold(n.device, n.device.withheld or why), n.aliases) for n in named]
    return withheld, [*_empty(gpus), f"no device is offered: {why}"]


def _unequal(gpus: Sequence[Gpu]) -> str:
    """Return the reason why MIG strategy single cannot serve these GPUs; empty if it can."""
    readable = [gpu for gpu in gpus if not gpu.unreadable]
    if len({gpu.mig_enabled for gpu in readable}) > 1:
        modes = ", ".join(f"{gpu.index} {'on' if gpu.mig_enabled else 'off'}" for gpu in readable)
        return f"MIG strategy single needs the same MIG mode on all GPUs; MIG mode by GPU index: {modes}. Use mixed"
    profiles = sorted({mig.profile for gpu in readable if gpu.mig_enabled for mig in gpu.mig_devices})
    if len(profiles) > 1:
        return f"MIG strategy single needs MIG devices of one profile; this node has {', '.join(profiles)}. Use mixed"
    return ""


def _empty(gpus: Iterable[Gpu]) -> list[str]:
    return [
        f"GPU {gpu.index} ({gpu.uuid}) is in MIG mode and has no MIG devices: nothing of it is offered. Make some "
        f"(nvidia-smi mig -i {gpu.index} -lgip lists the profiles), or turn MIG mode off (nvidia-smi -i {gpu.index} -mig 0)"
        for gpu in gpus
        if gpu.mig_enabled and not gpu.mig_devices and not gpu.unreadable
    ]


def _whole(gpu: Gpu, settings: Settings, why_not: str = "") -> Named:
    name = counted_as(gpu, settings)
    return Named(name, withhold(whole_gpu(gpu), gpu.unreadable or why_not), (str(gpu.index), gpu.uuid))


def _mig_device(gpu: Gpu, mig: MigDevice, settings: Settings) -> Named:
    legacy = f"MIG-{gpu.uuid}/{mig.gpu_instance}/{mig.compute_instance}"  # the name in drivers before 470
    aliases = (f"{gpu.index}:{mig.index}", mig.uuid, legacy)
    reason = gpu.unreadable or ""
    if not reason and settings.pass_device_specs and None in (mig.gpu_instance_cap, mig.compute_instance_cap):
        reason = "its capability nodes are not known: does /proc/driver/nvidia-caps/mig-minors exist here?"
    device = withhold(mig_device(gpu, mig), reason)
    return Named(counted_as(gpu, settings, mig), device, aliases)


def _named_by(patterns: Iterable[NamePattern], text: str) -> str:
    """Return the name of the first pattern that matches; empty if no pattern matches."""
    return next((pattern.name for pattern in patterns if matches(text, pattern.pattern)), "")


def _valid(named: Iterable[Named], warnings: list[str]) -> Mapping[str, list[Named]]:
    """Return the devices by resource name. Leave out devices that no kubelet would accept, with a warning."""
    by_name: dict[str, list[Named]] = {}
    seen: set[str] = set()
    for one in named:
        if one.device.id in seen:
            warnings.append(f"{one.name}: two devices claim the id {one.device.id}; the second one is not offered")
            continue
        seen.add(one.device.id)
        by_name.setdefault(one.name, []).append(one)
    for name in list(by_name):
        fault = resource_name_fault(name)
        if fault:
            left_out = by_name.pop(name)
            warnings.append(f"{len(left_out)} devices are not offered, the first is {left_out[0].device.id}: {fault}")
    return by_name


def _listable(name: str, devices: Sequence[Device], warnings: list[str]) -> tuple[Device, ...]:
    """Return the devices with valid ids. Add a warning if others are left out."""
    faulty = [device for device in devices if device_id_fault(device.id)]
    if not faulty:
        return tuple(devices)
    first = faulty[0].id
    warnings.append(
        f"{name}: {counted(len(faulty), 'device')} {are(len(faulty))} not offered, the first is {shown_id(first)}: "
        f"{device_id_fault(first)}"
    )
    return tuple(device for device in devices if not device_id_fault(device.id))


def list_bytes(resource: Resource) -> int:
    """Return the length in bytes of a list of these devices if all are unhealthy, which is longer than healthy."""
    return sum(_device_bytes(len(device.id.encode()), device.numa) for device in resource.devices)


_UNHEALTHY_BYTES = 11  # bytes of the field with "Unhealthy": its tag, its length, and the word


@lru_cache(256)
def _device_bytes(of_id: int, numa: tuple[int, ...]) -> int:
    """Return the bytes of an unhealthy device in a list in protobuf (v1beta1.Device), with an id of `of_id` bytes."""
    nodes = sum(_sized(0 if node == 0 else 1 + _varint_bytes(node)) for node in numa)
    return _sized(_sized(of_id) + _UNHEALTHY_BYTES + (_sized(nodes) if numa else 0))


def _sized(size: int) -> int:
    """Return the bytes of a field with a value of `size` bytes: its tag, its length, and the value."""
    return 1 + _varint_bytes(size) + size


def _varint_bytes(value: int) -> int:
    return max(1, (value.bit_length() + 6) // 7)


def fitting(devices: Iterable[Device], room: int) -> tuple[Device, ...]:
    """Return the devices that fit into a list of `room` bytes, in order."""
    kept = []
    for device in devices:
        size = _device_bytes(len(device.id.encode()), device.numa)
        if size <= room:
            kept.append(device)
            room -= size
    return tuple(kept)


def check_length(resource: Resource) -> None:
    """Raise ConfigError if a list of these devices is longer than a kubelet reads."""
    size = list_bytes(resource)
    if size > MAX_LIST_BYTES:
        raise ConfigError(
            f"{resource.name}: {len(resource.devices)} devices make a list of {size} bytes and the kubelet reads "
            f"{MAX_LIST_BYTES}: ask for fewer replicas"
        )
