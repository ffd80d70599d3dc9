"""GPUs that go from the bus and come back, resets and boots."""

import threading

import pytest
from msgspec.structs import replace

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices.nvml_h import EventType, Return
from gpu_plugin.nvml.port import Field
from gpu_plugin.simulation import faults, profile
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost

from .opened import code, make_node, opened

XID = EventType.XID_CRITICAL


@pytest.fixture
def built(node):
    return node.profile.gpus


def apply(node, gpu=3, **request):
    return faults.apply(node, {"gpu": gpu} | request)


# Vanished, and back


def test_one_that_vanished_is_lost_to_who_knew_it_and_not_found(node, driver, built):
    gpu = driver.handle_by_index(3)
    assert apply(node, vanish=True).endswith(": gone from its driver, until it returns or is healed.")
    assert driver.device_count() == 8
    assert code(driver.handle_by_uuid, built[3].uuid) == Return.NOT_FOUND
    assert code(driver.handle_by_pci_bus_id, built[3].pci_bus_id) == Return.NOT_FOUND
    assert code(driver.handle_by_index, 3) == code(driver.temperature, gpu) == Return.GPU_IS_LOST
    assert code(driver.common_ancestor, driver.handle_by_index(2), gpu) == Return.GPU_IS_LOST
    assert driver.uuid(driver.handle_by_uuid(built[4].uuid)) == built[4].uuid


def test_who_opens_the_driver_then_does_not_count_it(node, built):
    apply(node, vanish=True)
    driver = opened(node)
    gpus = [driver.handle_by_index(index) for index in range(driver.device_count())]
    assert [driver.uuid(gpu) for gpu in gpus] == [gpu.uuid for gpu in built if gpu is not built[3]]
    assert code(driver.handle_by_index, 7) == Return.INVALID_ARGUMENT
    assert code(driver.handle_by_uuid, built[3].uuid) == Return.NOT_FOUND
    assert driver.handle_by_uuid(built[4].uuid) == gpus[3]
    events = driver.event_set()
    driver.register_events(gpus[3], XID, events)
    assert node.post(4, XID, 79) == 1
    assert driver.wait(events, 0).handle == gpus[3]


def test_one_that_is_back_is_found_once_all_have_closed_the_driver(node, driver, built):
    before = driver.handle_by_index(3)
    driver.open()
    apply(node, vanish=True)
    assert apply(node, **{"return": True}).endswith(": back, for whoever opens the driver from now on.")
    for _ in range(2):
        assert code(driver.temperature, before) == Return.GPU_IS_LOST
        assert code(driver.handle_by_uuid, built[3].uuid) == Return.NOT_FOUND
        driver.close()
        driver.open()
    driver.close()
    driver.close()
    driver.open()
    assert driver.uuid(driver.handle_by_uuid(built[3].uuid)) == built[3].uuid
    assert driver.uuid(driver.handle_by_index(3)) == built[3].uuid


def test_it_comes_back_as_it_was_but_for_what_its_driver_counts(node, driver):
    gpu = driver.handle_by_index(3)
    apply(node, temperature=80)
    apply(node, **{"ecc-uncorrected": 4})
    drawn = driver.total_energy(gpu)
    apply(node, vanish=True)
    apply(node, **{"return": True})
    driver = opened(node)
    gpu = driver.handle_by_index(3)
    assert (driver.temperature(gpu), driver.uncorrected_ecc_errors(gpu)) == (80, 0)
    assert driver.total_energy(gpu) < drawn


def test_no_event_of_it_reaches_anyone_until_it_is_found_again(node, driver):
    events = driver.event_set()
    driver.register_events(driver.handle_by_index(3), XID, events)
    node.post(3, XID, 79)
    apply(node, vanish=True)
    assert node.post(3, XID, 31) == 0
    apply(node, **{"return": True})
    assert node.post(3, XID, 31) == 0
    assert driver.wait(events, 0).data == 79
    assert code(driver.wait, events, 0) == Return.GPU_IS_LOST, "for good, as nvml.h has it"


def test_vanishing_again_changes_nothing(node):
    node.vanish(3)
    node.vanish(3)
    driver = opened(node)
    node.bring_back(3)
    driver.close()
    driver.open()
    assert driver.device_count() == 8
    with pytest.raises(ConfigError, match="return: GPU 3 has not vanished"):
        apply(node, **{"return": True})


def test_a_call_that_hangs_does_so_even_after_the_gpu_has_vanished(node, driver):
    node.hang(3, 3600)
    node.vanish(3)
    assert code(driver.handle_by_uuid, node.profile.gpus[3].uuid) == Return.NOT_FOUND
    found = []
    stuck = threading.Thread(target=lambda: found.append(code(driver.handle_by_index, 3)), daemon=True)
    stuck.start()
    while not driver.calls["handle_by_index"]:
        threading.Event().wait(0.001)
    assert stuck.is_alive()
    node.reset(3)
    stuck.join(10)
    assert found == [Return.GPU_IS_LOST]


# Bindings


def test_a_binding_changes_whenever_the_driver_is_bound_anew(node, built):
    host, bus = SimulatedHost(node), built[3].pci_bus_id
    at_first = dict(host.bindings())
    assert set(at_first) == {gpu.pci_bus_id for gpu in built}
    seen = [at_first[bus]]
    for fault in ("vanish", "return", "heal", "reboot"):
        apply(node, **{fault: True})
        assert (bus in host.bindings()) is (fault != "vanish")
        if fault != "vanish":
            seen.append(host.bindings()[bus])
    assert len(set(seen)) == 4
    other = built[4].pci_bus_id
    assert host.bindings()[other] == at_first[other] + 1  # by the boot alone


@pytest.mark.parametrize(
    "request_", [{"reset": True}, {"lost": True}, {"hang": 60}, {"xid": 79}, {"error": 999}, {"temperature": 90}]
)
def test_nothing_else_changes_a_binding(node, request_):
    before = dict(node.bindings())
    apply(node, **request_)
    assert node.bindings() == before


# Reset, boot, repair


def spoil(node, gpu=3):
    """Everything at once."""
    for name, value in {
        "temperature": 90,
        "pcie-width": 4,
        "remap-failure": True,
        "sram-threshold": True,
        "unrepairable-memory": True,
        "ecc-uncorrected": 1,
        "remap-pending": True,
        "nvlink-down": 2,
        "nvlink-errors": 3,
        "fabric": "unhealthy",
        "pcie-replays": 5,
        "pcie-fatal-errors": 1,
        "recovery-action": "gpu-reset",
        "hang": 3600,
        "lost": True,
    }.items():
        apply(node, gpu, **{name: value})


def test_a_reset_of_one_that_vanished_brings_nothing_back(node):
    node.vanish(3)
    assert apply(node, reset=True).endswith(": reset, and still off the bus.")
    assert opened(node).device_count() == 7


def test_a_boot_brings_all_back_and_mends_nothing_else(node, driver, tmp_path):
    spoil(node)
    node.vanish(5)
    boot, energy = node.boot_id, driver.total_energy(driver.handle_by_index(0))
    assert faults.apply(node, {"reboot": True}) == f"The node: rebooted, with boot id {node.boot_id}."
    assert SimulatedHost(node).boot_id() == node.boot_id != boot
    driver = opened(node)
    assert driver.device_count() == 8
    gpu = driver.handle_by_index(3)
    assert (driver.temperature(gpu), driver.remapped_rows(gpu).failure, driver.pcie_link(gpu).width) == (90, True, 4)
    assert (driver.uncorrected_ecc_errors(gpu), driver.field_values(gpu, (Field(230), Field(214, 17)))) == (0, (0, 0))
    assert driver.total_energy(driver.handle_by_index(0)) < energy
    assert faults.apply(node, {"gpu": 3, "reboot": True}).startswith("The node: rebooted, with boot id ")


def test_a_boot_sets_compute_modes_back(tmp_path):
    for state in (None, tmp_path):
        node = make_node("h200", state)
        driver = opened(node)
        gpu = driver.handle_by_index(0)
        driver.set_compute_mode(gpu, 3)
        node.reset(0)
        assert driver.compute_mode(gpu) == 3
        node.reboot()
        assert driver.compute_mode(gpu) == 0


def test_a_repair_ends_everything(node, driver):
    gpu = driver.handle_by_index(3)
    spoil(node)
    before = node.condition(3).binding
    apply(node, error=999)
    node.vanish(3)
    apply(node, heal=True)
    after = node.condition(3)
    assert after == type(after)(energy_since=after.energy_since, binding=before + 1)
    assert code(driver.uuid, gpu) == Return.GPU_IS_LOST  # it was replaced under the open driver
    assert opened(node).device_count() == 8


# Errors of every call


def test_every_call_fails_with_the_code_asked_for(node, driver, built):
    gpu, events = driver.handle_by_index(3), driver.event_set()
    driver.register_events(gpu, XID, events)
    assert apply(node, error=999).endswith(": every driver call fails with 999, until healed.")
    assert code(driver.temperature, gpu) == code(driver.handle_by_index, 3) == Return.UNKNOWN
    assert code(driver.handle_by_uuid, built[3].uuid) == code(driver.handle_by_pci_bus_id, built[3].pci_bus_id) == 999
    assert driver.temperature(driver.handle_by_index(2)) == 32
    assert node.post(3, XID, 31) == 1
    assert driver.wait(events, 0).data == 31
    assert apply(node, error=0).endswith(": driver calls do not fail.")
    assert driver.temperature(gpu) == 32


@pytest.mark.parametrize(("number", "after_reset"), [(16, None), (999, 999), (17, 17)])
def test_a_reset_ends_the_error_that_asks_for_one(node, number, after_reset):
    apply(node, error=number)
    assert node.failing(3) == number
    node.reset(3)
    assert node.failing(3) == after_reset
    apply(node, error=number)
    node.reboot()
    assert node.failing(3) is None
    apply(node, error=number)
    node.heal(3)
    assert node.failing(3) is None


def test_a_lost_gpu_is_lost_whatever_the_error(node):
    apply(node, error=999)
    apply(node, lost=True)
    assert node.failing(3) == Return.GPU_IS_LOST


# What outlives the daemon


def test_all_of_it_outlives_the_daemon(tmp_path):
    built = profile.load("hgx-h100")
    node = SimulatedNode(built, tmp_path)
    spoil(node)
    apply(node, error=16)
    node.heal(2)
    node.vanish(6)
    node.reboot()
    spoil(node)
    node.vanish(7)
    again = SimulatedNode(built, tmp_path)
    assert again.boot_id == node.boot_id
    assert again.bindings() == node.bindings()
    assert len(again.bindings()) == 7
    for gpu in range(8):
        now, was = again.condition(gpu), node.condition(gpu)
        assert (now.hung_until is None) is (was.hung_until is None)
        assert replace(now, hung_until=None) == replace(was, hung_until=None)
    assert opened(again).device_count() == 7
