import threading

import anyio
import pytest
from msgspec.structs import replace

from gpu_plugin.devices.device import PLACEHOLDER
from gpu_plugin.devices.node import Gpu, Link
from gpu_plugin.devices.nvml_h import EventType, Return
from gpu_plugin.health.observation import Fault, Sample, XidEvent
from gpu_plugin.nvml import events, monitor, questions, schedule, subscription
from gpu_plugin.nvml.port import Event, Handle, NvmlError
from gpu_plugin.simulation.driver import SimulatedDriver

from .conftest import driver_threads
from .monitored import FOREVER, LONG, NEVER, Bench, but, remembered


async def gone(threads):
    for thread in threads:
        await anyio.to_thread.run_sync(thread.join, LONG)
    return not any(thread.is_alive() for thread in threads)


# Finding the GPUs


async def test_open_finds_every_gpu_and_publishes_the_node_once():
    bench = Bench()
    node = await bench.opened()
    assert bench.nodes == [node]
    assert [gpu.uuid for gpu in node.gpus] == bench.uuids
    assert bench.unreadable() == {}
    assert node.driver_version == bench.node.profile.driver_version
    assert node.cuda_version == bench.node.profile.cuda_version
    assert node.device_nodes == bench.node.profile.device_nodes
    assert len(node.links) == 28


async def test_all_gpus_are_probed_at_once():
    together = threading.Barrier(8, timeout=LONG)

    class Meeting(SimulatedDriver):
        def uuid(self, handle):
            together.wait()  # returns once all eight calls wait
            return super().uuid(handle)

    bench = Bench(driver=Meeting)
    node = await bench.opened()
    assert [gpu.uuid for gpu in node.gpus] == bench.uuids
    assert [gpu.index for gpu in node.gpus] == list(range(8))


@pytest.mark.parametrize("call", ["open", "driver_version", "device_count"])
async def test_without_a_driver_open_is_refused_and_leaves_nothing_behind(call):
    bench, before = Bench(), driver_threads()
    bench.node.refuse(call, Return.LIB_RM_VERSION_MISMATCH)
    with pytest.raises(NvmlError) as caught:
        await bench.monitor.open()
    assert caught.value.code == Return.LIB_RM_VERSION_MISMATCH
    assert bench.nodes == []
    assert await gone(set(driver_threads()) - set(before))
    # The driver counts its GPUs when it is opened first: a later attempt must not find it open.
    assert bench.driver._opened == 0


async def test_a_driver_that_does_not_answer_is_not_waited_for():
    free, before = threading.Event(), driver_threads()
    bench = Bench(
        timeout=0.02, driver=lambda node: SimulatedDriver(node, latency={"open": 1}, sleep=lambda _: free.wait())
    )
    with pytest.raises(TimeoutError):
        await bench.monitor.open()
    free.set()
    assert await gone(set(driver_threads()) - set(before))


class Empty(SimulatedDriver):
    def device_count(self):
        super().device_count()
        return 0


async def test_without_a_gpu_nothing_is_published_and_nothing_left_behind():
    bench = Bench(driver=Empty)
    node = await bench.monitor.open()
    assert node.gpus == ()
    assert bench.nodes == []
    assert bench.driver._opened == 0
    assert await gone(driver_threads())


async def test_remembered_gpus_are_listed_also_if_no_other_is_left():
    known = Gpu("GPU-known", 0, minor=0, model="NVIDIA Known")
    bench = Bench(driver=Empty, remembered=[known])
    node = await bench.opened()
    assert node.gpus == (replace(known, unreadable="the driver does not find it any more"),)
    assert bench.nodes == [node]


async def test_a_gpu_lost_at_start_hides_no_other():
    bench = Bench()
    bench.node.lose(3)
    node = await bench.opened()
    assert [gpu.uuid for gpu in node.gpus] == [*bench.uuids[:3], f"{PLACEHOLDER}3", *bench.uuids[4:]]
    assert list(bench.unreadable()) == [f"{PLACEHOLDER}3"]
    assert "the GPU is lost" in bench.unreadable()[f"{PLACEHOLDER}3"]
    assert len(node.links) == 7 * 6 // 2
    assert node.link(bench.uuids[0], f"{PLACEHOLDER}3") == Link()


@pytest.mark.parametrize(("call", "named"), [("", "the GPU is lost"), ("memory_total", "nvmlDeviceGetMemoryInfo")])
async def test_a_remembered_gpu_that_is_lost_at_the_start_keeps_its_description(call, named):
    known = remembered()
    bench = Bench(remembered=known)
    if call:
        bench.node.refuse(call, Return.GPU_IS_LOST, gpu=3)
    else:
        bench.node.lose(3)
    node = await bench.opened()
    assert [gpu.uuid for gpu in node.gpus] == bench.uuids
    assert node.gpus[3] == replace(known[3], unreadable=node.gpus[3].unreadable)
    assert list(bench.unreadable()) == [bench.uuids[3]]
    assert named in bench.unreadable()[bench.uuids[3]]


async def test_a_remembered_gpu_that_the_driver_no_longer_has_is_listed():
    vanished = Gpu("GPU-vanished", 4, minor=9, model="NVIDIA Vanished")
    bench = Bench(remembered=[*remembered()[:2], vanished])
    node = await bench.monitor.open()
    assert len(node.gpus) == 9
    assert bench.unreadable() == {"GPU-vanished": "the driver does not find it any more"}
    assert next(gpu for gpu in node.gpus if gpu.uuid == "GPU-vanished").minor == 9
    async with bench.running():
        await bench.rounds()
        await bench.until(lambda: "GPU-vanished" in dict(bench.seen))
        assert {seen.fault for uuid, seen in bench.seen if uuid == "GPU-vanished" and isinstance(seen, Sample)} == {
            "vanished"
        }
        assert bench.faults(0)[0] == ""


async def test_a_gpu_that_hangs_at_start_hides_no_other_and_joins_when_it_is_back(caplog):
    bench = Bench(timeout=0.2)
    bench.node.hang(3, FOREVER)
    node = await bench.monitor.open()
    assert bench.unreadable() == {f"{PLACEHOLDER}3": "the driver has not described it within 0.2 s"}
    assert len(node.links) == 7 * 6 // 2
    async with bench.running():
        await bench.until(lambda: (f"{PLACEHOLDER}3", "hung") in [(u, getattr(s, "fault", "")) for u, s in bench.seen])
        await bench.rounds(2, but(3))
        bench.node.heal(3)
        await bench.until(lambda: len(bench.nodes) == 2)
        assert bench.unreadable() == {}
        assert [gpu.uuid for gpu in bench.nodes[1].gpus] == bench.uuids
        assert len(bench.nodes[1].links) == 28
        assert bench.nodes[1].driver_version == node.driver_version
        since = await bench.rounds(2)
        assert set(bench.faults(3, since)) == {""}
    assert bench.driver.calls["register_events"] == 8


@pytest.mark.parametrize("known", [[], remembered()])
async def test_a_gpu_that_was_lost_at_the_start_joins_with_its_events(known):
    bench = Bench(remembered=known)
    bench.node.lose(3)
    async with bench.watching(rounds=0):
        await bench.until(lambda: "lost" in [getattr(seen, "fault", "") for _, seen in bench.seen])
        bench.node.heal(3)
        await bench.until(lambda: len(bench.nodes) == 2)
        assert [gpu.uuid for gpu in bench.nodes[1].gpus] == bench.uuids
        assert bench.unreadable() == {}
        assert bench.nodes[1].gpus[3].memory_bytes is not None
        await bench.rounds()
        await bench.xid(3, 48)


async def test_a_gpu_that_answers_for_another_is_not_listed_twice():
    bench = Bench()
    bench.node.lose(3)
    await bench.monitor.open()
    real = bench.driver.handle_by_index
    bench.driver.handle_by_index = lambda index: real(4 if index == 3 else index)
    async with bench.running():
        await bench.until(
            lambda: (f"{PLACEHOLDER}3", Sample(fault=Fault.ERROR, detail="another GPU has its uuid")) in bench.seen
        )
    assert len(bench.nodes) == 1


async def test_an_odd_exception_about_one_gpu_hides_no_other(monkeypatch):
    bench = Bench()
    host = bench.monitor.host

    def odd(bus_id):
        if bus_id == bench.node.profile.gpus[2].pci_bus_id:
            raise RuntimeError("odd")
        return 0

    monkeypatch.setattr(host, "numa_node", odd)
    node = await bench.monitor.open()
    assert bench.unreadable() == {f"{PLACEHOLDER}2": "RuntimeError('odd')"}
    assert len(node.gpus) == 8
    bench.monitor.close()


# Watching them


async def test_an_xid_is_its_own_gpus_alone():
    async with Bench(poll=NEVER).watching() as bench:
        looked = len(bench.samples(5))
        await bench.xid(5, 79)
        await bench.until(lambda: len(bench.samples(5)) > looked)  # an event has every GPU looked at
    assert [(uuid, seen) for uuid, seen in bench.seen if isinstance(seen, XidEvent)] == [(bench.uuids[5], XidEvent(79))]


async def test_events_of_another_kind_are_a_reason_to_look():
    async with Bench(poll=NEVER).watching() as bench:
        since = len(bench.seen)
        assert bench.node.post(2, EventType.GPU_UNAVAILABLE, 1) == 1
        await bench.until(lambda: bench.samples(2, since))
    assert not [seen for _, seen in bench.seen if isinstance(seen, XidEvent)]


async def test_an_event_that_comes_during_a_round_brings_another_round():
    bench = Bench(poll=NEVER)
    await bench.monitor.open()

    def during(uuid, seen):
        if uuid == bench.uuids[1] and len(bench.samples(0)) == 1:
            bench.monitor.look_now()  # the first one's turn is over already

    async with bench.running():
        bench.meddle = during
        await bench.rounds(2)


async def test_a_storm_of_events_causes_one_look_at_its_gpu(monkeypatch):
    monkeypatch.setattr(schedule, "EVENT_GAP", NEVER)
    async with Bench(poll=NEVER).watching() as bench:
        looked = len(bench.samples(5))
        for _ in range(50):
            bench.node.post(5, EventType.XID_CRITICAL, 31)
        await bench.until(lambda: bench.of(5).count(XidEvent(31)) == 50)
        await bench.until(lambda: len(bench.samples(5)) == looked + 1)  # the first event brings one at once
        bench.node.post(6, EventType.XID_CRITICAL, 31)
        await bench.until(lambda: len(bench.samples(6)) == looked + 1)
    assert [len(bench.samples(gpu)) - looked for gpu in range(8)] == [0, 0, 0, 0, 0, 1, 1, 0]


async def test_steady_looks_also_show_which_counters_are_comparable():
    bench = Bench()
    for gpu in range(4):
        bench.node.change(gpu, persistence=False)
    async with bench.watching(rounds=0):
        await bench.rounds(questions.TURNS)
        before = [{sample.counting for sample in bench.samples(gpu)} for gpu in range(8)]
        await bench.monitor.release(None)
        since = len(bench.seen)
        await bench.monitor.resume(None)
        await bench.rounds(2)
        after = [{sample.counting for sample in bench.samples(gpu, since)} for gpu in range(8)]
    assert before[4:] == after[4:] == [{0}] * 4, "the driver keeps them initialised"
    assert before[:4] == [before[0]] * 4
    assert after[:4] == [after[0]] * 4
    assert len(before[0]) == len(after[0]) == 1
    assert None not in before[0] | after[0]
    assert before[0] != after[0], "each opening counts anew"


async def test_without_health_checks_only_core_readings_are_read():
    bench = Bench(poll=NEVER, judging=False)
    await bench.monitor.open()
    core = {"temperature", "field_values", "memory_used", "utilization"}
    asked = {*core, "mig_mode", "total_energy", "clocks_event_reasons", "fabric"}
    calls = {call: bench.driver.calls[call] for call in asked}
    async with bench.running():
        await bench.rounds(1)
        bench.node.lose(3)
        bench.monitor.look_now()
        await bench.until(lambda: bench.faults(3)[-1:] == ["lost"])
        await bench.until(lambda: len(bench.samples(7)) == 2)
    more = {call for call in asked if bench.driver.calls[call] > calls[call]}
    assert more == {*core, "mig_mode"}


async def test_an_event_of_an_unknown_gpu_counts_against_no_gpu(caplog):
    async with Bench("h200", poll=NEVER).watching() as bench:
        bench.monitor._reports.receive(Event(Handle(1), EventType.XID_CRITICAL, 79))
        await bench.rounds()
    assert not [seen for _, seen in bench.seen if isinstance(seen, XidEvent)]
    assert "came from an unknown GPU" in caplog.text


async def test_a_lost_gpu_is_lost_alone_and_clean_after_its_repair():
    async with Bench().watching() as bench:
        bench.node.lose(2)
        await bench.until(lambda: bench.faults(2).count("lost") >= 3)
        await bench.heal(2)
        since = await bench.rounds(2)
        assert set(bench.faults(2, since)) == {""}
        assert bench.driver.calls["handle_by_uuid"] >= 3
    assert all(set(bench.faults(gpu)) == {""} for gpu in but(2))
    assert set(bench.faults(2)) == {"", "lost"}
    energy = [sample.energy for sample in bench.samples(2) if sample.energy is not None]
    assert energy[-1] < energy[0]


class Renumbering(SimulatedDriver):
    """Gives a GPU a new handle at each lookup by uuid, and knows only the newest."""

    def __init__(self, node):
        super().__init__(node)
        self.newest: dict[int, int] = {}

    def handle_by_uuid(self, uuid):
        plain = super().handle_by_uuid(uuid)
        self.newest[plain] = self.newest.get(plain, 0) + 1
        return self._new(plain)

    def wait(self, event_set, timeout_ms):
        event = super().wait(event_set, timeout_ms)
        return replace(event, handle=self._new(event.handle))

    def _new(self, plain):
        return Handle(plain + (self.newest.get(plain, 0) << 48))

    def _find(self, handle):
        plain = Handle(handle & ((1 << 48) - 1))
        return super()._find(plain) if handle == self._new(plain) else None


async def test_after_a_repair_the_new_handle_is_used_for_looks_and_events():
    async with Bench(driver=Renumbering).watching() as bench:
        await bench.lose(2)
        await bench.heal(2)
        since = await bench.rounds(2)
        assert set(bench.faults(2, since)) == {""}
        assert bench.driver.newest == {bench.driver.handle_by_index(2): 1}
        assert bench.driver.calls["register_events"] > 8
        await bench.xid(2, 94)


async def test_a_hung_gpu_holds_no_other_and_comes_back():
    async with Bench(timeout=0.5).watching() as bench:
        bench.node.hang(2, FOREVER)
        began = anyio.current_time()
        since = await bench.rounds(3, but(2))
        await bench.until(lambda: "hung" in bench.faults(2, since))
        assert anyio.current_time() - began >= 0.5
        assert set(bench.faults(2, since)) <= {"", "hung"}
        await bench.rounds(3, but(2))  # the others are looked at while it hangs
        assert len([thread for thread in driver_threads() if thread.name == "nvml-calls"]) <= 2
        assert bench.faults(2)[-1] == "hung"
        detail = bench.samples(2)[-1].detail
        assert detail.startswith("the driver has not answered for ")
        await bench.heal(2)
        since = await bench.rounds(2)
        assert set(bench.faults(2, since)) == {""}
    assert all(set(bench.faults(gpu)) == {""} for gpu in but(2))


@pytest.mark.parametrize("error", [NvmlError(Return.UNKNOWN, "nvmlDeviceGetTemperature"), ZeroDivisionError("odd")])
async def test_a_look_that_raises_is_an_error_until_it_is_over(error):
    bench = Bench()
    await bench.monitor.open()
    real, sixth = bench.driver.temperature, bench.driver.handle_by_index(6)

    def odd(handle):
        if handle == sixth:
            raise error
        return real(handle)

    bench.driver.temperature = odd
    async with bench.running():
        await bench.until(lambda: bench.faults(6)[:2] == ["error", "error"])
        bench.driver.temperature = real
        await bench.until(lambda: bench.faults(6)[-1:] == [""])
    assert str(error) in bench.samples(6)[0].detail
    assert bench.good(but(6))


async def test_a_failed_wait_is_a_reason_to_look(monkeypatch):
    monkeypatch.setattr(events, "WAIT_MS", 5)
    async with Bench(poll=NEVER).watching() as bench:
        bench.node.refuse("wait", Return.UNKNOWN, times=1)
        await bench.rounds()
    assert bench.driver.calls["wait"] >= 1


@pytest.mark.parametrize("code", [Return.NOT_SUPPORTED, Return.UNKNOWN])
async def test_without_events_looks_continue(code, caplog):
    bench = Bench()
    bench.node.refuse("event_set", code)
    async with bench.watching(rounds=0):
        await bench.rounds(2)
        await bench.lose(1)
        await bench.heal(1)
    assert bench.driver.calls["wait"] == 0
    assert caplog.text.count("the driver reports no events, health relies on polling") == 1


class LateEventSet(SimulatedDriver):
    """Makes an event set once `free` is set."""

    def __init__(self, node):
        super().__init__(node)
        self.free = threading.Event()
        self.asked = 0

    def event_set(self):
        self.asked += 1
        assert self.free.wait(LONG)
        return super().event_set()


async def test_a_driver_that_hangs_over_its_event_set_is_asked_once_and_its_late_answer_is_used(monkeypatch, caplog):
    monkeypatch.setattr(subscription, "PATIENCE", 0.05)
    bench = Bench(driver=LateEventSet)
    with anyio.fail_after(LONG / 2):
        async with bench.watching(rounds=0):
            await bench.rounds(4)
            assert bench.driver.asked == 1
            assert len(driver_threads()) <= 2
            bench.driver.free.set()
            await bench.until_turned(lambda: bench.driver.calls["wait"])
            await bench.xid(5, 79)
    assert bench.driver.asked == 1
    assert all(set(bench.faults(gpu)) == {""} for gpu in range(8))
    assert caplog.text.count("the driver reports no events, health relies on polling: no answer for 0.05 s") == 1


async def test_an_event_set_is_not_used_after_the_driver_was_closed(monkeypatch):
    monkeypatch.setattr(subscription, "PATIENCE", 0.05)
    async with Bench(poll=NEVER, driver=LateEventSet).watching() as bench:
        assert bench.monitor._calls._out
        bench.driver.free.set()
        with anyio.fail_after(LONG):
            while bench.monitor._calls.under_way:
                await anyio.lowlevel.checkpoint()
        await bench.monitor.release(None)
        await bench.monitor.resume(None)
        await bench.until_turned(lambda: bench.driver.calls["wait"])
        await bench.xid(5, 79)
    assert bench.driver.asked >= 2  # again where the driver could be closed only at the second try


class LateBoth(LateEventSet):
    """Also holds looks at the GPU at index 2 until `looks` is set. `registered` are the handles registered for events."""

    def __init__(self, node):
        super().__init__(node)
        self.looks = threading.Event()
        self.looks.set()
        self.registered: list[Handle] = []

    def temperature(self, handle):
        if handle == self.handle_by_index(2):
            assert self.looks.wait(LONG)
        return super().temperature(handle)

    def register_events(self, handle, mask, events):
        self.registered.append(handle)
        super().register_events(handle, mask, events)


async def test_a_gpu_in_the_middle_of_a_look_is_asked_for_its_events_after_it(monkeypatch):
    monkeypatch.setattr(subscription, "PATIENCE", 0.05)
    async with Bench(timeout=0.1, driver=LateBoth).watching() as bench:
        bench.driver.looks.clear()
        await bench.until(lambda: "hung" in bench.faults(2))
        bench.driver.free.set()
        await bench.until_turned(lambda: len(bench.driver.registered) == 7)
        await bench.turned(2)
        assert bench.driver.handle_by_index(2) not in bench.driver.registered
        bench.driver.looks.set()
        await bench.until_turned(lambda: len(bench.driver.registered) == 8)
        await bench.until(lambda: bench.faults(2)[-1] == "")


async def test_another_index_of_a_gpu_is_logged(caplog):
    caplog.set_level("INFO")
    async with Bench().watching() as bench:
        await bench.vanish(5)
        await bench.monitor.release(None)
        await bench.monitor.resume(None)
    said = [record.getMessage() for record in caplog.records if "has index" in record.getMessage()]
    assert said == [f"GPU {bench.uuids[gpu]} has index {gpu - 1} now, it was {gpu}" for gpu in (6, 7)]


@pytest.mark.parametrize("resumed", [None, (4, 5)])
async def test_a_known_gpu_that_hangs_while_the_driver_opens_again_is_named(caplog, resumed):
    async with Bench(timeout=0.2).watching() as bench:
        await bench.monitor.release(None)
        bench.node.hang(4, FOREVER)
        await bench.monitor.resume(resumed and frozenset(bench.uuids[gpu] for gpu in resumed))
        bench.node.heal(4)
    named = f"({bench.uuids[4]})" if resumed else f"(before: {bench.uuids[4]})"
    assert f"GPU 4 {named}: the driver has not described it within 0.2 s" in caplog.text
    assert "withheld" not in caplog.text


async def test_a_gpu_without_events_is_logged_once_and_the_others_have_events(caplog):
    bench = Bench()
    bench.node.refuse("register_events", Return.NOT_SUPPORTED, gpu=4)
    async with bench.watching(rounds=0):
        await bench.rounds(3)
        assert bench.node.post(4, EventType.XID_CRITICAL, 79) == 0
        await bench.xid(5, 79)
    assert caplog.text.count("its events are not received") == 1
    assert f"GPU {bench.uuids[4]}" in caplog.text
    assert "too old" in caplog.text


class LateRegistering(SimulatedDriver):
    """Registers the GPU at index 2 once `free` is set, or raises `refused`."""

    def __init__(self, node):
        super().__init__(node)
        self.free = threading.Event()
        self.refused: NvmlError | None = None

    def register_events(self, handle, mask, events):
        if handle == self.handle_by_index(2):
            assert self.free.wait(LONG)
            if self.refused:
                raise self.refused
        super().register_events(handle, mask, events)


@pytest.mark.parametrize("refused", [None, NvmlError(Return.NOT_SUPPORTED, "nvmlDeviceRegisterEvents")])
async def test_a_late_answer_to_the_registration_of_a_gpu_counts(monkeypatch, caplog, refused):
    monkeypatch.setattr(monitor, "LOOK_PATIENCE", 0.05)
    bench = Bench(driver=LateRegistering)
    bench.driver.refused = refused
    async with bench.watching(rounds=0):
        await bench.rounds(2, but(2))
        assert bench.of(2) == []
        assert "its events are not received" not in caplog.text
        bench.driver.free.set()
        await bench.rounds(2)
        if refused is None:
            await bench.xid(2, 79)
            assert bench.driver.calls["register_events"] == 8
    assert caplog.text.count("its events are not received") == bool(refused)
    assert f"GPU {bench.uuids[2]}" in caplog.text or refused is None


async def test_a_second_run_receives_earlier_and_later_events():
    async with Bench().watching() as bench:
        pass
    assert await gone(driver_threads())
    assert bench.node.post(1, EventType.XID_CRITICAL, 48) == 1
    async with bench.running():
        await bench.until(lambda: XidEvent(48) in bench.of(1))
        await bench.xid(1, 79)
    assert [seen for _, seen in bench.seen if isinstance(seen, XidEvent)] == [XidEvent(48), XidEvent(79)]


async def test_an_event_between_open_and_run_is_not_lost():
    bench = Bench(poll=NEVER)

    def looked_at_first(uuid, seen):
        if uuid == bench.uuids[6] and isinstance(seen, Sample):
            bench.meddle = None
            bench.node.post(6, EventType.XID_CRITICAL, 79)

    bench.meddle = looked_at_first
    async with bench.watching(rounds=0):
        await bench.until(lambda: XidEvent(79) in bench.of(6))
    assert [uuid for uuid, seen in bench.seen if isinstance(seen, XidEvent)] == [bench.uuids[6]]


async def test_after_the_end_no_thread_is_left():
    async with Bench().watching():
        assert {thread.name for thread in driver_threads()} == {"nvml-calls", "nvml-events"}
        assert all(thread.daemon for thread in driver_threads())
    assert await gone(driver_threads())


async def test_a_hung_gpu_does_not_hold_the_end():
    async with Bench(timeout=0.1).watching() as bench:
        await bench.hang(2)
    hung = [thread for thread in driver_threads() if thread.name == "nvml-calls"]
    assert hung
    bench.node.heal(2)
    assert await gone(driver_threads())
