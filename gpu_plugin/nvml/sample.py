"""One look at one GPU. Blocks: runs on a driver thread."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from gpu_plugin.devices.node import Gpu
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.health.observation import Fault, Sample
from gpu_plugin.nvml.mig import Partition, read_partition
from gpu_plugin.nvml.port import Driver, Handle, NvmlError

_FAULTS: dict[int, tuple[Fault, str]] = {
    Return.GPU_IS_LOST: (Fault.LOST, "the GPU is lost"),
    Return.RESET_REQUIRED: (Fault.RESET_REQUIRED, "the GPU must be reset"),
    Return.NOT_FOUND: (Fault.VANISHED, "the driver does not find the GPU any more"),
    Return.UNINITIALIZED: (Fault.DRIVER, "the driver is not open"),
    Return.DRIVER_NOT_LOADED: (Fault.DRIVER, "the driver is not loaded"),
    Return.LIB_RM_VERSION_MISMATCH: (Fault.DRIVER, "the driver and its library are of different versions"),
}

_OUT_OF_REACH = frozenset(_FAULTS)
"""Codes that are the GPU's, whatever it was asked; any other leaves that one question open."""

_CORE = frozenset({"temperature", "energy"})
"""Fields that every GPU of use answers: UNKNOWN to one of them is the GPU's too, while a driver that never says anything
else to one of the younger questions must not cost a fleet."""

SAMPLED_FIELDS: Mapping[str, tuple[int, ...]] = {
    "recovery_action": (230,),
    "memory_temperature": (82,),
    "retired_pages": (29, 30),
    "nvlink_crc_errors": (38, 45),
    "nvlink_replays": (52,),
    "nvlink_recoveries": (59,),
    "nvlink_failed_recoveries": (214,),
    "pcie_fatal_errors": (180,),
}
"""Fields of a Sample and NVML's fields (nvml.h) of which each is the sum.

NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, _MEMORY_TEMP, _RETIRED_SBE and _RETIRED_DBE, _NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL and
_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL, _NVLINK_REPLAY_ERROR_COUNT_TOTAL, _NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS, _PCIE_COUNT_FATAL_ERROR.
"""

_REMAP = ("remap_pending", "remap_failure")

Ask = Callable[[Driver, Handle], tuple[Any, ...]]


def _remapped_rows(driver: Driver, handle: Handle) -> tuple[bool, bool]:
    rows = driver.remapped_rows(handle)
    return rows.pending, rows.failure


def _pcie_link(driver: Driver, handle: Handle) -> tuple[int, int]:
    link = driver.pcie_link(handle)
    return link.width, link.max_width


_QUESTIONS: Mapping[tuple[str, ...], Ask] = {
    ("temperature",): lambda driver, handle: (driver.temperature(handle),),
    ("energy",): lambda driver, handle: (driver.total_energy(handle),),
    ("margin",): lambda driver, handle: (driver.margin_temperature(handle),),
    ("ecc_uncorrected",): lambda driver, handle: (driver.uncorrected_ecc_errors(handle),),
    ("sram_threshold",): lambda driver, handle: (driver.sram_threshold_exceeded(handle),),
    _REMAP: _remapped_rows,
    ("retired_pending",): lambda driver, handle: (driver.retired_pages_pending(handle),),
    ("unrepairable_memory",): lambda driver, handle: (driver.unrepairable_memory(handle),),
    ("clocks_event_reasons",): lambda driver, handle: (driver.clocks_event_reasons(handle),),
    ("nvlinks",): lambda driver, handle: (driver.nvlink_states(handle),),
    ("fabric",): lambda driver, handle: (driver.fabric(handle),),
    ("pcie_width", "pcie_max_width"): _pcie_link,
    ("pcie_replays",): lambda driver, handle: (driver.pcie_replays(handle),),
}
"""Every other field of a Sample, and how it is asked for. First what every GPU answers: one that is lost says so there."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a look brought: the sample, and through which handle.

    `partition` is None where it was not asked for, or where `untold` says why the driver did not tell. `divisible` is False
    for a part that can never be cut into MIG devices. `unsupported` names the fields of a Sample that were asked for and
    that this part never answers: whoever looks again skips them. `gpu` is the GPU as it is known after the look, less how it
    is cut: the very same object where nothing of it is news.
    """

    handle: Handle
    sample: Sample
    gpu: Gpu
    partition: Partition | None = None
    divisible: bool = True
    untold: str = ""
    unsupported: frozenset[str] = frozenset()


def look(
    driver: Driver,
    handle: Handle,
    gpu: Gpu,
    *,
    opening: int,
    full: bool = True,
    turn: int = 0,
    divisible: bool = True,
    skip: frozenset[str] = frozenset(),
    binding: int | None = None,
    counting: int | None = None,
) -> Look:
    """The sample of a GPU and, on a full look, how it is cut if it is `divisible` at all.

    A steady look asks what a fault shows in at once, and of the rest a part by `turn`; `Sample.asked` says what it asked.
    Trouble with MIG devices is no fault of the GPU.

    Args:
        driver: an open driver.
        handle: the GPU's.
        gpu: what is known of it. A field that its probe found answered is supported, even if it is refused this once.
        opening: this opening of the driver, a number above 0 that no other has in this boot.
        full: whether everything is asked.
        turn: which steady look of this GPU it is, counted up by one.
        divisible: whether to ask how it is cut.
        skip: fields of a Sample not to ask for.
        binding: what the host says of its binding, passed on in the sample.
        counting: that of the GPU's last full look (`Sample.counting`), passed on where it is not asked for.
    """
    del turn
    # A GPU that is cut says nothing of its rows until it no longer is.
    seen, unsupported = sample(driver, handle, skip.union(_REMAP) if gpu.mig_devices else skip, binding=binding)
    unsupported = frozenset(name for name in unsupported if not _answered(gpu, name))
    if seen.fault or not full:
        return Look(handle, replace(seen, counting=counting), gpu, divisible=divisible, unsupported=unsupported)
    if "counting" in skip:
        counting = opening
    else:
        try:
            counting = 0 if driver.persistence_mode(handle) else opening
        except NvmlError as error:
            # An opening keeps the GPU initialised: within one, counters can be compared whatever the mode is.
            counting = opening if error.unsupported or counting is None else counting
            unsupported |= {"counting"} if error.unsupported else frozenset()
    seen = replace(seen, counting=counting)
    if not divisible:
        return Look(handle, seen, gpu, divisible=False, unsupported=unsupported)
    try:
        partition = read_partition(driver, handle, memory_bytes=gpu.memory_bytes, known=gpu.mig_devices)
    except NvmlError as error:
        return Look(handle, seen, gpu, untold=str(error), unsupported=unsupported)
    return Look(handle, seen, gpu, partition, divisible=partition is not None, unsupported=unsupported)


def sample(
    driver: Driver, handle: Handle, skip: frozenset[str] = frozenset(), *, binding: int | None = None
) -> tuple[Sample, frozenset[str]]:
    """Every field of a Sample but those to `skip`, and the names of those that were refused for lack of support.

    Nothing is learnt of a GPU that is at fault.

    What the driver refuses for another reason is None this time, and no fault: one strange answer makes no GPU unreadable.
    A fault it is where the code says that the GPU or the driver is out of reach, and where no question was answered at all.
    """
    questions, fields = _plan(skip)
    answers: dict[str, Any] = {}
    unsupported: list[str] = []
    refusal: NvmlError | None = None
    for names, ask in questions:
        try:
            answers.update(zip(names, ask(driver, handle), strict=True))
        except NvmlError as error:
            if error.code in _OUT_OF_REACH or (error.code == Return.UNKNOWN and not _CORE.isdisjoint(names)):
                return _faulty(error, binding), frozenset()
            if error.unsupported:
                unsupported += names
            else:
                refusal = error
    if refusal is not None and all(answer is None for answer in answers.values()):
        return _faulty(refusal, binding), frozenset()
    unsupported += [name for name in fields if name in answers and answers[name] is None]
    return Sample(**answers, binding=binding), frozenset(unsupported)


def fault(error: NvmlError) -> Sample:
    """The sample that a refusal of the driver is."""
    return _faulty(error, None)


def _faulty(error: NvmlError, binding: int | None) -> Sample:
    kind, words = _FAULTS.get(error.code, (Fault.ERROR, "the driver cannot read the GPU"))
    return Sample(fault=kind, detail=f"{words} ({error})", binding=binding)


def _answered(gpu: Gpu, name: str) -> bool:
    """Whether the GPU answered a question for that field of a Sample when it was probed, as far as that is known."""
    if name in _REMAP:
        return gpu.remaps_rows
    numbers = SAMPLED_FIELDS.get(name)
    return numbers is not None and gpu.fields.issuperset(numbers)


@lru_cache(maxsize=64)  # GPUs of one model skip the same
def _plan(skip: frozenset[str]) -> tuple[tuple[tuple[tuple[str, ...], Ask], ...], tuple[str, ...]]:
    """The questions to ask, one of them for all fields, and what the fields are called."""
    questions = [(names, ask) for names, ask in _QUESTIONS.items() if not skip.issuperset(names)]
    fields = tuple(name for name in SAMPLED_FIELDS if name not in skip)
    if fields:
        questions.append((fields, _all_of(SAMPLED_FIELDS[name] for name in fields)))
    return tuple(questions), fields


def _all_of(sums: Iterable[tuple[int, ...]]) -> Ask:
    """Asks for all these fields at once."""
    wanted = tuple(sums)
    numbers = tuple(number for parts in wanted for number in parts)

    def ask(driver: Driver, handle: Handle) -> tuple[int | None, ...]:
        values = dict(zip(numbers, driver.field_values(handle, numbers), strict=True))
        return tuple(_sum([values[number] for number in parts]) for parts in wanted)

    return ask


def _sum(parts: Sequence[int | None]) -> int | None:
    """None where a part is missing: a smaller number would pass for growth once it is there again."""
    there = [part for part in parts if part is not None]
    return sum(there) if len(there) == len(parts) else None
