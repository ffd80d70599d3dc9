"""One look at one GPU. Blocks: runs on a driver thread."""

from collections.abc import Callable

from gpu_plugin.health.observation import Sample
from gpu_plugin.nvml.port import Driver, Handle, NvmlError, Return

_FAULTS: dict[int, tuple[str, str]] = {
    Return.GPU_IS_LOST: ("lost", "the GPU is lost"),
    Return.RESET_REQUIRED: ("reset-required", "the GPU must be reset"),
}


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
