"""What a look asks of a GPU: the table of its questions, and which of them a look asks. Pure but for the calls themselves.

A steady look asks what a fault shows in at once every time, and of the slow-changing rest one question after the other. What
NVML tells as fields comes in one call for all of them, where the part answers those; else each has a function of its own.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any

import msgspec

from gpu_plugin.devices import nvml_h
from gpu_plugin.nvml.port import Driver, Field, Handle

TURNS = 6  # steady looks in which each slow question is asked once: at a look every 15 s nothing is noticed later than after 90 s

PARTITION_TURN = 0
COUNTING_TURN = 1
"""In which of them it is asked how the GPU is partitioned, and whether it stays initialised by itself."""


class Shape(Enum):
    """What a field of a Sample is made of."""

    SUM = "the sum of its fields"
    FLAG = "whether its field is not 0"
    LINKS = "of each NVLink, whether it is active"
    LINK_SUM = "the sum of its fields over all NVLinks"


class Question(msgspec.Struct, frozen=True):
    """A function that answers these fields of a Sample.

    Steady looks ask it every time, unless it is `slow`: once in so many then. `calls` is how many calls of NVML it makes at most.
    """

    names: tuple[str, ...]
    ask: Callable[[Driver, Handle], tuple[Any, ...]]
    slow: bool = False
    calls: int = 1


class Reading(msgspec.Struct, frozen=True):
    """NVML's fields of which this field of a Sample is made; `slow` as with a question."""

    name: str
    numbers: tuple[int, ...]
    shape: Shape = Shape.SUM
    slow: bool = False

    @property
    def per_link(self) -> bool:
        """Whether NVML wants to know of which NVLink, as scopeId."""
        return self.shape in (Shape.LINKS, Shape.LINK_SUM)


REMAP = ("remapped_correctable", "remapped_uncorrectable", "remap_pending", "remap_failure")
"""What a GPU says of its rows, in the order of `RemappedRows`, though not while it is partitioned into MIG devices."""

QUESTIONS: tuple[Question, ...] = (
    Question(("temperature",), lambda driver, handle: (driver.temperature(handle),)),
    Question(("energy",), lambda driver, handle: (driver.total_energy(handle),)),
    Question(("memory_used",), lambda driver, handle: (driver.memory_used(handle),)),
    Question(("utilization",), lambda driver, handle: (driver.utilization(handle),)),
    Question(("margin",), lambda driver, handle: (driver.margin_temperature(handle),)),
    Question(("ecc_uncorrected",), lambda driver, handle: (driver.uncorrected_ecc_errors(handle),)),
    Question(REMAP, lambda driver, handle: driver.remapped_rows(handle)),
    Question(("clocks_event_reasons",), lambda driver, handle: (driver.clocks_event_reasons(handle),)),
    Question(("fabric",), lambda driver, handle: (driver.fabric(handle),)),
    Question(("sram_threshold",), lambda driver, handle: (driver.sram_threshold_exceeded(handle),), slow=True),
    Question(("unrepairable_memory",), lambda driver, handle: (driver.unrepairable_memory(handle),), slow=True),
    Question(("retired_pending",), lambda driver, handle: (driver.retired_pages_pending(handle),), slow=True),
    Question(("pcie_replays",), lambda driver, handle: (driver.pcie_replays(handle),), slow=True),
    Question(("pcie_width", "pcie_max_width"), lambda driver, handle: driver.pcie_link(handle), slow=True, calls=2),
    Question(("pcie_generation",), lambda driver, handle: (driver.pcie_generation(handle),), slow=True),
    Question(("pcie_max_generation",), lambda driver, handle: (driver.pcie_max_generation(handle),), slow=True),
    Question(("vgpu_licensed",), lambda driver, handle: (driver.vgpu_licensed(handle),), slow=True, calls=2),
    Question(("power",), lambda driver, handle: (driver.power_usage(handle),), slow=True),
    Question(("power_limit",), lambda driver, handle: (driver.power_limit(handle),), slow=True),
    Question(("nvlinks",), lambda driver, handle: (driver.nvlink_states(handle),), slow=True, calls=nvml_h.MAX_NVLINKS),
)
"""Functions, in the order in which they are asked. First what every GPU answers: one that is lost says so there."""

READINGS: tuple[Reading, ...] = (
    Reading("energy", (nvml_h.FI_TOTAL_ENERGY_CONSUMPTION,)),
    Reading("recovery_action", (nvml_h.FI_GET_GPU_RECOVERY_ACTION,)),
    Reading("memory_temperature", (nvml_h.FI_MEMORY_TEMP,)),
    Reading("remap_pending", (nvml_h.FI_REMAPPED_PENDING,), Shape.FLAG),
    Reading("remap_failure", (nvml_h.FI_REMAPPED_FAILURE,), Shape.FLAG),
    Reading("retired_pending", (nvml_h.FI_RETIRED_PENDING,), Shape.FLAG),
    Reading("retired_pages", (nvml_h.FI_RETIRED_SBE, nvml_h.FI_RETIRED_DBE)),
    Reading("pcie_replays", (nvml_h.FI_PCIE_REPLAY_COUNTER,)),
    Reading("pcie_fatal_errors", (nvml_h.FI_PCIE_COUNT_FATAL_ERROR,)),
    Reading("power", (nvml_h.FI_POWER_INSTANT,)),
    Reading("power_limit", (nvml_h.FI_POWER_CURRENT_LIMIT,)),
    Reading("ecc_corrected", (nvml_h.FI_ECC_SBE_VOL_TOTAL,)),
    Reading("remapped_correctable", (nvml_h.FI_REMAPPED_COR,)),
    Reading("remapped_uncorrectable", (nvml_h.FI_REMAPPED_UNC,)),
    Reading("nvlinks", (nvml_h.FI_NVLINK_GET_STATE,), Shape.LINKS),
    Reading(
        "nvlink_crc_errors",
        (nvml_h.FI_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, nvml_h.FI_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL),
        Shape.LINK_SUM,
        slow=True,
    ),
    Reading(
        "nvlink_failed_recoveries",
        (nvml_h.FI_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,),
        Shape.LINK_SUM,
        slow=True,
    ),
)
"""NVML's fields, asked for in one call. The uncorrected errors are not among them: field 4 counts double-bit errors, and the
function uncorrected ones, which later parts have of other kinds too."""

FUNCTIONS: Mapping[str, Question] = {name: question for question in QUESTIONS for name in question.names}
"""By field of a Sample, the function that answers it."""

PROBED: tuple[int, ...] = tuple(dict.fromkeys(number for reading in READINGS for number in reading.numbers))
"""NVML's fields of which a probe finds out whether a part answers them."""

LINK_FIELDS = frozenset(number for reading in READINGS if reading.per_link for number in reading.numbers)
"""Those of them that are a link's."""

_SLOW_READINGS = tuple(reading for reading in READINGS if reading.slow)


class Plan(msgspec.Struct, frozen=True):
    """What one look asks: functions, and readings with their fields, which are to be asked for in this order in one call.

    `asked` are the names of the fields of a Sample that this can answer.
    """

    questions: tuple[Question, ...]
    readings: tuple[tuple[Reading, tuple[Field, ...]], ...]
    asked: frozenset[str]
    fields: tuple[Field, ...]


@lru_cache(maxsize=512)  # models of a node, times the turns
def plan(answered: frozenset[int], links: int, skip: frozenset[str], turn: int | None = None) -> Plan:
    """What a look asks of a part that has so many NVLinks, less the fields of a Sample to `skip`.

    `answered` are NVML's fields that its probe found answered; one that has a function too is asked for only if it is among them.
    A steady look asks only some, by its `turn`, below `TURNS`; None: everything is asked.
    """
    chosen = [
        reading
        for reading in READINGS
        if reading.name not in skip
        and (links or not reading.per_link)
        and (answered.issuperset(reading.numbers) or reading.name not in FUNCTIONS)
    ]
    told = {reading.name for reading in chosen}
    questions = [question for question in QUESTIONS if not skip.union(told).issuperset(question.names)]
    if turn is not None:
        of_now = _SLOW_READINGS[turn % len(_SLOW_READINGS)]
        chosen = [reading for reading in chosen if not reading.slow or reading is of_now]
        mine = _spread(questions)
        questions = [question for question in questions if mine.get(question, turn) == turn]
    readings = tuple((reading, _fields(reading, links)) for reading in chosen)
    names = [name for question in questions for name in question.names]
    return Plan(
        tuple(questions),
        readings,
        frozenset([*names, *(reading.name for reading in chosen)]) - skip,
        tuple(field for _, fields in readings for field in fields),
    )


def _spread(questions: Iterable[Question]) -> Mapping[Question, int]:
    """In which of `TURNS` looks each slow question is asked, so that looks cost about the same, and rounds of many GPUs, too.

    With more GPUs than turns, some turns that follow each other are two GPUs' in one round: none is laden beside a heavy one.
    """
    load = [0] * TURNS
    load[PARTITION_TURN] = load[COUNTING_TURN] = 1
    turns: dict[Question, int] = {}
    slow = [question for question in questions if question.slow]
    for question in sorted(slow, key=lambda each: -each.calls):
        turns[question] = min(range(TURNS), key=lambda at: (load[at], load[at - 1] + load[(at + 1) % TURNS]))
        load[turns[question]] += question.calls
    return turns


def _fields(reading: Reading, links: int) -> tuple[Field, ...]:
    if not reading.per_link:
        return tuple(Field(number) for number in reading.numbers)
    return tuple(Field(number, link) for link in range(links) for number in reading.numbers)
