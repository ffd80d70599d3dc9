from typing import Any, cast

import msgspec
import pytest

from gpu_plugin.devices.node import Gpu
from gpu_plugin.devices.nvml_h import MAX_NVLINKS, UNSUPPORTED, Return, Threshold
from gpu_plugin.health.observation import CORE, Fabric, Fault, Sample
from gpu_plugin.nvml import traits
from gpu_plugin.nvml.port import Driver, Field, Handle, NvmlError, PcieLink, RemappedRows
from gpu_plugin.nvml.questions import FUNCTIONS, LINK_FIELDS, PROBED, READINGS, REMAP, TURNS, plan
from gpu_plugin.nvml.sample import fault, look, sample
from gpu_plugin.simulation import profile
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost

FIELDS = (
    set(Sample.__struct_fields__)
    - {"fault", "detail", "binding", "counting", "asked", "refused", "opening"}
    - {"unknown"}
)
"""Fields of a sample that the driver reports."""

BY_FIELD_ALONE = {reading.name for reading in READINGS} - set(FUNCTIONS)

CALLS = {
    "temperature": {"temperature"},
    "total_energy": {"energy"},
    "margin_temperature": {"margin"},
    "uncorrected_ecc_errors": {"ecc_uncorrected"},
    "sram_threshold_exceeded": {"sram_threshold"},
    "remapped_rows": {"remap_pending", "remap_failure", "remapped_correctable", "remapped_uncorrectable"},
    "retired_pages_pending": {"retired_pending"},
    "unrepairable_memory": {"unrepairable_memory"},
    "clocks_event_reasons": {"clocks_event_reasons"},
    "nvlink_states": {"nvlinks"},
    "fabric": {"fabric"},
    "pcie_link": {"pcie_width", "pcie_max_width"},
    "pcie_generation": {"pcie_generation"},
    "pcie_max_generation": {"pcie_max_generation"},
    "pcie_replays": {"pcie_replays"},
    "vgpu_licensed": {"vgpu_licensed"},
    "utilization": {"utilization"},
    "memory_used": {"memory_used"},
    "power_usage": {"power"},
    "power_limit": {"power_limit"},
    "field_values": BY_FIELD_ALONE,
}
"""The calls of a full look at a part that answers by functions, and the fields of each call."""

HANDLE = Handle(0x7F00_1234_5000)

ACTION = frozenset({"recovery_action"})

LINKS = 3

WHOLE = Sample(
    temperature=41,
    energy=123_456_789_012,
    memory_temperature=71,
    margin=-3,
    recovery_action=5,
    ecc_uncorrected=2,
    sram_threshold=True,
    remap_pending=True,
    remap_failure=False,
    retired_pending=True,
    retired_pages=20 + 30,
    unrepairable_memory=False,
    clocks_event_reasons=0x40,
    nvlinks=(True, False, True),
    nvlink_crc_errors=3 * (1038 + 1045) + 2 * (100 + 200),
    nvlink_failed_recoveries=3 * 1214 + 300,
    fabric=Fabric(3, 0, 0x1AA, 1),
    pcie_width=8,
    pcie_generation=3,
    pcie_max_generation=5,
    pcie_max_width=16,
    pcie_replays=77,
    pcie_fatal_errors=1180,
    power=345_678,
    power_limit=700_000,
    utilization=87,
    memory_used=1234,
    ecc_corrected=1003,
    remapped_correctable=1,
    remapped_uncorrectable=2,
    vgpu_licensed=False,
    binding=5,
)
"""The answers of `Part`: most fields are 1000 more than their ids, with 100 more for each further link."""


class Part:
    """A driver whose GPU answers every call.

    `refusals` are codes by call, `field_refusals` by field. `asked` are the calls made, `fields` the last requested fields.
    """

    def __init__(self):
        self.refusals = {}
        self.field_refusals = {}
        self.asked = []
        self.fields = ()
        self.states = (1, 0, 2)  # active, inactive, asleep
        self.answers = {
            "temperature": 41,
            "total_energy": 123_456_789_012,
            "margin_temperature": -3,
            "uncorrected_ecc_errors": 2,
            "sram_threshold_exceeded": True,
            "remapped_rows": RemappedRows(1, 2, pending=True),
            "retired_pages_pending": True,
            "unrepairable_memory": False,
            "clocks_event_reasons": 0x40,
            "nvlink_states": (True, False, True),
            "fabric": Fabric(3, 0, 0x1AA, 1),
            "pcie_link": PcieLink(8, 16),
            "pcie_generation": 3,
            "pcie_max_generation": 5,
            "pcie_replays": 77,
            "vgpu_licensed": False,
            "utilization": 87,
            "memory_used": 1234,
            "power_usage": 345_678,
            "power_limit": 700_000,
            "uuid": "GPU-1",
        }
        self.values = {83: 123_456_789_012, 142: 1, 143: 2, 144: 1, 145: 0, 186: 345_678, 190: 700_000, 31: 1, 94: 77}
        self.values |= {29: 20, 30: 30, 82: 71, 230: 5}

    def __getattr__(self, call):
        def answer(handle, *arguments):
            assert handle == HANDLE
            self.asked.append(call)
            if call in self.refusals:
                raise NvmlError(self.refusals[call], f"nvml_{call}")
            if call == "field_values":
                (self.fields,) = arguments
                return tuple(map(self._value, self.fields))
            return self.answers[call]

        return answer

    def _value(self, field):
        code = self.field_refusals.get(field, self.field_refusals.get(field.number))
        if code is not None:
            return NvmlError(code, "nvml_field")
        if field.number in LINK_FIELDS:
            assert field.scope < LINKS
            return self.states[field.scope] if field.number == 165 else 1000 + field.number + 100 * field.scope
        assert field.scope == 0
        return self.values.get(field.number, 1000 + field.number)

    def see(self, skip=frozenset(), *, answered=frozenset(), turn=None):
        return sample(cast("Driver", self), HANDLE, plan(frozenset(answered), LINKS, frozenset(skip), turn), binding=5)


@pytest.fixture
def part():
    return Part()


class Machine:
    """A probed GPU of a simulated node with an open driver."""

    def __init__(self, name="hgx-h100"):
        self.node = SimulatedNode(profile.load(name), wall_clock=lambda: 5000.0)
        self.driver = SimulatedDriver(self.node)
        self.driver.open()
        self.probe()

    def probe(self):
        self.handle, self.gpu = traits.probe_gpu(self.driver, SimulatedHost(self.node), 0)

    def look(self, skip=frozenset(), **how):
        return look(self.driver, self.handle, self.gpu, **{"opening": 1, "skip": skip} | how)


@pytest.fixture
def machine():
    return Machine()


def answering(monkeypatch, machine, odd):
    """Let fields of the GPU have these values or errors by number. Return the mapping, which a test may change."""
    real = machine.driver.field_values

    def values(handle, fields):
        answers = zip(fields, real(handle, fields), strict=True)
        return tuple(odd.get(field.number, value) for field, value in answers)

    monkeypatch.setattr(machine.driver, "field_values", values)
    return odd


NOT_SUPPORTED = NvmlError(Return.NOT_SUPPORTED, "nvmlDeviceGetFieldValues")
UNKNOWN = NvmlError(Return.UNKNOWN, "nvmlDeviceGetFieldValues")


def without(names, *, refused=False):
    """Return the sample without these fields. With `refused`, not for lack of support."""
    unsaid: dict[str, Any] = dict.fromkeys(names)
    of = frozenset(names) if refused else frozenset()
    return msgspec.structs.replace(WHOLE, **unsaid, refused=CORE & of, unknown=ACTION & of)


# What is asked


def test_a_sample_has_every_reading_of_a_gpu(part):
    assert part.see() == (WHOLE, frozenset())
    assert sorted(part.asked) == sorted(CALLS), "and costs one call each"


def test_a_part_that_answers_fields_is_asked_for_them_in_one_call_and_its_functions_are_left_alone(part):
    assert part.see(answered=PROBED) == (WHOLE, frozenset())
    told = {reading.name for reading in READINGS}
    assert sorted(part.asked) == sorted(
        call for call, names in CALLS.items() if call == "field_values" or not names <= told
    )


def test_every_field_of_a_sample_is_asked_for():
    assert set.union(*CALLS.values()) == FIELDS
    assert plan(frozenset(), LINKS, frozenset()).asked == FIELDS


def test_fields_of_links_are_read_for_each_link(part):
    part.see(answered=PROBED)
    for number in LINK_FIELDS:
        assert [field.scope for field in part.fields if field.number == number] == list(range(LINKS))


@pytest.mark.parametrize("call", CALLS)
def test_skipped_fields_are_not_read(part, call):
    seen, unsupported = part.see(CALLS[call])
    assert seen == without(CALLS[call])
    assert unsupported == frozenset()
    assert sorted(part.asked) == sorted(set(CALLS) - {call})


@pytest.mark.parametrize("reading", READINGS, ids=lambda reading: reading.name)
def test_a_field_to_be_skipped_leaves_the_others_alone(part, reading):
    assert part.see({reading.name}, answered=PROBED) == (without({reading.name}), frozenset())
    assert part.asked.count("field_values") == 1
    assert not {field.number for field in part.fields} & set(reading.numbers)


def test_a_gpu_without_any_reading_is_asked_for_its_uuid(part):
    part.refusals = dict.fromkeys(CALLS, Return.NOT_SUPPORTED)
    seen, unsupported = part.see()
    assert (seen, unsupported) == (Sample(binding=5), frozenset(FIELDS))
    part.asked.clear()
    assert part.see(unsupported) == (Sample(binding=5), frozenset())
    assert part.asked == ["uuid"]
    part.refusals["uuid"] = Return.GPU_IS_LOST
    assert part.see(unsupported)[0].fault == "lost"


# A steady look


@pytest.mark.parametrize("name", profile.names())
def test_steady_looks_ask_everything_once_in_their_turns_and_cost_about_the_same(name):
    machine = Machine(name)
    skip = machine.look().unsupported
    whole = machine.look(skip)
    assert (whole.sample.asked, whole.partition is None) == (None, not whole.partitionable)
    asked, partitions, counted = set(), [], []
    for turn in range(TURNS):
        machine.driver.calls.clear()
        steady = machine.look(skip, full=False, turn=turn, partitionable=whole.partitionable, counting=77)
        made = machine.driver.calls
        assert sum(made.values()) <= 9 or steady.partition is not None
        partitions += [steady.partition] if steady.partition is not None else []
        counted += [steady.sample.counting]
        assert steady.partitionable == whole.partitionable
        assert steady.sample.asked is not None
        told = {field: getattr(steady.sample, field) for field in steady.sample.asked}
        assert told == {field: getattr(whole.sample, field) for field in steady.sample.asked}
        assert all(getattr(steady.sample, field) is None for field in FIELDS - steady.sample.asked)
        assert (CORE | {"ecc_uncorrected", "clocks_event_reasons"}) - skip <= steady.sample.asked
        assert not steady.sample.asked & skip
        asked |= steady.sample.asked
    assert {field for field in FIELDS if getattr(whole.sample, field) is not None} <= asked
    assert partitions == ([whole.partition] if whole.partitionable else [])
    assert sorted(counted) == [0, *[77] * (TURNS - 1)]


@pytest.mark.parametrize("turn", [0, TURNS - 1])
def test_after_the_last_turn_the_first_comes_again(machine, turn):
    skip = machine.look().unsupported
    first, again, much_later = (
        machine.look(skip, full=False, turn=at).sample.asked for at in (turn, turn + TURNS, turn + 1000 * TURNS)
    )
    assert first
    assert first == again == much_later


def test_steady_looks_repeat_refused_calls_of_the_probe(machine):
    machine.gpu = msgspec.structs.replace(machine.gpu, minor=None, unsettled=frozenset({"minor"}))
    found = [machine.look(full=False, turn=turn).gpu for turn in range(TURNS)]
    assert [each.minor for each in found].count(0) == 1


def test_readings_that_show_a_fault_are_read_every_time():
    machine = Machine()
    skip = machine.look().unsupported
    at_once = {"temperature", "energy", "recovery_action", "ecc_uncorrected", "remap_pending", "remap_failure"}
    at_once |= {"clocks_event_reasons", "pcie_fatal_errors", "nvlinks", "fabric", "margin", "memory_temperature"}
    for turn in range(12):
        asked = machine.look(skip, full=False, turn=turn).sample.asked
        assert asked is not None
        assert at_once <= asked


def test_a_plan_promises_no_fewer_calls_than_it_makes():
    for answered in (frozenset(), frozenset(PROBED)):
        for turn in range(TURNS):
            steady = plan(answered, MAX_NVLINKS, frozenset(), turn)
            calls = sum(question.calls for question in steady.questions) + bool(steady.fields)
            assert calls <= 10 + MAX_NVLINKS * (not answered), "of a part that answers everything, as none does"
            part = Part()
            part.see(answered=answered, turn=turn)
            assert len(part.asked) <= calls


def test_a_steady_look_reports_a_fault(machine):
    machine.node.lose(0)
    found = machine.look(full=False, turn=3)
    assert (found.sample.fault, found.sample.asked, found.gpu) == (Fault.LOST, None, machine.gpu)


# Which counters can be compared


def test_counters_compare_over_openings_while_the_driver_keeps_the_gpu_initialised(machine):
    assert machine.look(opening=4711).sample.counting == 0
    machine.node.change(0, persistence=False)
    assert machine.look(opening=4711, counting=0).sample.counting == 4711
    assert machine.look(opening=4712, full=False, counting=4711).sample.counting == 4711


@pytest.mark.parametrize("turn", range(TURNS))
def test_the_first_look_after_an_opening_asks_for_persistence_mode_in_any_turn(machine, turn):
    assert machine.look(opening=4711, full=False, turn=turn, counting=None).sample.counting == 0


@pytest.mark.parametrize("odd", ["refused", "all ones"])
@pytest.mark.parametrize(("before", "known"), [(None, 4711), (0, 0), (4710, 4710)])
def test_a_persistence_mode_that_is_unknown_now_is_what_it_was(machine, monkeypatch, odd, before, known):
    if odd == "refused":
        machine.node.refuse("persistence_mode", Return.UNKNOWN)
    else:
        monkeypatch.setattr(machine.driver, "persistence_mode", lambda _: None)
    found = machine.look(opening=4711, counting=before)
    assert (found.sample.counting, "counting" in found.unsupported) == (known, False)


def test_an_unsupported_persistence_mode_is_read_once(machine):
    machine.node.refuse("persistence_mode", Return.NOT_SUPPORTED)
    found = machine.look(opening=4711, counting=0)
    assert (found.sample.counting, "counting" in found.unsupported) == (4711, True)
    machine.driver.calls.clear()
    assert machine.look(found.unsupported, opening=4712, counting=4711).sample.counting == 4712
    assert machine.driver.calls["persistence_mode"] == 0


# What is refused


@pytest.mark.parametrize("call", CALLS)
def test_unsupported_fields_are_no_fault_and_are_named(part, call):
    for code in UNSUPPORTED:
        part.refusals[call] = code
        assert part.see() == (without(CALLS[call]), frozenset(CALLS[call])), code


@pytest.mark.parametrize("call", CALLS)
def test_one_odd_answer_is_no_fault_and_is_read_again(part, call):
    for code in (Return.TIMEOUT, Return.INVALID_ARGUMENT, 20, 4711):
        part.refusals[call] = code
        seen, unsupported = part.see()
        assert (seen, unsupported) == (without(CALLS[call], refused=True), frozenset()), code
        assert seen.core_answered is CORE.isdisjoint(CALLS[call]), code


OUT_OF_REACH = {
    Return.GPU_IS_LOST: "lost",
    Return.RESET_REQUIRED: "reset-required",
    Return.NOT_FOUND: "vanished",
    Return.UNINITIALIZED: "driver",
    Return.DRIVER_NOT_LOADED: "driver",
    Return.LIB_RM_VERSION_MISMATCH: "driver",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_gpu_or_a_driver_out_of_reach_is_a_fault_with_the_drivers_words(part, call):
    for code, kind in OUT_OF_REACH.items():
        part.refusals[call] = code
        if CORE.isdisjoint(CALLS[call]) and kind not in ("lost", "reset-required"):
            unread = msgspec.structs.replace(without(CALLS[call]), unknown=ACTION & CALLS[call])
            assert part.see() == (unread, frozenset()), "one odd answer is no proof of that"
            continue
        seen, unsupported = part.see()
        assert seen == Sample(fault=Fault(kind), detail=seen.detail, binding=5)
        assert f"nvml_{call}: " in seen.detail
        assert f"({int(code)})" in seen.detail
        assert unsupported == frozenset()


@pytest.mark.parametrize("call", CALLS)
def test_an_unknown_error_of_a_core_reading_is_a_fault(part, call):
    part.refusals[call] = Return.UNKNOWN
    seen, unsupported = part.see()
    assert unsupported == frozenset()
    if call in ("temperature", "total_energy"):
        assert seen == Sample(fault=Fault.ERROR, detail=seen.detail, binding=5)
        assert f"nvml_{call}: " in seen.detail
    else:
        assert seen == without(CALLS[call], refused=True)


@pytest.mark.parametrize(("code", "kind"), [(Return.DRIVER_NOT_LOADED, Fault.DRIVER), (Return.UNKNOWN, Fault.ERROR)])
def test_refused_fields_are_a_fault_if_the_energy_is_among_them(part, code, kind):
    part.refusals["field_values"] = code
    assert part.see(answered=PROBED)[0].fault is kind
    assert part.see({"energy"}, answered=PROBED)[0].fault is Fault.NONE


def test_the_core_readings_are_named_that_the_driver_refuses_for_the_moment(part):
    part.refusals = {"temperature": Return.TIMEOUT, "utilization": Return.NOT_SUPPORTED, "pcie_link": Return.TIMEOUT}
    part.field_refusals = {83: Return.TIMEOUT}
    seen, unsupported = part.see(answered=PROBED)
    assert (seen.refused, unsupported) == ({"temperature", "energy"}, {"utilization"})
    assert (seen.core_answered, seen.failed) == (False, True)
    part.field_refusals = {}
    seen, _ = part.see(answered=PROBED)
    assert (seen.refused, seen.core_answered, seen.failed) == ({"temperature"}, False, False)


@pytest.mark.parametrize(
    ("temperature", "energy", "implausible"),
    [(2**32 - 1, 2**64 - 1, True), (255, 0, True), (2**32 - 1, 5, False), (30, 0, False), (30, 5, False)],
)
def test_a_look_says_whether_no_core_reading_can_be_true(part, temperature, energy, implausible):
    part.answers |= {"temperature": temperature, "total_energy": energy}
    seen, _ = part.see()
    assert seen.core_implausible is implausible
    assert not seen.fault
    part.refusals = {"total_energy": Return.NOT_SUPPORTED}
    assert part.see()[0].core_implausible is (temperature > 200)
    part.refusals |= {"temperature": Return.NOT_SUPPORTED}
    assert part.see()[0].core_implausible is False


@pytest.mark.parametrize(
    ("number", "name"), [(144, "remap_pending"), (145, "remap_failure"), (31, "retired_pending"), (165, "nvlinks")]
)
@pytest.mark.parametrize("odd", [2**32 - 1, 2**64 - 1, -1])
def test_a_flag_that_is_all_ones_is_unknown_and_no_fault(part, number, name, odd):
    if name == "nvlinks":
        part.states = (1, odd, 2)
    else:
        part.values[number] = odd
    seen, unsupported = part.see(answered=PROBED)
    assert getattr(seen, name) is None
    assert (seen.fault, unsupported) == (Fault.NONE, frozenset())


def test_a_gpu_that_answers_no_question_is_unreadable(part):
    part.refusals = dict.fromkeys(CALLS, Return.INVALID_ARGUMENT)
    seen, unsupported = part.see()
    assert (seen.fault, unsupported) == ("error", frozenset())
    assert "invalid argument (2)" in seen.detail
    del part.refusals["pcie_replays"]
    assert part.see() == (Sample(pcie_replays=77, binding=5, refused=CORE, unknown=ACTION), frozenset())


@pytest.mark.parametrize("code", sorted(UNSUPPORTED))
def test_an_unreadable_gpu_has_no_unsupported_fields(part, code):
    part.refusals = dict.fromkeys(CALLS, code) | {"pcie_link": Return.TIMEOUT}
    seen, unsupported = part.see()
    assert (seen.fault, unsupported) == ("error", frozenset())
    part.refusals["field_values"] = Return.GPU_IS_LOST
    assert part.see()[1] == frozenset()


def test_fields_that_are_all_refused_are_no_answer(part):
    part.refusals = dict.fromkeys(CALLS, Return.TIMEOUT)
    del part.refusals["field_values"]
    part.field_refusals = dict.fromkeys(PROBED, Return.NOT_SUPPORTED)
    assert part.see()[0].fault is Fault.ERROR
    del part.field_refusals[230]
    assert part.see()[0] == Sample(recovery_action=5, binding=5, refused=CORE)


@pytest.mark.parametrize("reading", READINGS, ids=lambda reading: reading.name)
def test_a_sum_that_lacks_a_part_is_no_smaller_number_and_only_lack_of_support_is_learnt(part, reading):
    field = Field(reading.numbers[-1], 2 if reading.per_link else 0)
    for code in (*UNSUPPORTED, Return.INVALID_ARGUMENT, Return.TIMEOUT, Return.UNKNOWN, 4711):
        part.field_refusals = {field: code}
        seen, unsupported = part.see(answered=PROBED)
        if reading.name == "energy" and code == Return.UNKNOWN:
            assert seen.fault is Fault.ERROR, "every GPU of use answers that"
            continue
        never = code in {*UNSUPPORTED, Return.INVALID_ARGUMENT}
        gaps = {reading.name}
        if reading.name == "nvlinks":  # then it is not known that link 1 is down, but its counters answered
            assert seen.nvlink_crc_errors == WHOLE.nvlink_crc_errors
        assert (seen, unsupported) == (without(gaps, refused=not never), frozenset(gaps if never else ())), code


@pytest.mark.parametrize("code", [Return.GPU_IS_LOST, Return.RESET_REQUIRED])
@pytest.mark.parametrize("field", [Field(82), Field(30), Field(165, 1), Field(38, 1), Field(214, 2)])
def test_a_gpu_lost_between_two_fields_is_lost(part, field, code):
    part.field_refusals = {field: code, Field(29): Return.UNKNOWN, Field(38, 0): Return.TIMEOUT, Field(214, 0): 4711}
    seen, unsupported = part.see(answered=PROBED)
    assert seen.fault == ("lost" if code == Return.GPU_IS_LOST else "reset-required")
    assert unsupported == frozenset()


@pytest.mark.parametrize("code", [Return.NOT_SUPPORTED, Return.INVALID_ARGUMENT])
def test_a_link_that_is_down_may_have_no_counters(part, code):
    part.field_refusals = {Field(number, 1): code for number in (38, 45, 214)}
    seen, unsupported = part.see(answered=PROBED)
    assert (seen.nvlink_crc_errors, seen.nvlink_failed_recoveries) == (2 * (1038 + 1045) + 400, 2 * 1214 + 200)
    assert unsupported == frozenset()
    part.states = (0, 0, 0)
    part.field_refusals = {Field(number, link): code for number in (38, 45, 214) for link in range(LINKS)}
    seen, unsupported = part.see(answered=PROBED)
    assert (seen.nvlink_crc_errors, seen.nvlink_failed_recoveries, unsupported) == (None, None, frozenset())
    part.field_refusals[Field(165, 2)] = Return.TIMEOUT
    seen, unsupported = part.see(answered=PROBED)
    assert (seen.nvlinks, seen.nvlink_crc_errors, unsupported) == (None, None, frozenset()), (
        "which are down is not known"
    )


def test_any_refusal_can_be_made_a_fault():
    error = NvmlError(Return.GPU_IS_LOST, "nvmlDeviceGetHandleByUUID")
    assert fault(error) == Sample(fault=Fault.LOST, detail=f"the GPU is lost ({error})")
    assert fault(NvmlError(Return.NOT_FOUND, "nvmlDeviceGetHandleByUUID")).fault is Fault.VANISHED
    assert fault(NvmlError(Return.TIMEOUT, "nvmlDeviceGetHandleByUUID")).fault is Fault.ERROR


# What is learnt


@pytest.mark.parametrize("name", profile.names())
def test_one_look_finds_all_unsupported_fields(name):
    machine = Machine(name)
    first = machine.look()
    assert first.sample.fault == ""
    missing = {field for field in FIELDS if getattr(first.sample, field) is None}
    with_partition = set(REMAP) if machine.gpu.mig_devices else set()
    assert first.unsupported == missing - with_partition
    told = {reading.name for reading in READINGS if machine.gpu.fields.issuperset(reading.numbers)}
    machine.driver.calls.clear()
    second = machine.look(first.unsupported)
    assert second.sample == first.sample
    assert second.unsupported == frozenset()
    for call, names in CALLS.items():
        by_function = names if call == "field_values" else names - told
        assert machine.driver.calls[call] == (not by_function <= missing), "asked no more where there is no answer"


@pytest.mark.parametrize("number", [230, 214])
def test_a_field_that_answered_the_probe_is_supported_even_if_it_is_refused_once(machine, monkeypatch, number):
    name = next(reading.name for reading in READINGS if number in reading.numbers)
    answering(monkeypatch, machine, {number: NOT_SUPPORTED})
    found = machine.look()
    assert getattr(found.sample, name) is None
    assert name not in found.unsupported
    machine.probe()  # it finds no answer either
    assert name in machine.look().unsupported


@pytest.mark.parametrize("name", ["h100-mig-single", "hgx-h100"])
def test_a_partitioned_gpu_does_not_report_its_rows_until_it_is_whole_again(name):
    machine = Machine(name)
    if not machine.gpu.mig_devices:
        machine.node.partition(0, ["3g.40gb"])  # between two looks
    found = machine.look()
    assert found.sample.remap_pending is found.sample.remap_failure is None
    assert not {"remap_pending", "remap_failure"} & found.unsupported
    machine.driver.calls.clear()
    machine.look(found.unsupported)
    assert machine.driver.calls["remapped_rows"] == 0
    machine.node.partition(0, None)
    machine.gpu = msgspec.structs.replace(machine.gpu, mig_devices=(), mig_enabled=False)
    assert machine.look(found.unsupported).sample.remap_pending is False


def test_unsupported_fields_are_found_without_the_partition(machine):
    machine.node.refuse("mig_mode", Return.UNKNOWN)
    found = machine.look()
    assert found.partition_trouble
    assert found.unsupported == {"retired_pages", "retired_pending", "vgpu_licensed"}


# A look


def test_a_look_is_a_sample_through_its_handle_with_the_binding(machine):
    found = look(machine.driver, machine.handle, machine.gpu, opening=1, binding=1 << 62)
    assert found.handle == machine.handle
    assert found.sample.binding == 1 << 62
    assert found.sample.energy == machine.node.energy(0)
    assert found.partition is not None
    machine.node.change(0, temperature=71)
    assert machine.look().sample.temperature == 71


def test_a_lost_gpu_is_lost_and_still_bound(machine):
    machine.node.lose(0)
    found = look(machine.driver, machine.handle, machine.gpu, opening=1, binding=7)
    assert (found.sample.fault, found.sample.binding, found.partition) == ("lost", 7, None)
    assert found.unsupported == frozenset()


# What stays open


def test_full_looks_repeat_refused_calls_of_the_probe(machine, caplog):
    whole = machine.gpu
    for call in ("temperature_threshold", "field_values", "name", "nvlink_states"):
        machine.node.refuse(call, Return.UNKNOWN)
    machine.probe()
    known = machine.gpu
    assert known.unsettled == {"thresholds", "fields", "model", "nvlinks"}
    assert (known.thresholds.shutdown, known.margins.shutdown, known.model, known.nvlinks) == (None, None, "", 0)
    assert machine.look(full=False).gpu is known
    assert machine.look().gpu is known, "the very same where nothing is news"
    assert not {"nvlink_crc_errors", "nvlink_failed_recoveries"} & machine.look().unsupported
    machine.node.refusals.clear()
    settled = machine.look().gpu
    assert settled == whole
    machine.gpu = settled
    machine.driver.calls.clear()
    assert machine.look().gpu is settled
    assert machine.driver.calls["temperature_threshold"] == 0


def test_one_refused_limit_keeps_the_others(machine, monkeypatch):
    real, refused = machine.driver.temperature_threshold, {Threshold.SHUTDOWN}

    def limit(handle, kind):
        if kind in refused:
            raise NvmlError(Return.UNKNOWN, "nvmlDeviceGetTemperatureThreshold")
        return real(handle, kind)

    monkeypatch.setattr(machine.driver, "temperature_threshold", limit)
    machine.probe()
    assert (machine.gpu.thresholds.shutdown, machine.gpu.thresholds.slowdown) == (None, 89)
    refused = {Threshold.SLOWDOWN}
    machine.gpu = machine.look().gpu
    assert (machine.gpu.thresholds.shutdown, machine.gpu.thresholds.slowdown) == (95, 89)
    assert machine.gpu.unsettled == {"thresholds"}


def test_a_field_that_was_answered_once_stays_known_while_others_are_read_again(machine, monkeypatch):
    whole = machine.gpu
    odd = answering(monkeypatch, machine, {230: UNKNOWN, 193: UNKNOWN})
    machine.probe()
    assert machine.gpu.unsettled == {"fields"}
    assert machine.gpu.fields == whole.fields - {230, 193}
    odd.clear()
    odd |= {180: UNKNOWN, 194: UNKNOWN}
    found = machine.look().gpu
    assert (found.fields, found.margins, found.unsettled) == (whole.fields, whole.margins, frozenset())


def test_a_gpu_lost_while_it_is_asked_again_is_as_it_was(machine):
    machine.gpu = msgspec.structs.replace(machine.gpu, unsettled=frozenset({"thresholds"}))
    machine.node.refuse("temperature_threshold", Return.GPU_IS_LOST)
    assert machine.look().gpu is machine.gpu


def test_a_part_without_nvlinks_is_not_asked_of_them_again():
    machine = Machine("h200")
    assert (machine.gpu.nvlinks, machine.gpu.unsettled) == (0, frozenset())
    assert {"nvlinks", "nvlink_crc_errors", "nvlink_failed_recoveries"} <= machine.look().unsupported
    bare = look(machine.driver, machine.handle, Gpu(machine.gpu.uuid, 0, unsettled=frozenset({"nvlinks"})), opening=1)
    assert not {"nvlink_crc_errors", "nvlink_failed_recoveries"} & bare.unsupported


@pytest.mark.parametrize("odd", [NOT_SUPPORTED, UNKNOWN, 2**32 - 1])
def test_readings_that_answered_the_probe_and_do_not_now_are_unknown(machine, monkeypatch, odd):
    good = machine.look().sample
    assert (good.core_answered, good.unknown) == (True, frozenset())
    answers = answering(monkeypatch, machine, {230: odd})
    found = machine.look()
    assert (found.sample.recovery_action, found.sample.unknown) == (None, ACTION)
    assert "recovery_action" not in found.unsupported
    answers |= {83: NOT_SUPPORTED}
    assert machine.look().sample.refused == {"energy"}


@pytest.mark.parametrize("full", [True, False])
def test_without_health_checks_looks_read_only_the_core(machine, full):
    seen = machine.look(full=full, judging=False).sample
    assert (seen.asked, seen.core_answered) == (CORE, True)
    assert not seen.asked_for("recovery_action")
    machine.node.refuse("memory_used", Return.TIMEOUT)
    assert not machine.look(full=full, judging=False).sample.core_answered
