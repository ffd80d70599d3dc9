"""The values that a look reads from a GPU: a table of driver calls and NVML fields, and the choice for each look. Pure.

Each steady look reads all values that show a fault at once, and a part of the values that change slowly. NVML fields are read
with one call if the GPU model supports them; other values have a function each.
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any

import msgspec

from gpu_plugin.devices import nvml_h
from gpu_plugin.nvml.port import Driver, Field, Handle

TURNS = 6  # steady looks in which each slow value is read once: with a look every 15 s, changes show within 90 s

PARTITION_TURN = 0  # the turn that reads how the GPU is partitioned
COUNTING_TURN = 1  # the turn that reads whether it stays initialised by itself (persistence mode)


class Shape(Enum):
    """How a field of a Sample is computed from NVML fields."""

    SUM = "the sum of its fields"
    FLAG = "whether its field is not 0"
    LINKS = "of each NVLink, whether it is active"
    LINK_SUM = "the sum of its fields over all NVLinks"


class Question(msgspec.Struct, frozen=True):
    """The fields of a Sample that a call of the driver's port (`nvml/port.py`) returns, as a tuple if there are several.

    Steady looks make the call each time, or once in `TURNS` looks if it is `slow`. `calls` is its largest number of NVML calls.
    """

    names: tuple[str, ...]
    call: str
    slow: bool = False
    calls: int = 1

    def ask(self, driver: Driver, handle: Handle) -> Mapping[str, Any]:
        """Make the call, and return the values by field. Raises NvmlError."""
        answer = getattr(driver, self.call)(handle)
        return {self.names[0]: answer} if len(self.names) == 1 else dict(zip(self.names, answer, strict=True))


class Reading(msgspec.Struct, frozen=True):
    """The NVML fields from which a field of a Sample is computed; `slow` as in `Question`."""

    name: str
    numbers: tuple[int, ...]
    shape: Shape = Shape.SUM
    slow: bool = False

    @property
    def per_link(self) -> bool:
        """Whether NVML needs the number of an NVLink, as scopeId."""
        return self.shape in (Shape.LINKS, Shape.LINK_SUM)


# The fields for remapped rows, in the order of `RemappedRows`. A GPU does not report them while it is partitioned
# (MIG).
REMAP = ("remapped_correctable", "remapped_uncorrectable", "remap_pending", "remap_failure")

# Functions in the order of calls. All GPUs support the first functions, which return the error of a lost GPU.
QUESTIONS: tuple[Question, ...] = (
    Question(("temperature",), "temperature"),
    Question(("energy",), "total_energy"),
    Question(("memory_used",), "memory_used"),
    Question(("utilization",), "utilization"),
    Question(("margin",), "margin_temperature"),
    Question(("ecc_uncorrected",), "uncorrected_ecc_errors"),
    Question(REMAP, "remapped_rows"),
    Question(("clocks_event_reasons",), "clocks_event_reasons"),
    Question(("fabric",), "fabric"),
    Question(("sram_threshold",), "sram_threshold_exceeded", slow=True),
    Question(("unrepairable_memory",), "unrepairable_memory", slow=True),
    Question(("retired_pending",), "retired_pages_pending", slow=True),
    Question(("pcie_replays",), "pcie_replays", slow=True),
    Question(("pcie_width", "pcie_max_width"), "pcie_link", slow=True, calls=2),
    Question(("pcie_generation",), "pcie_generation", slow=True),
    Question(("pcie_max_generation",), "pcie_max_generation", slow=True),
    Question(("vgpu_licensed",), "vgpu_licensed", slow=True, calls=2),
    Question(("power",), "power_usage", slow=True),
    Question(("power_limit",), "power_limit", slow=True),
    Question(("nvlinks",), "nvlink_states", slow=True, calls=nvml_h.MAX_NVLINKS),
)

# NVML fields, which are read with one call. Uncorrected errors are not included: field 4 counts double-bit errors, but
# the function counts all uncorrected errors, of which newer GPU models have other kinds too.
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

# The function for each field of a Sample
FUNCTIONS: Mapping[str, Question] = {name: question for question in QUESTIONS for name in question.names}

# NVML fields for which a probe checks whether the GPU model supports them
PROBED: tuple[int, ...] = tuple(dict.fromkeys(number for reading in READINGS for number in reading.numbers))

# NVML fields of a link
LINK_FIELDS = frozenset(number for reading in READINGS if reading.per_link for number in reading.numbers)

_SLOW_READINGS = tuple(reading for reading in READINGS if reading.slow)


class Plan(msgspec.Struct, frozen=True):
    """The functions and NVML fields that one look reads. `fields` are read with one call, in the order of `readings`.

    `asked` are the names of the fields of a Sample that these can give.
    """

    questions: tuple[Question, ...]
    readings: tuple[tuple[Reading, tuple[Field, ...]], ...]
    asked: frozenset[str]
    fields: tuple[Field, ...]


@lru_cache(maxsize=512)  # the GPU models of a node times the turns
def plan(answered: frozenset[int], links: int, skip: frozenset[str], turn: int | None = None) -> Plan:
    """Return what a look reads from a GPU with `links` NVLinks, without the fields of a Sample in `skip`.

    `answered` are the NVML fields that the GPU supports according to its probe. If a value also has a function, the NVML field
    is used only if it is in `answered`. A steady look reads a part, by its `turn`, below `TURNS`; None: read everything.
    """
    chosen = [
        reading
        for reading in READINGS
        if reading.name not in skip
        and (links or not reading.per_link)
        and (answered.issuperset(reading.numbers) or reading.name not in FUNCTIONS)
    ]
    covered = {reading.name for reading in chosen}
    questions = [question for question in QUESTIONS if not skip.union(covered).issuperset(question.names)]
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
    """Assign each slow function to one of `TURNS` looks, so that all looks cost about the same, also with many GPUs.

    With more GPUs than turns, a round has neighboring turns of two GPUs, so no expensive turn may follow another.
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
