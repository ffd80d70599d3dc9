"""Names of GPUs: the form in messages, and the forms that people use in commands and in lists of the settings. Pure."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gpu_plugin.config.errors import ConfigError

if TYPE_CHECKING:
    from gpu_plugin.devices.node import Gpu

_BUS_ID = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", re.IGNORECASE)
"""domain:bus:device.function, as NVML (8 digits of domain) or sysfs (4 digits) spells it; domain and function are optional."""

_INDEX = re.compile(r"[0-9]{1,5}", re.ASCII)

HOW = "its index, its uuid or how that begins, or its PCI bus id"


def called(gpu: "Gpu") -> str:
    """Return the GPU's name for people: `GPU 3 (0000:1b:00.0, GPU-6f1c...)`, without a bus id if that is unknown.

    A GPU without an index (-1) is `GPU 0000:1b:00.0 (GPU-6f1c...)`.
    """
    names = [*filter(None, (short_bus_id(gpu.pci_bus_id), gpu.uuid))]
    first = names.pop(0) if gpu.index < 0 else gpu.index
    return f"GPU {first}" + (f" ({', '.join(names)})" if names else "")


def bus_id_numbers(bus_id: str) -> tuple[int, int, int, int] | None:
    """Return domain, bus, device and function of a whole PCI bus id, in either spelling; None for any other text."""
    form = _BUS_ID.fullmatch(bus_id)
    if form is None or form[1] is None or form[4] is None:
        return None
    return int(form[1], 16), int(form[2], 16), int(form[3], 16), int(form[4])


def short_bus_id(bus_id: str) -> str:
    """Return a PCI bus id in sysfs's spelling, `0000:1b:00.0`; any other text unchanged."""
    numbers = bus_id_numbers(bus_id)
    return bus_id if numbers is None else "{:04x}:{:02x}:{:02x}.{}".format(*numbers)


def is_bus_id(name: str) -> bool:
    """Return True if this is surely a PCI bus id: two decimal numbers alone may also be a MIG device's index."""
    form = _BUS_ID.fullmatch(name)
    return form is not None and (form[1] is not None or form[4] is not None or not name.replace(":", "").isdecimal())


def named(name: str | int, gpus: "Sequence[Gpu]") -> "Gpu | None":
    """Return the GPU with this name, or None if no GPU has it.

    Args:
        name: an index, a uuid or its beginning (in any case), or a PCI bus id, with or without its domain and function.
        gpus: the GPUs of the node.

    Raises:
        ConfigError: the name fits several GPUs, or belongs to a MIG device.
    """
    found = _meant(str(name).strip(), gpus)
    if len(found) > 1:
        which = " and ".join(map(called, found[:3]))
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ConfigError(f"GPU {name}: it could be {which}{more}: give its whole uuid")
    return found[0] if found else None


def matches(text: str, pattern: str) -> bool:
    """Return True if `pattern` matches all of `text`: "*" matches any text, any other character only itself."""
    return fnmatchcase(text, re.sub("[?[]", r"[\g<0>]", pattern))


def means(item: str, gpu: "Gpu") -> bool:
    """Return True if a list's item names this GPU: by index, uuid, PCI bus id (NVML's or sysfs's spelling) or model."""
    if item.isdecimal():
        return int(item) == gpu.index
    if item.startswith("GPU-"):
        return item == gpu.uuid
    bus_id = bus_id_numbers(item)
    if bus_id is not None:
        return bus_id == bus_id_numbers(gpu.pci_bus_id)
    return matches(gpu.model, item)


def selected(gpus: "Iterable[Gpu]", include: Sequence[str], exclude: Sequence[str]) -> "list[Gpu]":
    """Return the GPUs that are in `include` (or all if it is empty) and not in `exclude`."""
    return [
        gpu
        for gpu in gpus
        if (not include or any(means(item, gpu) for item in include)) and not any(means(item, gpu) for item in exclude)
    ]


def unmatched(gpus: "Sequence[Gpu]", items: Iterable[str]) -> list[str]:
    """Return the items that match no GPU of these."""
    return [item for item in items if not any(means(item, gpu) for gpu in gpus)]


def _meant(name: str, gpus: "Sequence[Gpu]") -> "list[Gpu]":
    if _INDEX.fullmatch(name):
        return [gpu for gpu in gpus if gpu.index == int(name)]
    if form := _BUS_ID.fullmatch(name):
        return [gpu for gpu in gpus if _is_at(form, gpu.pci_bus_id)]
    lowered = name.lower()
    if whole := [gpu for gpu in gpus if gpu.uuid and gpu.uuid.lower() == lowered]:
        return whole
    for gpu in gpus:
        if lowered.startswith("mig-") and any(mig.uuid.lower().startswith(lowered) for mig in gpu.mig_devices):
            raise ConfigError(f"{name} is a MIG device of {called(gpu)}: name the GPU")
    beginning = lowered if lowered.startswith("gpu-") else f"gpu-{lowered}"
    return [gpu for gpu in gpus if len(beginning) > len("gpu-") and gpu.uuid.lower().startswith(beginning)]


def _is_at(form: re.Match[str], bus_id: str) -> bool:
    """Return True if a bus id matches a form, of which missing parts match any value."""
    own = _BUS_ID.fullmatch(bus_id)
    if own is None:
        return False
    pairs = zip(form.groups(), own.groups(), strict=True)
    return all(asked is None or (has is not None and int(asked, 16) == int(has, 16)) for asked, has in pairs)
