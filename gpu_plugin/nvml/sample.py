"""One look at one GPU. Blocks: runs on a driver thread."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from gpu_plugin.devices.node import Gpu
from gpu_plugin.devices.nvml_h import NVLINK_STATE_INACTIVE, Return
from gpu_plugin.health.observation import CORE, Fault, Sample
from gpu_plugin.nvml import traits
from gpu_plugin.nvml.mig import GPU_GONE_CODES, Partition, read_partition
from gpu_plugin.nvml.plausible import flag, plausible
from gpu_plugin.nvml.port import Driver, Handle, NvmlError, never
from gpu_plugin.nvml.questions import (
    COUNTING_TURN,
    FUNCTIONS,
    PARTITION_TURN,
    READINGS,
    REMAP,
    TURNS,
    Plan,
    Reading,
    Shape,
    plan,
)

_FAULTS: dict[int, tuple[Fault, str]] = {
    Return.GPU_IS_LOST: (Fault.LOST, "the GPU is lost"),
    Return.RESET_REQUIRED: (Fault.RESET_REQUIRED, "the GPU must be reset"),
    Return.NOT_FOUND: (Fault.VANISHED, "the driver does not find the GPU any more"),
    Return.UNINITIALIZED: (Fault.DRIVER, "the driver is not open"),
    Return.DRIVER_NOT_LOADED: (Fault.DRIVER, "the driver is not loaded"),
    Return.LIB_RM_VERSION_MISMATCH: (Fault.DRIVER, "the driver and its library are of different versions"),
}

# Codes with which the GPU or the driver is out of reach if a core reading is refused so.
_OUT_OF_REACH = frozenset(_FAULTS)

_VITAL = frozenset({"temperature", "energy"})
"""Core readings that every GPU of use answers: UNKNOWN to one of them is the GPU's too, while a driver that never says anything
else to one of the younger questions must not cost a fleet."""

_ACTION = frozenset({"recovery_action"})

_NUMBERS: Mapping[str, frozenset[int]] = {reading.name: frozenset(reading.numbers) for reading in READINGS}
"""By field of a Sample, NVML's fields of which it is made."""

_NOT_CORE = frozenset(Sample.__struct_fields__) - CORE

_OF_LINKS = frozenset(reading.name for reading in READINGS if reading.per_link and reading.name not in FUNCTIONS)
"""Fields of a Sample that a part without NVLinks never answers."""


class Look(msgspec.Struct, frozen=True):
    """What a look brought: the sample, and through which handle.

    `partition` is None where it was not asked for, or where `partition_trouble` says why the driver did not tell.
    `partitionable` is False for a part that can never be partitioned into MIG devices. `unsupported` names the fields of a
    Sample that were asked for and that this part never answers: whoever looks again skips them. `gpu` is the GPU as it is known
    after the look, less how it is partitioned: the very same object where nothing of it is news.
    """

    handle: Handle
    sample: Sample
    gpu: Gpu
    partition: Partition | None = None
    partitionable: bool = True
    partition_trouble: str = ""
    unsupported: frozenset[str] = frozenset()


def look(
    driver: Driver,
    handle: Handle,
    gpu: Gpu,
    *,
    opening: int,
    full: bool = True,
    judging: bool = True,
    turn: int = 0,
    partitionable: bool = True,
    skip: frozenset[str] = frozenset(),
    binding: int | None = None,
    counting: int | None = None,
) -> Look:
    """The sample of a GPU and, on a full look or by turns, how it is partitioned if it is `partitionable` at all.

    A steady look asks what a fault shows in at once, and of the rest a part by `turn`; `Sample.asked` says what it asked.
    One that gets no answer to anything asks the GPU who it is: whether it can be reached is always told.
    Trouble with MIG devices is no fault of the GPU. Where health is not judged, only the core readings are asked for.

    Args:
        driver: an open driver.
        handle: the GPU's.
        gpu: what is known of it. A field that its probe found answered is supported, even if it is refused this once.
        opening: this opening of the driver, a number above 0 that no other has in this boot.
        full: whether everything is asked.
        judging: whether health is judged.
        turn: which steady look of this GPU it is, counted up by one.
        partitionable: whether to ask how it is partitioned.
        skip: fields of a Sample not to ask for.
        binding: what the host says of its binding, passed on in the sample.
        counting: that of the GPU's last full look (`Sample.counting`), passed on where it is not asked for.
    """
    # A partitioned GPU says nothing of its rows until it no longer is.
    skip = skip if judging else skip | _NOT_CORE
    unasked = skip.union(REMAP) if gpu.mig_devices else skip
    asking = plan(gpu.fields, gpu.nvlinks, unasked, None if full else turn % TURNS)
    seen, unsupported = sample(driver, handle, asking, binding=binding)
    answered = frozenset(name for name in unsupported if _answered(gpu, name))
    unsupported -= answered
    if seen.fault:
        seen = replace(seen, counting=counting, opening=opening)
        return Look(handle, seen, gpu, partitionable=partitionable, unsupported=unsupported)
    if answered:  # a part that answered the probe supports it
        unknown = seen.unknown | answered.intersection(_ACTION)
        seen = replace(seen, refused=seen.refused | (answered & CORE), unknown=unknown)
    if full and not gpu.nvlinks and "nvlinks" not in gpu.unsettled:
        unsupported |= _OF_LINKS - skip
    if not full or not judging:
        seen = replace(seen, asked=asking.asked)
    at = turn % TURNS
    # Without an answer from this opening, the counters would compare with no earlier reading, and a reset would not show.
    if "counting" not in skip and (full or at == COUNTING_TURN or counting is None):
        try:
            persistent = driver.persistence_mode(handle)
            counting = counting if persistent is None else 0 if persistent else opening
        except NvmlError as error:
            if error.unsupported:
                unsupported |= {"counting"}
    if counting is None or "counting" in skip | unsupported:
        counting = opening  # which keeps the GPU initialised: within one, counters can be compared whatever the mode is
    seen = replace(seen, counting=counting, opening=opening)
    known = traits.settled(driver, handle, gpu) if full or at == COUNTING_TURN else gpu
    if not partitionable or not (full or at == PARTITION_TURN):
        return Look(handle, seen, known, partitionable=partitionable, unsupported=unsupported)
    try:
        partition = read_partition(driver, handle, memory_bytes=gpu.memory_bytes, known=gpu.mig_devices)
    except NvmlError as error:
        return Look(handle, seen, known, partition_trouble=str(error), unsupported=unsupported)
    return Look(handle, seen, known, partition, partitionable=partition is not None, unsupported=unsupported)


def sample(
    driver: Driver, handle: Handle, asking: Plan, *, binding: int | None = None
) -> tuple[Sample, frozenset[str]]:
    """What the GPU answers to these questions, and the names of the fields of a Sample that were refused for lack of support.

    Nothing is learnt of a GPU that is at fault.

    A field that the driver refuses for another reason is None this time, and no fault: one strange answer makes no GPU
    unreadable. `Sample.refused` names the core readings among them. The look is a fault if the driver lost the GPU or wants it
    reset, if a core reading is refused with a code that says that the GPU or the driver is out of reach, and if the driver
    answered no question at all. A value that cannot be true is None (`plausible`).
    """
    values: dict[str, Any] = {}
    unsupported: list[str] = []
    refusals: list[NvmlError] = []
    core: set[str] = set()
    unknown: set[str] = set()

    def refused(error: NvmlError, names: Sequence[str], *, for_good: bool) -> None:
        """Takes in that these fields of a Sample were refused. Raises the error again if the look is a fault by it."""
        out_of_reach = GPU_GONE_CODES if CORE.isdisjoint(names) else _OUT_OF_REACH
        if error.code in out_of_reach or (error.code == Return.UNKNOWN and not _VITAL.isdisjoint(names)):
            raise error
        if for_good:
            unsupported.extend(names)
        else:
            refusals.append(error)
            core.update(CORE.intersection(names))
            unknown.update(_ACTION.intersection(names))

    try:
        for question in asking.questions:
            try:
                values.update(zip(question.names, question.ask(driver, handle), strict=True))
            except NvmlError as error:
                refused(error, question.names, for_good=error.unsupported)
        if asking.fields:
            try:
                told = iter(driver.field_values(handle, asking.fields))
            except NvmlError as error:
                refused(error, [reading.name for reading, _ in asking.readings], for_good=error.unsupported)
            else:
                for reading, fields in asking.readings:
                    answer = _field_value(reading, [*islice(told, len(fields))], values.get("nvlinks"))
                    if isinstance(answer, NvmlError):
                        refused(answer, (reading.name,), for_good=never(answer))
                    else:
                        values[reading.name] = answer
        if refusals and all(answer is None for answer in values.values()):
            raise refusals[-1]
        if not values:
            driver.uuid(handle)  # as good a question as any
    except NvmlError as error:
        return fault(error, binding), frozenset()
    known = plausible(values)
    unknown.update(name for name, value in known.items() if value is None and values[name] is not None)
    seen = Sample(**known, binding=binding, refused=frozenset(core), unknown=frozenset(unknown))
    return seen, frozenset(unsupported)


def fault(error: BaseException, binding: int | None = None) -> Sample:
    """The sample that a failed call is, be it refused by the driver or not."""
    if not isinstance(error, NvmlError):
        return Sample(fault=Fault.ERROR, detail=repr(error), binding=binding)
    kind, words = _FAULTS.get(error.code, (Fault.ERROR, "the driver cannot read the GPU"))
    return Sample(fault=kind, detail=f"{words} ({error})", binding=binding)


def _field_value(reading: Reading, values: Sequence[int | NvmlError], links: tuple[bool, ...] | None) -> Any:
    """What these values make of a field of a Sample: the answer; a refusal; None where that stays open this time.

    Never a sum that lacks a part: a smaller number would pass for growth once it is whole again. A link that is not active
    may have no counters: those of the others are the sum then.
    """
    gone = next((value for value in values if isinstance(value, NvmlError) and value.code in GPU_GONE_CODES), None)
    if gone is not None:
        return gone
    if reading.shape is Shape.LINK_SUM:
        return _over_links(values, len(reading.numbers), links)
    answered = [value for value in values if not isinstance(value, NvmlError)]
    if len(answered) < len(values):
        refused = [value for value in values if isinstance(value, NvmlError)]
        return next((error for error in refused if not never(error)), refused[0])
    if reading.shape is Shape.LINKS:
        if any(flag(value) is None for value in answered):
            return None
        return tuple(value != NVLINK_STATE_INACTIVE for value in answered)
    return flag(answered[0]) if reading.shape is Shape.FLAG else sum(answered)


def _over_links(
    values: Sequence[int | NvmlError], fields: int, links: tuple[bool, ...] | None
) -> int | NvmlError | None:
    """The sum of the values, so many for each link, of which these are active."""
    total: int | None = None
    for at, value in enumerate(values):
        if not isinstance(value, NvmlError):
            total = value + (total or 0)
        elif links is None:
            return None
        elif not never(value) or links[at // fields]:
            return value
    return total


def _answered(gpu: Gpu, name: str) -> bool:
    """Whether the GPU answered a question for that field of a Sample when it was probed, as far as that is known."""
    if name in REMAP:
        return gpu.remaps_rows
    return name in _NUMBERS and gpu.fields.issuperset(_NUMBERS[name])
