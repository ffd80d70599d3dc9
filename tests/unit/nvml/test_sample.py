import dataclasses
from typing import Any

import pynvml
import pytest

from gpu_plugin.devices.nvml_h import UNSUPPORTED, Return
from gpu_plugin.health.observation import Fabric, Fault, Sample
from gpu_plugin.nvml import probe
from gpu_plugin.nvml import sample as sampling
from gpu_plugin.nvml.port import Handle, NvmlError, PcieLink, RemappedRows
from gpu_plugin.nvml.sample import SAMPLED_FIELDS, fault, look, sample
from gpu_plugin.simulation import profile
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost

FIELDS = {field.name for field in dataclasses.fields(Sample)} - {"fault", "detail", "binding", "counting", "asked"}
"""What of a sample the driver is asked for."""

CALLS = {
    "temperature": {"temperature"},
    "total_energy": {"energy"},
    "margin_temperature": {"margin"},
    "uncorrected_ecc_errors": {"ecc_uncorrected"},
    "sram_threshold_exceeded": {"sram_threshold"},
    "remapped_rows": {"remap_pending", "remap_failure"},
    "retired_pages_pending": {"retired_pending"},
    "unrepairable_memory": {"unrepairable_memory"},
    "clocks_event_reasons": {"clocks_event_reasons"},
    "nvlink_states": {"nvlinks"},
    "fabric": {"fabric"},
    "pcie_link": {"pcie_width", "pcie_max_width"},
    "pcie_replays": {"pcie_replays"},
    "field_values": set(SAMPLED_FIELDS),
}
"""The calls of the port that a look makes, and what of the sample is made of each."""

HANDLE = Handle(0x7F00_1234_5000)

NUMBERS = {number: 1000 + number for numbers in SAMPLED_FIELDS.values() for number in numbers}

WHOLE = Sample(
    temperature=41,
    energy=123_456_789_012,
    memory_temperature=1082,
    margin=-3,
    recovery_action=1230,
    ecc_uncorrected=2,
    sram_threshold=True,
    remap_pending=True,
    remap_failure=False,
    retired_pending=True,
    retired_pages=1029 + 1030,
    unrepairable_memory=False,
    clocks_event_reasons=0x40,
    nvlinks=(True, False),
    nvlink_crc_errors=1038 + 1045,
    nvlink_replays=1052,
    nvlink_recoveries=1059,
    nvlink_failed_recoveries=1214,
    fabric=Fabric(3, 0, 0x1AA, 1),
    pcie_width=8,
    pcie_max_width=16,
    pcie_replays=77,
    pcie_fatal_errors=1180,
    binding=5,
)
"""What the part below says."""


class Part:
    """A driver whose GPU answers everything, as no part does. `refusals` are codes by call; `asked` are the calls made."""

    def __init__(self):
        self.refusals = {}
        self.asked = []
        self.fields = dict(NUMBERS)
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
            "nvlink_states": (True, False),
            "fabric": Fabric(3, 0, 0x1AA, 1),
            "pcie_link": PcieLink(8, 16),
            "pcie_replays": 77,
        }

    def __getattr__(self, call):
        def answer(handle, *arguments):
            assert handle == HANDLE
            self.asked.append(call)
            if call in self.refusals:
                raise NvmlError(self.refusals[call], f"nvml_{call}")
            if call == "field_values":
                return tuple(self.fields.get(number) for number in arguments[0])
            return self.answers[call]

        return answer


@pytest.fixture
def part():
    return Part()


class Machine:
    """A simulated GPU as it was probed, with its driver open."""

    def __init__(self, name="hgx-h100"):
        self.node = SimulatedNode(profile.load(name), wall_clock=lambda: 5000.0)
        self.driver = SimulatedDriver(self.node)
        self.driver.open()
        self.probe()

    def probe(self):
        self.handle, self.gpu = probe.probe_gpu(self.driver, SimulatedHost(self.node), 0)

    def look(self, skip=frozenset()):
        return look(self.driver, self.handle, self.gpu, opening=1, skip=skip)


@pytest.fixture
def machine():
    return Machine()


def without(names):
    unsaid: dict[str, Any] = dict.fromkeys(names)
    return dataclasses.replace(WHOLE, **unsaid)


# What is asked


def test_a_sample_has_everything_that_a_gpu_can_say(part):
    assert sample(part, HANDLE, binding=5) == (WHOLE, frozenset())
    assert sorted(part.asked) == sorted(CALLS), "and costs one call each"


def test_every_field_of_a_sample_is_asked_for():
    assert set.union(*CALLS.values()) == FIELDS
    asked = [name for names in sampling._QUESTIONS for name in names]
    assert sorted([*asked, *SAMPLED_FIELDS]) == sorted(FIELDS)


def test_the_fields_are_those_of_nvml():
    numbers = {
        "recovery_action": ("GET_GPU_RECOVERY_ACTION",),
        "memory_temperature": ("MEMORY_TEMP",),
        "retired_pages": ("RETIRED_SBE", "RETIRED_DBE"),
        "nvlink_crc_errors": ("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL"),
        "nvlink_replays": ("NVLINK_REPLAY_ERROR_COUNT_TOTAL",),
        "nvlink_recoveries": ("NVLINK_RECOVERY_ERROR_COUNT_TOTAL",),
        "nvlink_failed_recoveries": ("NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",),
        "pcie_fatal_errors": ("PCIE_COUNT_FATAL_ERROR",),
    }
    assert {
        name: tuple(getattr(pynvml, f"NVML_FI_DEV_{constant}") for constant in constants)
        for name, constants in numbers.items()
    } == SAMPLED_FIELDS


@pytest.mark.parametrize("call", CALLS)
def test_what_is_to_be_skipped_is_not_asked_for(part, call):
    seen, unsupported = sample(part, HANDLE, frozenset(CALLS[call]), binding=5)
    assert seen == without(CALLS[call])
    assert unsupported == frozenset()
    assert sorted(part.asked) == sorted(set(CALLS) - {call})


@pytest.mark.parametrize("name", SAMPLED_FIELDS)
def test_a_field_to_be_skipped_leaves_the_others_alone(part, name):
    assert sample(part, HANDLE, frozenset({name}), binding=5) == (without({name}), frozenset())
    assert part.asked.count("field_values") == 1


def test_a_gpu_that_says_nothing_at_all_is_asked_nothing_more(part):
    part.refusals = dict.fromkeys(CALLS, Return.NOT_SUPPORTED)
    seen, unsupported = sample(part, HANDLE)
    assert (seen, unsupported) == (Sample(), frozenset(FIELDS))
    part.asked.clear()
    assert sample(part, HANDLE, unsupported) == (Sample(), frozenset())
    assert part.asked == []


# What is refused


@pytest.mark.parametrize("code", sorted(UNSUPPORTED))
@pytest.mark.parametrize("call", CALLS)
def test_what_a_part_never_says_is_no_fault_and_is_named(part, call, code):
    part.refusals[call] = code
    assert sample(part, HANDLE, binding=5) == (without(CALLS[call]), frozenset(CALLS[call]))


@pytest.mark.parametrize("code", [Return.TIMEOUT, Return.INVALID_ARGUMENT, 20, 4711])
@pytest.mark.parametrize("call", CALLS)
def test_one_strange_answer_makes_no_gpu_unreadable_and_is_asked_for_again(part, call, code):
    part.refusals[call] = code
    assert sample(part, HANDLE, binding=5) == (without(CALLS[call]), frozenset())


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Return.GPU_IS_LOST, "lost"),
        (Return.RESET_REQUIRED, "reset-required"),
        (Return.NOT_FOUND, "vanished"),
        (Return.UNINITIALIZED, "driver"),
        (Return.DRIVER_NOT_LOADED, "driver"),
        (Return.LIB_RM_VERSION_MISMATCH, "driver"),
    ],
)
def test_a_gpu_or_a_driver_out_of_reach_is_a_fault_with_the_drivers_words(part, call, code, kind):
    part.refusals[call] = code
    seen, unsupported = sample(part, HANDLE, binding=5)
    assert seen == Sample(fault=kind, detail=seen.detail, binding=5)
    assert f"nvml_{call}: " in seen.detail
    assert f"({int(code)})" in seen.detail
    assert unsupported == frozenset()


@pytest.mark.parametrize("call", CALLS)
def test_an_unknown_error_is_the_gpus_where_every_gpu_answers_and_the_questions_elsewhere(part, call):
    part.refusals[call] = Return.UNKNOWN
    seen, unsupported = sample(part, HANDLE, binding=5)
    assert unsupported == frozenset()
    if call in ("temperature", "total_energy"):
        assert seen == Sample(fault=Fault.ERROR, detail=seen.detail, binding=5)
        assert f"nvml_{call}: " in seen.detail
    else:
        assert seen == without(CALLS[call])


def test_a_gpu_that_answers_no_question_is_unreadable(part):
    part.refusals = dict.fromkeys(CALLS, Return.INVALID_ARGUMENT)
    seen, unsupported = sample(part, HANDLE)
    assert (seen.fault, unsupported) == ("error", frozenset())
    assert "invalid argument (2)" in seen.detail
    del part.refusals["pcie_replays"]
    assert sample(part, HANDLE) == (Sample(pcie_replays=77), frozenset())


@pytest.mark.parametrize("code", sorted(UNSUPPORTED))
def test_nothing_is_learnt_of_a_gpu_that_is_unreadable(part, code):
    part.refusals = dict.fromkeys(CALLS, code) | {"pcie_link": Return.TIMEOUT}
    seen, unsupported = sample(part, HANDLE)
    assert (seen.fault, unsupported) == ("error", frozenset())
    part.refusals["field_values"] = Return.GPU_IS_LOST
    assert sample(part, HANDLE)[1] == frozenset()


def test_fields_that_are_all_refused_are_no_answer(part):
    part.refusals = dict.fromkeys(CALLS, Return.TIMEOUT)
    del part.refusals["field_values"]
    part.fields = {}
    assert sample(part, HANDLE)[0].fault is Fault.ERROR
    part.fields = {230: 0}
    assert sample(part, HANDLE)[0] == Sample(recovery_action=0)


@pytest.mark.parametrize(("name", "numbers"), [item for item in SAMPLED_FIELDS.items() if len(item[1]) > 1])
def test_a_sum_that_lacks_a_part_is_no_smaller_number(part, name, numbers):
    for number in numbers:
        part.fields = {other: value for other, value in NUMBERS.items() if other != number}
        seen, unsupported = sample(part, HANDLE, binding=5)
        assert (seen, unsupported) == (without({name}), frozenset({name}))


def test_any_refusal_can_be_made_a_fault():
    error = NvmlError(Return.GPU_IS_LOST, "nvmlDeviceGetHandleByUUID")
    assert fault(error) == Sample(fault=Fault.LOST, detail=f"the GPU is lost ({error})")
    assert fault(NvmlError(Return.NOT_FOUND, "nvmlDeviceGetHandleByUUID")).fault is Fault.VANISHED
    assert fault(NvmlError(Return.TIMEOUT, "nvmlDeviceGetHandleByUUID")).fault is Fault.ERROR


# What is learnt


@pytest.mark.parametrize("name", profile.names())
def test_what_a_part_never_says_is_learnt_in_one_look(name):
    machine = Machine(name)
    first = machine.look()
    assert first.sample.fault == ""
    missing = {field for field in FIELDS if getattr(first.sample, field) is None}
    cut = {"remap_pending", "remap_failure"} if machine.gpu.mig_devices else set()
    assert first.unsupported == missing - cut
    machine.driver.calls.clear()
    second = machine.look(first.unsupported)
    assert second.sample == first.sample
    assert second.unsupported == frozenset()
    for call, names in CALLS.items():
        assert machine.driver.calls[call] == (not names <= missing), "asked no more where there is no answer"


@pytest.mark.parametrize("number", [230, 59])
def test_a_field_that_answered_the_probe_is_supported_even_if_it_is_refused_once(machine, monkeypatch, number):
    real = machine.driver.field_values

    def some(handle, fields):
        answers = zip(fields, real(handle, fields), strict=True)
        return tuple(None if field == number else value for field, value in answers)

    name = next(name for name, numbers in SAMPLED_FIELDS.items() if number in numbers)
    monkeypatch.setattr(machine.driver, "field_values", some)
    found = machine.look()
    assert getattr(found.sample, name) is None
    assert name not in found.unsupported
    machine.probe()  # which finds no answer either
    assert name in machine.look().unsupported


def test_a_gpu_that_is_cut_is_not_asked_for_its_rows_until_it_is_whole_again():
    machine = Machine("h100-mig-single")
    assert machine.gpu.mig_devices
    found = machine.look()
    assert found.sample.remap_pending is found.sample.remap_failure is None
    assert not {"remap_pending", "remap_failure"} & found.unsupported
    machine.driver.calls.clear()
    machine.look(found.unsupported)
    assert machine.driver.calls["remapped_rows"] == 0
    machine.node.partition(0, None)
    machine.gpu = dataclasses.replace(machine.gpu, mig_devices=(), mig_enabled=False)
    assert machine.look(found.unsupported).sample.remap_pending is False


def test_a_gpu_that_is_cut_between_two_looks_has_not_unlearnt_to_tell_of_its_rows(machine):
    machine.node.refuse("remapped_rows", Return.NOT_SUPPORTED, times=1)
    found = machine.look()
    assert found.sample.remap_pending is None
    assert not {"remap_pending", "remap_failure"} & found.unsupported
    assert machine.look(found.unsupported).sample.remap_pending is False


def test_what_was_learnt_of_a_gpu_whose_partition_is_untold_is_learnt(machine):
    machine.node.refuse("mig_mode", Return.UNKNOWN)
    found = machine.look()
    assert found.untold
    assert found.unsupported == {"retired_pages", "retired_pending"}


# A look


def test_a_look_is_a_sample_through_its_handle_with_the_binding(machine):
    found = look(machine.driver, machine.handle, machine.gpu, opening=1, binding=1 << 62)
    assert found.handle == machine.handle
    assert found.sample.binding == 1 << 62
    assert found.sample.energy == machine.node.energy(0)
    assert found.partition is not None
    machine.node.set_temperature(0, 71)
    assert machine.look().sample.temperature == 71


def test_a_lost_gpu_is_lost_and_still_bound(machine):
    machine.node.lose(0)
    found = look(machine.driver, machine.handle, machine.gpu, opening=1, binding=7)
    assert (found.sample.fault, found.sample.binding, found.partition) == ("lost", 7, None)
    assert found.unsupported == frozenset()
