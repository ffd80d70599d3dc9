import pytest
from msgspec.structs import astuple, replace

from gpu_plugin.devices.node import Thresholds
from gpu_plugin.devices.nvml_h import Return, Threshold
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.nvml.questions import PROBED
from gpu_plugin.nvml.traits import MARGIN_FIELDS
from gpu_plugin.simulation import profile

from . import header
from .machine import Machine


@pytest.mark.parametrize("name", profile.names())
def test_a_probe_finds_the_traits_of_every_profile(name, caplog):
    machine = Machine(name)
    for index, built in enumerate(machine.node.profile.gpus):
        handle, gpu = machine.probe(index)
        assert handle == machine.driver.handle_by_uuid(built.uuid)
        assert gpu.unreadable is None
        assert (gpu.uuid, gpu.index, gpu.minor, gpu.pci_bus_id) == (built.uuid, index, built.minor, built.pci_bus_id)
        assert (gpu.model, gpu.architecture, gpu.memory_bytes) == (built.name, built.architecture, built.memory_bytes)
        assert gpu.mig_capable == (built.mig_mode is not None)
        assert gpu.mig_enabled == (built.mig_mode is not None and built.mig_mode[0] == 1)
        assert gpu.numa_node == (built.numa_node if built.numa_node >= 0 else None)
        limits = built.thresholds
        assert gpu.thresholds.shutdown == limits.shutdown
        assert gpu.thresholds.slowdown == limits.slowdown
        assert gpu.thresholds.memory_max == limits.memory_max
        assert gpu.thresholds.gpu_max == limits.gpu_max
        rows = {142, 143, 144, 145} if gpu.mig_devices else set()  # a partitioned GPU does not report these
        assert gpu.fields == {*PROBED, *MARGIN_FIELDS} & set(built.fields) - rows
        assert gpu.nvlinks == len(machine.node.profile.remotes[index])
        assert gpu.unsettled == frozenset()
    assert not caplog.records


def test_a_part_that_answers_hardly_anything_is_a_gpu_all_the_same(caplog):
    machine = Machine(pci_bus_id="00000000:09:00.0", minor=4)
    _, gpu = machine.probe()
    assert gpu.unreadable is None
    assert (gpu.model, gpu.minor, gpu.pci_bus_id) == ("NVIDIA Test", 4, "00000000:09:00.0")
    assert (gpu.memory_bytes, gpu.numa_node, gpu.architecture) == (None, None, None)
    assert (gpu.mig_enabled, gpu.fields) == (False, frozenset())
    assert (gpu.margins, gpu.remaps_rows, gpu.nvswitch) == (Thresholds(), False, False)
    assert not caplog.records


@pytest.mark.parametrize(
    ("mode", "enabled"), [((0, 0), False), ((1, 1), True), ((1, 0), True), ((0, 1), False), (None, False)]
)
def test_the_present_mig_mode_counts(mode, enabled):
    assert Machine(mig_mode=mode).probe()[1].mig_enabled is enabled


@pytest.mark.parametrize(
    ("sysfs", "nvml", "known"),
    [(1, [0], 1), (0, [1], 0), (-1, [1], 1), (-1, [0], 0), (-1, [0, 1], None), (-1, [], None), (-1, None, None)],
)
def test_sysfs_knows_the_numa_node_first_and_nvml_if_it_names_one(sysfs, nvml, known):
    machine = Machine(numa_node=sysfs, memory_affinity=nvml)
    assert machine.probe()[1].numa_node == known
    assert machine.driver.calls["memory_affinity"] == (sysfs < 0)


def test_a_gpu_without_a_bus_id_has_the_numa_node_of_nvml():
    machine = Machine(numa_node=1, memory_affinity=[0])
    machine.node.refuse("pci_bus_id", Return.NOT_SUPPORTED)
    _, gpu = machine.probe()
    assert (gpu.pci_bus_id, gpu.numa_node) == ("", 0)


TRAITS_OF: dict[str, set[str]] = {
    "minor_number": {"minor"},
    "pci_bus_id": {"pci_bus_id"},
    "name": {"model"},
    "architecture": {"architecture"},
    "compute_capability": {"compute_capability"},
    "memory_total": {"memory_bytes"},
    "mig_mode": set(),  # which every look asks for
    "temperature_threshold": {"thresholds"},
    "field_values": {"fields"},
}
"""Traits that stay unsettled if a call does not answer for the moment."""


@pytest.mark.parametrize("call", TRAITS_OF)
@pytest.mark.parametrize(
    "code", [Return.NOT_SUPPORTED, Return.NO_PERMISSION, Return.FUNCTION_NOT_FOUND, Return.UNKNOWN]
)
def test_one_unanswered_call_hides_no_gpu(call, code, caplog):
    machine = Machine("hgx-h100")
    _, whole = machine.probe(2)
    machine.node.refuse(call, code)
    _, gpu = machine.probe(2)
    assert gpu.unreadable is None
    assert gpu != whole
    assert (gpu.uuid, gpu.index) == (whole.uuid, 2)
    assert gpu.unsettled == (TRAITS_OF[call] if code == Return.UNKNOWN else set())
    # Lack of support is normal; anything else is said.
    assert bool(caplog.records) == (code == Return.UNKNOWN)


@pytest.mark.parametrize("call", ["remapped_rows", "nvlink_states", "nvlink_to_switch"])
@pytest.mark.parametrize("code", [Return.NOT_SUPPORTED, Return.FUNCTION_NOT_FOUND, Return.TIMEOUT])
def test_a_trait_that_is_not_reported_is_missing(call, code, caplog):
    machine = Machine("hgx-h100")
    _, whole = machine.probe(2)
    assert (whole.remaps_rows, whole.nvswitch) == (True, True)
    machine.node.refuse(call, code)
    _, gpu = machine.probe(2)
    assert (gpu.remaps_rows, gpu.nvswitch) == (call != "remapped_rows", call == "remapped_rows")
    links = 0 if call == "nvlink_states" else 18
    fields = gpu.fields if call == "nvlink_states" else whole.fields
    trait = {"remaps_rows"} if call == "remapped_rows" else {"nvlinks"}
    if call == "nvlink_states":
        trait.add("fields")  # which are asked of each link
    unsettled = frozenset(trait if code == Return.TIMEOUT else set())
    known = replace(whole, remaps_rows=gpu.remaps_rows, nvswitch=gpu.nvswitch, unsettled=unsettled)
    assert gpu == replace(known, nvlinks=links, fields=fields)
    assert (gpu.fields < whole.fields) == (call == "nvlink_states")
    assert bool(caplog.records) == (code == Return.TIMEOUT)


def answering(monkeypatch, machine, values):
    """Let the fields of the GPU have these values instead of those in its profile."""
    refusal = NvmlError(Return.NOT_SUPPORTED, "nvmlDeviceGetFieldValues")
    monkeypatch.setattr(
        machine.driver, "field_values", lambda handle, fields: tuple(values.get(f.number, refusal) for f in fields)
    )


def test_limits_relative_to_the_t_limit_are_fields_of_their_own(monkeypatch):
    constants = ("SHUTDOWN", "SLOWDOWN", "MEM_MAX", "GPU_MAX")
    there = header.record()["constants"]
    numbers = tuple(there[f"NVML_FI_DEV_TEMPERATURE_{constant}_TLIMIT"] for constant in constants)
    assert numbers == MARGIN_FIELDS
    machine = Machine("t4-4")
    assert machine.probe()[1].margins == Thresholds()
    answering(monkeypatch, machine, {193: -8, 194: -2, 196: 0, 230: 1})
    _, gpu = machine.probe()
    assert gpu.margins == Thresholds(shutdown=-8, slowdown=-2, memory_max=None, gpu_max=0)
    assert gpu.fields == {193, 194, 196, 230}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (-8, -8),
        (0, 0),
        (55, 55),
        (0xFFFFFFF8, -8),
        (0xFFFFFFFF, -1),
        (1 << 31, None),
        ((1 << 31) - 1, None),
        (201, None),
    ],
)
def test_a_limit_that_a_driver_declares_unsigned_is_signed_all_the_same(monkeypatch, said, meant):
    machine = Machine("h200")
    answering(monkeypatch, machine, {193: said})
    assert machine.probe()[1].margins.shutdown == meant


@pytest.mark.parametrize("kind", Threshold, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("said", "meant"), [(0, None), (1, None), (-1, None), (2**32 - 1, None), (201, None), (83, 83)]
)
def test_a_threshold_that_no_gpu_has_is_unknown(monkeypatch, kind, said, meant):
    machine = Machine("h200")
    real = machine.driver.temperature_threshold
    monkeypatch.setattr(
        machine.driver, "temperature_threshold", lambda handle, of: said if of is kind else real(handle, of)
    )
    found = machine.probe()[1]
    assert astuple(found.thresholds)[list(Threshold).index(kind)] == meant
    assert "thresholds" not in found.unsettled


@pytest.mark.parametrize("name", profile.names())
def test_every_profile_has_its_switches_and_rows(name):
    machine = Machine(name)
    bus_ids = {gpu.pci_bus_id for gpu in machine.node.profile.gpus}
    for index, remotes in enumerate(machine.node.profile.remotes):
        _, gpu = machine.probe(index)
        assert gpu.nvswitch == any(remote and remote not in bus_ids for remote in remotes)
        assert gpu.remaps_rows == ((gpu.architecture or 0) >= 7)


def test_the_first_active_link_shows_if_links_lead_to_a_switch(monkeypatch):
    machine = Machine("hgx-h100")
    asked = []
    states = (False, False, True, True)
    monkeypatch.setattr(machine.driver, "nvlink_states", lambda handle: states)

    def to_switch(handle, link):
        asked.append(link)
        return True

    monkeypatch.setattr(machine.driver, "nvlink_to_switch", to_switch)
    assert machine.probe()[1].nvswitch
    assert asked == [2]
    states = (False,) * 4
    assert not machine.probe()[1].nvswitch
    assert asked == [2]


def test_a_partitioned_gpu_still_remaps_rows():
    machine = Machine("h100-mig-single")
    machine.node.refuse("remapped_rows", Return.NOT_SUPPORTED)
    _, gpu = machine.probe()
    assert gpu.mig_devices
    assert gpu.remaps_rows
    machine.node.partition(0, ())
    assert not machine.probe()[1].remaps_rows


def test_one_unanswered_threshold_leaves_the_others(monkeypatch):
    machine = Machine("h200")
    real = machine.driver.temperature_threshold

    def some(handle, kind):
        if kind == Threshold.MEM_MAX:
            raise NvmlError(Return.NOT_SUPPORTED, "nvmlDeviceGetTemperatureThreshold")
        return real(handle, kind)

    monkeypatch.setattr(machine.driver, "temperature_threshold", some)
    limits = machine.probe()[1].thresholds
    assert (limits.shutdown, limits.slowdown, limits.memory_max, limits.gpu_max) == (95, 89, None, 87)


@pytest.mark.parametrize("code", [Return.GPU_IS_LOST, Return.RESET_REQUIRED])
def test_a_gpu_lost_midway_keeps_its_name_and_is_unreadable(code):
    machine = Machine("hgx-h100")
    machine.node.refuse("memory_total", code, gpu=3)
    handle, gpu = machine.probe(3)
    assert handle == machine.driver.handle_by_index(3)
    assert (gpu.uuid, gpu.index) == (machine.node.profile.gpus[3].uuid, 3)
    assert gpu.unreadable is not None
    assert "nvmlDeviceGetMemoryInfo" in gpu.unreadable
    assert machine.probe(4)[1].unreadable is None


@pytest.mark.parametrize("call", ["handle_by_index", "uuid"])
def test_a_gpu_without_a_handle_or_a_name_is_a_refusal(call):
    machine = Machine("hgx-h100")
    machine.node.refuse(call, Return.UNKNOWN, gpu=3)
    with pytest.raises(NvmlError) as caught:
        machine.probe(3)
    assert caught.value.code == Return.UNKNOWN


@pytest.mark.parametrize("by_bus_id", [False, True])
def test_a_known_gpu_is_found_by_its_uuid_or_by_its_bus_id_alone(by_bus_id):
    machine = Machine("hgx-h100")
    built = machine.node.profile.gpus[5]
    fifth = machine.driver.handle_by_index(5)
    machine.driver.calls.clear()
    handle, gpu = machine.probe(3, built.uuid, **{"bus_id": built.pci_bus_id} if by_bus_id else {})
    assert (handle, gpu.uuid, gpu.pci_bus_id) == (fifth, built.uuid, built.pci_bus_id)
    assert machine.driver.calls["handle_by_pci_bus_id"] == by_bus_id
    assert machine.driver.calls["handle_by_uuid"] == (not by_bus_id)
    assert machine.driver.calls["handle_by_index"] == 0
