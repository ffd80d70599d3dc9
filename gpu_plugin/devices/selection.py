"""Which of a node's GPUs are served at all: the operator's include and exclude lists."""

from collections.abc import Iterable, Sequence

from gpu_plugin.devices.gpu_names import bus_id_numbers
from gpu_plugin.devices.node import Gpu


def matches(text: str, pattern: str) -> bool:
    """Whether all of `text` is what `pattern` describes: "*" stands for any text, all else for itself.

    The time it takes grows with the length of both, whatever the pattern: each part between two stars is looked for once,
    as far to the left as it can be, since no later place leaves more text for the parts after it.
    """
    first, *rest = pattern.split("*")
    if not rest:
        return text == pattern
    *middle, last = rest
    end = len(text) - len(last)
    at = len(first)
    if at > end or not text.startswith(first) or not text.endswith(last):
        return False
    for part in middle:
        at = text.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


def means(item: str, gpu: Gpu) -> bool:
    """Whether a list's item means this GPU: its index, its uuid, its PCI bus id (NVML's or sysfs's spelling), or its model."""
    if item.isdecimal():
        return int(item) == gpu.index
    if item.startswith("GPU-"):
        return item == gpu.uuid
    bus_id = bus_id_numbers(item)
    if bus_id is not None:
        return bus_id == bus_id_numbers(gpu.pci_bus_id)
    return matches(gpu.model, item)


def selected(gpus: Iterable[Gpu], include: Sequence[str], exclude: Sequence[str]) -> list[Gpu]:
    """The GPUs that are on `include` (or all, where that is empty) and not on `exclude`."""
    return [
        gpu
        for gpu in gpus
        if (not include or any(means(item, gpu) for item in include)) and not any(means(item, gpu) for item in exclude)
    ]


def unmatched(gpus: Sequence[Gpu], items: Iterable[str]) -> list[str]:
    """The items that mean none of these GPUs."""
    return [item for item in items if not any(means(item, gpu) for gpu in gpus)]
