"""A look: reads the health values of one GPU. Blocks: run it on a driver thread."""

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
from gpu_plugin.nvml.port import Driver, Handle, NvmlError, is_permanent
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

# Codes with which a refused core value shows that the GPU or the driver is out of reach.
_OUT_OF_REACH = frozenset(_FAULTS)

# Core values that each working GPU reports. If such a value is refused as UNKNOWN, the GPU is at fault. For newer
# values this code does not count, since a driver might return it always.
_VITAL = frozenset({"temperature", "energy"})

_ACTION = frozenset({"recovery_action"})

# The NVML fields of each field of a Sample
_NUMBERS: Mapping[str, frozenset[int]] = {reading.name: frozenset(reading.numbers) for reading in READINGS}

_NOT_CORE = frozenset(Sample.__struct_fields__) - CORE

# Fields of a Sample that a GPU without NVLinks never has
_OF_LINKS = frozenset(reading.name for reading in READINGS if reading.per_link and reading.name not in FUNCTIONS)


class Look(msgspec.Struct, frozen=True):
    """The result of a look: the sample, and the handle used.

    `partition` is None if it was not read, or could not be read due to `partition_trouble`. `partitionable` is False if the
    GPU can never be partitioned into MIG devices. `unsupported` names the fields of a Sample that were read and that the GPU
    does not support, so that further looks skip them. `gpu` is the GPU after the look, without changes of its partition; the
    same object if nothing changed.
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
    """Read the sample of a GPU and, on a full look or by turns, its partition if it is `partitionable`.

    A steady look reads all values that show a fault at once, and a part of the others by `turn`; `Sample.asked` has their
    names. If no value could be read, the uuid is read, so that each look shows whether the GPU can be reached. Trouble with
    MIG devices is no fault of the GPU. If health is not judged, only the core values are read.

    Args:
        driver: an open driver.
        handle: the GPU's handle.
        gpu: the known description. A field that the probe could read is supported, even if it is refused this time.
        opening: the number of this opening of the driver: above 0 and unique in this boot.
        full: whether to read everything.
        judging: whether health is judged.
        turn: the number of this look at the GPU, counted up by one.
        partitionable: whether to read its partition.
        skip: fields of a Sample not to read.
        binding: the driver's binding from the host, copied to the sample.
        counting: `Sample.counting` of the GPU's last full look, copied if it is not read.
    """
    # A partitioned GPU does not report its remapped rows.
    skip = skip if judging else skip | _NOT_CORE
    unasked = skip.union(REMAP) if gpu.mig_devices else skip
    asking = plan(gpu.fields, gpu.nvlinks, unasked, None if full else turn % TURNS)
    seen, unsupported = sample(driver, handle, asking, binding=binding)
    answered = frozenset(name for name in unsupported if _answered(gpu, name))
    unsupported -= answered
    if seen.fault:
        seen = replace(seen, counting=counting, opening=opening)
        return Look(handle, seen, gpu, partitionable=partitionable, unsupported=unsupported)
    if answered:  # the GPU supports a field that the probe could read
        unknown = seen.unknown | answered.intersection(_ACTION)
        seen = replace(seen, refused=seen.refused | (answered & CORE), unknown=unknown)
    if full and not gpu.nvlinks and "nvlinks" not in gpu.unsettled:
        unsupported |= _OF_LINKS - skip
    if not full or not judging:
        seen = replace(seen, asked=asking.asked)
    at = turn % TURNS
    # Without a value for this opening, counters would not be compared with earlier values, and a reset would go unnoticed.
    if "counting" not in skip and (full or at == COUNTING_TURN or counting is None):
        try:
            persistent = driver.persistence_mode(handle)
            counting = counting if persistent is None else 0 if persistent else opening
        except NvmlError as error:
            if error.unsupported:
                unsupported |= {"counting"}
    if counting is None or "counting" in skip | unsupported:
        counting = opening  # an open driver keeps the GPU initialised, so counters can be compared in any mode
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
    """Read these values. Return the sample, and the names of the fields of a Sample that the GPU does not support.

    A faulty GPU has no unsupported fields.

    If a field is refused for another reason, its value is None this time. This is no fault: one odd answer does not make the
    GPU unreadable. `Sample.refused` names the core values among these fields. The sample is a fault if the driver lost the GPU or
    requires its reset, if a core value is refused with a code that means that the GPU or the driver is out of reach, and if
    all values are refused. Values that cannot be true become None (`plausible`).
    """
    values: dict[str, Any] = {}
    unsupported: list[str] = []
    refusals: list[NvmlError] = []
    core: set[str] = set()
    unknown: set[str] = set()

    def refused(error: NvmlError, names: Sequence[str], *, for_good: bool) -> None:
        """Record that these fields of a Sample were refused. Raise the error again if it makes the sample a fault."""
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
                values.update(question.ask(driver, handle))
            except NvmlError as error:
                refused(error, question.names, for_good=error.unsupported)
        if asking.fields:
            try:
                answers = iter(driver.field_values(handle, asking.fields))
            except NvmlError as error:
                refused(error, [reading.name for reading, _ in asking.readings], for_good=error.unsupported)
            else:
                for reading, fields in asking.readings:
                    answer = _field_value(reading, [*islice(answers, len(fields))], values.get("nvlinks"))
                    if isinstance(answer, NvmlError):
                        refused(answer, (reading.name,), for_good=is_permanent(answer))
                    else:
                        values[reading.name] = answer
        if refusals and all(answer is None for answer in values.values()):
            raise refusals[-1]
        if not values:
            driver.uuid(handle)  # any call shows whether the GPU can be reached
    except NvmlError as error:
        return fault(error, binding), frozenset()
    known = plausible(values)
    unknown.update(name for name, value in known.items() if value is None and values[name] is not None)
    seen = Sample(**known, binding=binding, refused=frozenset(core), unknown=frozenset(unknown))
    return seen, frozenset(unsupported)


def fault(error: BaseException, binding: int | None = None) -> Sample:
    """Return the sample for a failed call, whether the driver refused it or the call raised another error."""
    if not isinstance(error, NvmlError):
        return Sample(fault=Fault.ERROR, detail=repr(error), binding=binding)
    kind, words = _FAULTS.get(error.code, (Fault.ERROR, "the driver cannot read the GPU"))
    return Sample(fault=kind, detail=f"{words} ({error})", binding=binding)


def _field_value(reading: Reading, values: Sequence[int | NvmlError], links: tuple[bool, ...] | None) -> Any:
    """Compute the value of a field of a Sample: the value, an error, or None if it stays unknown this time.

    Returns no partial sum, since the next full sum would look like growth. The sum of a link value may lack links that are
    not active, which may have no counters.
    """
    gone = next((value for value in values if isinstance(value, NvmlError) and value.code in GPU_GONE_CODES), None)
    if gone is not None:
        return gone
    if reading.shape is Shape.LINK_SUM:
        return _over_links(values, len(reading.numbers), links)
    answered = [value for value in values if not isinstance(value, NvmlError)]
    if len(answered) < len(values):
        refused = [value for value in values if isinstance(value, NvmlError)]
        return next((error for error in refused if not is_permanent(error)), refused[0])
    if reading.shape is Shape.LINKS:
        if any(flag(value) is None for value in answered):
            return None
        return tuple(value != NVLINK_STATE_INACTIVE for value in answered)
    return flag(answered[0]) if reading.shape is Shape.FLAG else sum(answered)


def _over_links(
    values: Sequence[int | NvmlError], fields: int, links: tuple[bool, ...] | None
) -> int | NvmlError | None:
    """Return the sum of the values, `fields` of them for each link. `links` has for each link whether it is active."""
    total: int | None = None
    for at, value in enumerate(values):
        if not isinstance(value, NvmlError):
            total = value + (total or 0)
        elif links is None:
            return None
        elif not is_permanent(value) or links[at // fields]:
            return value
    return total


def _answered(gpu: Gpu, name: str) -> bool:
    """Return whether the GPU's probe could read this field of a Sample, as far as known."""
    if name in REMAP:
        return gpu.remaps_rows
    return name in _NUMBERS and gpu.fields.issuperset(_NUMBERS[name])
