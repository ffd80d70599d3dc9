"""One look at one GPU. Blocks: runs on a driver thread."""

from collections.abc import Callable
from dataclasses import dataclass

from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.observation import Sample
from gpu_plugin.nvml.mig import Partition, read_partition
from gpu_plugin.nvml.port import Driver, Handle, NvmlError, Return

_FAULTS: dict[int, tuple[str, str]] = {
    Return.GPU_IS_LOST: ("lost", "the GPU is lost"),
    Return.RESET_REQUIRED: ("reset-required", "the GPU must be reset"),
}


@dataclass(frozen=True, slots=True)
class Look:
    """What a look brought: the sample, and through which handle.

    `partition` is None where it was not asked for, or where `untold` says why the driver did not tell. `divisible` is False
    for a part that can never be cut into MIG devices.
    """

    handle: Handle
    sample: Sample
    partition: Partition | None = None
    divisible: bool = True
    untold: str = ""


def look(driver: Driver, handle: Handle, gpu: Gpu, *, divisible: bool = True) -> Look:
    """The sample of a GPU, and how it is cut if it is `divisible` at all; trouble with its MIG devices is no fault of it."""
    seen = sample(driver, handle)
    if seen.fault or not divisible:
        return Look(handle, seen, divisible=divisible)
    try:
        partition = read_partition(driver, handle, memory_bytes=gpu.memory_bytes, known=gpu.mig_devices)
    except NvmlError as error:
        return Look(handle, seen, untold=str(error))
    return Look(handle, seen, partition, divisible=partition is not None)


def sample(driver: Driver, handle: Handle) -> Sample:
    """Temperature and energy of a GPU; a driver that refuses for more than lack of support is the sample's fault."""
    try:
        return Sample(
            temperature=_if_supported(lambda: driver.temperature(handle)),
            energy=_if_supported(lambda: driver.total_energy(handle)),
        )
    except NvmlError as error:
        return fault(error)


def fault(error: NvmlError) -> Sample:
    """The sample that a refusal of the driver is."""
    kind, words = _FAULTS.get(error.code, ("error", "the driver cannot read the GPU"))
    return Sample(fault=kind, detail=f"{words} ({error})")


def _if_supported(question: Callable[[], int]) -> int | None:
    try:
        return question()
    except NvmlError as error:
        if error.unsupported:
            return None
        raise
