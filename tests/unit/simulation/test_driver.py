import json
import logging
import threading
import time

import pytest

from gpu_plugin.containers.host_view import HostView
from gpu_plugin.devices.nvml_h import ALL_INSTANCES, EventType, Return, Threshold, TopologyLevel
from gpu_plugin.health.observation import Fabric
from gpu_plugin.nvml import port
from gpu_plugin.nvml.port import NVML_FUNCTIONS, NvmlError
from gpu_plugin.simulation import faults
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import STATE_FILE
from gpu_plugin.simulation.host import SimulatedHost

from .opened import code, described, handles, make_node, opened

XID = EventType.XID_CRITICAL


class Clock:
    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


class Caller(threading.Thread):
    """Makes one call on a thread of its own, as the plugin does."""

    def __init__(self, call):
        super().__init__(daemon=True)
        self.call = call
        self.result = self.error = None
        self.ended = 0.0
        self.begun = threading.Event()
        self.start()
        assert self.begun.wait(5)

    def run(self):
        self.begun.set()
        try:
            self.result = self.call()
        except NvmlError as error:
            self.error = error
        self.ended = time.perf_counter()

    def end(self):
        self.join(5)
        assert not self.is_alive()
        return self


NODE_CALLS = {
    "open": (),
    "close": (),
    "driver_version": (),
    "cuda_version": (),
    "device_count": (),
    "handle_by_index": (0,),
    "handle_by_uuid": ("",),
    "handle_by_pci_bus_id": ("",),
    "common_ancestor": (port.Handle(0), port.Handle(0)),
    "event_set": (),
    "free_event_set": (port.EventSet(1),),
    "wait": (port.EventSet(1), 0),
}
MORE_ARGUMENTS = {
    "mig_handle": (0,),
    "set_compute_mode": (3,),
    "temperature_threshold": (Threshold.SHUTDOWN,),
    "nvlink_to_switch": (0,),
    "field_values": ((port.Field(230),),),
    "nvlink_remote_bus_id": (0,),
    "register_events": (8, port.EventSet(1)),
}
DEVICE_CALLS = {call: MORE_ARGUMENTS.get(call, ()) for call in NVML_FUNCTIONS if call not in NODE_CALLS}


def test_it_is_the_whole_port():
    node = make_node()
    host: HostView = SimulatedHost(node)
    assert NVML_FUNCTIONS.keys() <= vars(SimulatedDriver).keys()
    assert host.boot_id() == node.boot_id


def test_the_h200_answers_as_recorded():
    driver = opened(make_node("h200"))
    (gpu,) = handles(driver)
    assert driver.driver_version() == "580.159.04"
    assert driver.uuid(gpu) == "GPU-92e1c9b6-dd9b-778f-6e34-6f0d728ad189"
    assert driver.handle_by_uuid(driver.uuid(gpu)) == gpu
    assert (driver.minor_number(gpu), driver.pci_bus_id(gpu)) == (0, "00000000:00:06.0")
    assert (driver.name(gpu), driver.architecture(gpu)) == ("NVIDIA H200", 9)
    assert (driver.memory_total(gpu), driver.mig_mode(gpu)) == (150754820096, (0, 0))
    assert (driver.temperature(gpu), driver.supported_event_types(gpu)) == (32, 65439)
    assert [driver.temperature_threshold(gpu, kind) for kind in Threshold] == [95, 89, 95, 87]
    action, memory = driver.field_values(gpu, (port.Field(230), port.Field(82)))
    assert action == 0
    assert isinstance(memory, NvmlError)
    assert memory.code == Return.NOT_SUPPORTED
    assert driver.handle_by_pci_bus_id("0000:00:06.0") == driver.handle_by_pci_bus_id("00000000:00:06.0") == gpu
    assert (driver.margin_temperature(gpu), driver.uncorrected_ecc_errors(gpu)) == (55, 0)
    assert (driver.remapped_rows(gpu), driver.clocks_event_reasons(gpu)) == (port.RemappedRows(0, 0, False, False), 1)
    assert (driver.fabric(gpu), driver.pcie_link(gpu)) == (Fabric(0), port.PcieLink(16, 16))
    for call in (driver.memory_affinity, driver.retired_pages_pending, driver.nvlink_states):
        assert code(call, gpu) == Return.NOT_SUPPORTED
    assert code(driver.nvlink_remote_bus_id, gpu, 0) == Return.NOT_SUPPORTED
    assert code(driver.nvlink_to_switch, gpu, 0) == Return.NOT_SUPPORTED
    assert driver.common_ancestor(gpu, gpu) == TopologyLevel.INTERNAL
    host = SimulatedHost(make_node("h200"))
    assert host.numa_node("00000000:00:06.0") is None
    caps = {"/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2"}
    assert (
        host.device_roots().keys()
        == {"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia0", "/dev/nvidiactl"} | caps
    )


def test_before_open_nothing_answers():
    driver = SimulatedDriver(make_node())
    for call in set(NVML_FUNCTIONS) - {"open"}:
        given = NODE_CALLS[call] if call in NODE_CALLS else (port.Handle(0), *DEVICE_CALLS[call])
        with pytest.raises(NvmlError) as caught:
            getattr(driver, call)(*given)
        assert (caught.value.code, caught.value.call) == (Return.UNINITIALIZED, NVML_FUNCTIONS[call])


def test_open_is_counted(driver):
    driver.open()
    driver.close()
    assert driver.device_count() == 8
    driver.close()
    assert code(driver.device_count) == Return.UNINITIALIZED


def test_bad_arguments(driver, gpu):
    assert code(driver.handle_by_index, 8) == Return.INVALID_ARGUMENT
    assert code(driver.handle_by_index, -1) == Return.INVALID_ARGUMENT
    assert code(driver.handle_by_uuid, "GPU-none") == Return.NOT_FOUND
    assert code(driver.handle_by_pci_bus_id, "00000000:FF:00.0") == Return.NOT_FOUND
    assert code(driver.handle_by_pci_bus_id, "") == Return.NOT_FOUND
    assert code(driver.uuid, port.Handle(gpu + 1)) == Return.INVALID_ARGUMENT
    assert code(driver.common_ancestor, gpu, port.Handle(0)) == Return.INVALID_ARGUMENT
    assert code(driver.temperature_threshold, gpu, 9) == Return.INVALID_ARGUMENT
    for call in (driver.nvlink_remote_bus_id, driver.nvlink_to_switch):
        assert code(call, gpu, 18) == code(call, gpu, -1) == Return.INVALID_ARGUMENT


def test_what_a_part_lacks_is_not_supported():
    driver = opened(make_node("l40s-pcie-8"))
    gpu = driver.handle_by_index(0)
    assert code(driver.mig_mode, gpu) == Return.NOT_SUPPORTED
    assert code(driver.temperature_threshold, gpu, Threshold.MEM_MAX) == Return.NOT_SUPPORTED
    driver = opened(described())
    gpu = driver.handle_by_index(0)
    lacks = """architecture memory_total supported_event_types margin_temperature uncorrected_ecc_errors sram_threshold_exceeded
    remapped_rows retired_pages_pending unrepairable_memory clocks_event_reasons nvlink_states fabric pcie_link pcie_generation
    pcie_max_generation pcie_replays vgpu_licensed memory_used memory_affinity compute_capability"""
    for call in lacks.split():
        assert code(getattr(driver, call), gpu) == Return.NOT_SUPPORTED
    assert code(driver.register_events, gpu, 8, driver.event_set()) == Return.NOT_SUPPORTED
    driver = opened(described(gpu={"name": "x", "fields": {165: 0}}))
    assert driver.field_values(driver.handle_by_index(0), (port.Field(165),))[0].code == Return.NOT_SUPPORTED


def test_power_is_the_same_by_function_and_by_field(node, driver, gpu):
    for watts, milliwatts in ((None, 70_000), (300, 300_000)):
        node.change(0, watts=watts)
        assert driver.power_usage(gpu) == milliwatts
        assert driver.field_values(gpu, (port.Field(186), port.Field(190))) == (milliwatts, driver.power_limit(gpu))


def test_links_lead_to_peers_by_number():
    driver = opened(make_node("dgx1-v100"))
    gpus = handles(driver)
    remotes = [driver.nvlink_remote_bus_id(gpus[0], link) for link in range(6)]
    assert [remotes.count(driver.pci_bus_id(gpu)) for gpu in gpus] == [0, 1, 1, 2, 2, 0, 0, 0]
    assert driver.common_ancestor(gpus[0], gpus[1]) == TopologyLevel.SINGLE
    assert driver.common_ancestor(gpus[7], gpus[0]) == TopologyLevel.SYSTEM
    driver = opened(described(count=2, nvlink={"links": 2, "pairs": "0-1:1"}))
    gpu = driver.handle_by_index(0)
    assert driver.nvlink_remote_bus_id(gpu, 1) is None
    assert driver.nvlink_states(gpu) == (True, False)
    assert not driver.nvlink_to_switch(gpu, 0)
    assert not driver.nvlink_to_switch(gpu, 1)
    driver = opened(make_node("dgx-a100"))
    assert driver.nvlink_states(driver.handle_by_index(0)) == (True,) * 12
    assert driver.nvlink_to_switch(driver.handle_by_index(0), 11)


def test_every_call_is_counted():
    driver = opened(make_node())
    gpus = handles(driver)
    assert code(driver.handle_by_index, 99) == Return.INVALID_ARGUMENT
    driver.uuid(gpus[0])
    assert driver.calls == {"open": 1, "device_count": 1, "handle_by_index": 9, "uuid": 1}


def test_a_call_takes_as_long_as_asked():
    slept: list[float] = []
    driver = opened(make_node(), latency={"mig_mode": 0.000156}, sleep=slept.append)
    gpu = driver.handle_by_index(0)
    driver.uuid(gpu)
    driver.mig_mode(gpu)
    assert slept == [0.000156]
    with pytest.raises(ValueError, match="mig: no such driver call"):
        SimulatedDriver(make_node(), latency={"mig": 1})


# Events


def test_events_come_in_order_to_every_set_that_asked(node, driver, gpus):
    one, other, none = driver.event_set(), driver.event_set(), driver.event_set()
    for gpu in gpus:
        driver.register_events(gpu, XID, one)
    driver.register_events(gpus[3], XID, other)
    driver.register_events(gpus[3], 0x4, none)
    assert node.post(3, XID, 79) == 2
    assert node.post(4, XID, 31) == 1
    assert driver.wait(one, 0) == port.Event(gpus[3], 8, 79, ALL_INSTANCES, ALL_INSTANCES)
    assert driver.wait(one, 0) == port.Event(gpus[4], 8, 31)
    assert driver.wait(other, 0).handle == gpus[3]
    for events in (one, other, none):
        assert code(driver.wait, events, 0) == Return.TIMEOUT


def test_registering_again_adds_and_starts_now(node, driver, gpu):
    events = driver.event_set()
    node.post(0, XID, 1)
    driver.register_events(gpu, 0x2, events)
    driver.register_events(gpu, XID, events)
    node.post(0, 0x2, 7)
    node.post(0, XID, 48)
    assert [driver.wait(events, 0).data for _ in range(2)] == [7, 48]


def test_masks_are_judged_as_nvml_does():
    driver = opened(make_node("t4-4"))
    gpu = driver.handle_by_index(0)
    events = driver.event_set()
    assert code(driver.register_events, gpu, 0x8000 | XID, events) == Return.NOT_SUPPORTED
    assert code(driver.register_events, gpu, 0x10000, events) == Return.INVALID_ARGUMENT
    assert code(driver.register_events, gpu, XID, port.EventSet(99)) == Return.INVALID_ARGUMENT
    driver.register_events(gpu, driver.supported_event_types(gpu), events)


def test_a_wait_ends_as_the_event_comes(node, driver):
    events = driver.event_set()
    driver.register_events(driver.handle_by_index(0), XID, events)
    waiter = Caller(lambda: driver.wait(events, 60_000))
    while not driver.calls["wait"]:
        threading.Event().wait(0.001)
    posted = time.perf_counter()
    node.post(0, XID, 79)
    assert waiter.end().result.data == 79
    assert waiter.ended - posted < 10  # under a millisecond on an idle machine, a minute if it slept it out


def test_a_wait_ends_with_its_event_set_and_with_the_driver(driver):
    freed, left = driver.event_set(), driver.event_set()
    waiter = Caller(lambda: driver.wait(freed, 60_000))
    driver.free_event_set(freed)
    assert waiter.end().error.code == Return.INVALID_ARGUMENT
    assert code(driver.free_event_set, freed) == Return.INVALID_ARGUMENT
    waiter = Caller(lambda: driver.wait(left, 60_000))
    driver.close()
    assert waiter.end().error.code == Return.UNINITIALIZED


# Faults


def test_a_lost_gpu_answers_nothing_else(node, driver, gpus):
    node.lose(3)
    for call, arguments in DEVICE_CALLS.items():
        with pytest.raises(NvmlError) as caught:
            getattr(driver, call)(gpus[3], *arguments)
        assert (caught.value.code, caught.value.call) == (Return.GPU_IS_LOST, NVML_FUNCTIONS[call])
    for low, high in ((0, 3), (3, 0)):
        assert code(driver.common_ancestor, gpus[low], gpus[high]) == Return.GPU_IS_LOST
    assert driver.device_count() == 8
    assert code(driver.handle_by_index, 3) == Return.GPU_IS_LOST
    assert code(driver.handle_by_uuid, node.profile.gpus[3].uuid) == Return.GPU_IS_LOST
    assert code(driver.wait, driver.event_set(), 0) == Return.TIMEOUT
    assert driver.uuid(gpus[2])
    node.heal(3)
    assert driver.uuid(gpus[3])


def test_what_was_in_a_set_before_a_gpu_of_it_was_lost_is_delivered_first(node, driver):
    events = driver.event_set()
    for gpu in handles(driver)[2:5]:
        driver.register_events(gpu, XID, events)
    node.raise_xid(2, 95)
    node.raise_xid(3, 79)
    node.lose(3)
    node.raise_xid(4, 31)  # no set gets this event
    assert [driver.wait(events, 0).data for _ in range(2)] == [95, 79]
    assert code(driver.wait, events, 0) == Return.GPU_IS_LOST


def test_a_lost_gpu_of_a_set_makes_it_deaf_to_the_others(node, driver, gpus):
    events, without = driver.event_set(), driver.event_set()
    for gpu in gpus[2:5]:
        driver.register_events(gpu, XID, events)
    for gpu in (gpus[2], gpus[4]):
        driver.register_events(gpu, XID, without)
    waiter = Caller(lambda: driver.wait(events, 60_000))
    while not driver.calls["wait"]:
        threading.Event().wait(0.001)
    node.lose(3)
    assert waiter.end().error.code == Return.GPU_IS_LOST
    node.raise_xid(2, 95)
    assert [code(driver.wait, events, 0) for _ in range(2)] == [Return.GPU_IS_LOST] * 2
    assert driver.wait(without, 0).data == 95
    node.heal(3)
    assert driver.wait(events, 0).data == 95


def test_a_lost_gpu_is_lost_to_the_events_of_the_next_daemon_too(tmp_path):
    make_node(state=tmp_path).lose(3)
    node = make_node(state=tmp_path)
    driver = opened(node)
    events = driver.event_set()
    driver.register_events(driver.handle_by_index(2), XID, events)
    assert code(driver.wait, events, 0) == Return.TIMEOUT
    assert code(driver.handle_by_index, 3) == Return.GPU_IS_LOST


@pytest.mark.parametrize(
    ("refusal", "heard"), [(Return.UNKNOWN, False), (Return.NOT_SUPPORTED, True), (Return.GPU_IS_LOST, True)]
)
def test_a_set_is_undefined_after_a_registration_that_ended_with_unknown(refusal, heard, node, driver, gpus):
    events = driver.event_set()
    driver.register_events(gpus[2], XID, events)
    node.refuse("register_events", refusal, gpu=3, times=1)
    assert code(driver.register_events, gpus[3], XID, events) == refusal
    node.raise_xid(2, 95)
    if heard:
        assert driver.wait(events, 0).data == 95
    else:
        assert code(driver.wait, events, 0) == Return.TIMEOUT
    driver.free_event_set(events)
    anew = driver.event_set()
    driver.register_events(gpus[2], XID, anew)
    node.raise_xid(2, 95)
    assert driver.wait(anew, 0).data == 95


def test_every_call_about_a_slow_gpu_takes_its_time_and_no_other(node, driver, gpus):
    said = faults.apply(node, {"gpu": 3, "slow": 0.02})
    assert said.endswith(": every driver call takes 0.02 s, until healed.")
    begun = time.perf_counter()
    driver.uuid(gpus[3])
    driver.temperature(gpus[3])
    assert time.perf_counter() - begun > 0.035
    node.change(3, slow=3600.0)
    stuck = Caller(lambda: driver.uuid(gpus[3]))
    assert driver.uuid(gpus[2])
    assert stuck.is_alive()
    node.heal(3)
    assert stuck.end().result == node.profile.gpus[3].uuid


def test_a_hung_gpu_blocks_its_calls_alone_until_healed(node, driver, gpus):
    node.hang(3, 3600)
    stuck = [Caller(lambda: driver.uuid(gpus[3])), Caller(lambda: driver.handle_by_index(3))]
    assert driver.uuid(gpus[2])
    assert driver.device_count() == 8
    assert code(driver.wait, driver.event_set(), 0) == Return.TIMEOUT
    assert all(caller.is_alive() for caller in stuck)
    node.heal(3)
    uuid, handle = (caller.end().result for caller in stuck)
    assert (uuid, handle) == (node.profile.gpus[3].uuid, gpus[3])


def test_a_hang_ends_by_itself(node):
    gpu = opened(node).handle_by_index(3)
    assert faults.apply(node, {"gpu": 3, "hang": 0.02}).endswith(": every driver call hangs for 0.02 s.")
    begun = time.perf_counter()
    opened(node).uuid(gpu)
    assert time.perf_counter() - begun > 0.015


def test_close_ends_no_hang(node, driver):
    gpu = driver.handle_by_index(3)
    node.hang(3, 3600)
    stuck = Caller(lambda: driver.uuid(gpu))
    while driver.calls["uuid"] < 1:
        threading.Event().wait(0.001)
    driver.close()
    stuck.join(0.02)
    assert stuck.is_alive()
    node.heal(3)
    stuck.end()


def test_energy_grows_and_starts_again_when_healed():
    wall = Clock()
    node = make_node("h200", wall_clock=wall)
    driver = opened(node)
    gpu = driver.handle_by_index(0)
    a_day = 86400 * 60 * 1000
    assert driver.total_energy(gpu) == a_day  # the driver was loaded long before anyone looked
    wall.now += 10
    assert driver.total_energy(gpu) == a_day + 10 * 60 * 1000
    node.heal(0)
    assert driver.total_energy(gpu) == 0
    wall.now -= 100  # the wall clock may be set
    assert driver.total_energy(gpu) == 0


def test_any_call_can_be_refused(node, driver, gpus):
    node.refuse("uuid", Return.UNKNOWN, gpu=3, times=2)
    assert code(driver.uuid, gpus[3]) == Return.UNKNOWN
    assert driver.uuid(gpus[2])
    assert code(driver.uuid, gpus[3]) == Return.UNKNOWN
    assert driver.uuid(gpus[3])
    node.refuse("device_count", 12345)
    assert [code(driver.device_count) for _ in range(3)] == [12345] * 3
    node.refuse("open", Return.DRIVER_NOT_LOADED)
    assert code(SimulatedDriver(node).open) == Return.DRIVER_NOT_LOADED
    with pytest.raises(ValueError, match="uid: no such driver call"):
        node.refuse("uid", Return.UNKNOWN)


def test_all_threads_at_once(node, driver, gpus):
    events = driver.event_set()
    for gpu in gpus:
        driver.register_events(gpu, XID, events)
    callers = [Caller(lambda gpu=gpu: [driver.temperature(gpu) for _ in range(200)]) for gpu in gpus]
    posters = [Caller(lambda index=index: [node.post(index, XID, 13) for _ in range(50)]) for index in range(8)]
    got = [driver.wait(events, 5000) for _ in range(400)]
    for caller in callers + posters:
        caller.end()
    assert driver.calls["temperature"] == 1600
    assert [got.count(port.Event(gpu, 8, 13)) for gpu in gpus] == [50] * 8


# Memory


def test_hardware_does_not_heal_when_a_daemon_restarts(tmp_path):
    clock, wall = Clock(), Clock(1e9)
    node = make_node(state=tmp_path, clock=clock, wall_clock=wall)
    node.lose(3)
    node.change(4, temperature=91)
    node.hang(5, 60)
    file = tmp_path / STATE_FILE
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]

    later, wall_later = Clock(5.0), Clock(1e9 + 40)
    again = make_node(state=tmp_path, clock=later, wall_clock=wall_later)
    driver = opened(again)
    assert again.boot_id == node.boot_id
    assert code(driver.handle_by_index, 3) == Return.GPU_IS_LOST
    assert driver.temperature(driver.handle_by_index(4)) == 91
    assert driver.total_energy(driver.handle_by_index(0)) == (86400 + 40) * 70 * 1000
    stuck = Caller(lambda: driver.handle_by_index(5))
    stuck.join(0.01)
    assert stuck.is_alive()
    later.now += 20  # the minute is over
    again.change(4, temperature=90)
    again.heal(5)
    stuck.end()

    again.heal(3)
    again.heal(4)
    healed = opened(make_node(state=tmp_path, clock=later, wall_clock=wall_later))
    assert healed.temperature(healed.handle_by_index(4)) == 32
    assert len(handles(healed)) == 8


def test_another_profile_starts_fresh(tmp_path):
    node = make_node(state=tmp_path)
    node.lose(0)
    other = make_node("dgx-a100", state=tmp_path)
    assert other.boot_id != node.boot_id
    assert len(handles(opened(other))) == 8


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"profile": 1}', b"\xff\x00"])
def test_a_corrupt_file_is_warned_about_and_replaced(tmp_path, caplog, content):
    (tmp_path / STATE_FILE).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        node = make_node(state=tmp_path)
    assert "starts fresh, without its earlier faults" in caplog.text
    assert json.loads((tmp_path / STATE_FILE).read_bytes())["boot_id"] == node.boot_id
    assert (tmp_path / f"{STATE_FILE}.corrupt").read_bytes() == content


def test_an_unwritable_state_directory_does_not_stop_a_fault(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    node = make_node(state=tmp_path / "file" / "state")
    node.lose(0)
    assert "will be lost when this daemon ends" in caplog.text
    assert code(opened(node).handle_by_index, 0) == Return.GPU_IS_LOST


def test_a_file_that_went_is_written_again(tmp_path):
    node = make_node(state=tmp_path)
    node.lose(1)
    boot = node.boot_id
    before = (tmp_path / STATE_FILE).stat().st_ino
    node.keep()
    assert (tmp_path / STATE_FILE).stat().st_ino == before
    (tmp_path / STATE_FILE).unlink()
    node.keep()
    assert make_node(state=tmp_path).boot_id == boot
    make_node().keep()
