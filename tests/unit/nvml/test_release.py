"""GPUs released for maintenance: the monitor drops their handles, and calls nothing about them until they are resumed."""

import threading

import anyio
import pytest
from msgspec.structs import replace

from gpu_plugin.devices.node import Gpu
from gpu_plugin.devices.nvml_h import EventType, Return
from gpu_plugin.health.observation import Fault, Sample
from gpu_plugin.nvml import monitor, reopening, subscription
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.nvml.roster import Released, ReleaseError
from gpu_plugin.simulation.driver import SimulatedDriver

from .conftest import driver_threads
from .monitored import FOREVER, LONG, Bench, but, remembered

ALL = range(8)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(monitor, "CONFIRM", 0.01)


@pytest.fixture
def hasty(monkeypatch):
    """Shorten the time for which a release waits."""
    monkeypatch.setattr(monitor, "PATIENCE", 0.2)
    monkeypatch.setattr(subscription, "WAIT_MS", 10)


class Recording(SimulatedDriver):
    """Records every call, with the index of its GPU."""

    def __init__(self, node):
        super().__init__(node)
        self.record: list[tuple[str, int | None]] = []

    def _begin(self, call, gpu=None, *, opened=True):
        self.record.append((call, gpu))
        super()._begin(call, gpu, opened=opened)

    def touched(self, since=0):
        return {gpu for _, gpu in self.record[since:]}

    def asked(self, since=0):
        return {call for call, _ in self.record[since:]}


def of(bench, *gpus):
    return frozenset(bench.uuids[gpu] for gpu in gpus)


async def gone(threads):
    for thread in threads:
        await anyio.to_thread.run_sync(thread.join, LONG)
    return not any(thread.is_alive() for thread in threads)


# All of them


async def test_all_gpus_released_leave_the_driver_closed_and_unasked():
    async with Bench(driver=Recording).watching() as bench:
        node = bench.nodes[0]
        await bench.monitor.release(None)
        assert bench.driver._opened == 0
        since, calls = len(bench.seen), len(bench.driver.record)
        await bench.turned(5)
        assert bench.driver.record[calls:] == []
        assert bench.seen[since:] == []
        assert bench.monitor.node == node, "they stay listed"
        assert bench.node.post(3, EventType.XID_CRITICAL, 79) == 0
        await bench.monitor.resume(None)
        assert bench.driver._opened == 1
        assert all(bench.samples(gpu, since) for gpu in ALL)
        await bench.xid(3, 79)
        assert bench.monitor.node == node
    assert bench.good()


async def test_releasing_and_resuming_twice_is_releasing_and_resuming():
    async with Bench(driver=Recording).watching(rounds=0) as bench:
        for _ in range(2):
            await bench.monitor.release(None)
        calls = len(bench.driver.record)
        await bench.monitor.release(of(bench, 3))
        assert bench.driver.record[calls:] == []
        for _ in range(2):
            await bench.monitor.resume(None)
    assert bench.driver.calls["open"] == 2
    assert bench.driver.calls["close"] == 1


async def test_all_gpus_released_one_by_one_leave_the_driver_closed():
    async with Bench(driver=Recording).watching(rounds=0) as bench:
        for gpu in ALL:
            await bench.monitor.release(of(bench, gpu))
        assert bench.driver._opened == 0
        calls = len(bench.driver.record)
        await bench.monitor.resume(of(bench, 6))
        since = await bench.rounds(1, [6])
    assert bench.driver.touched(calls) <= {None, 6}
    assert {uuid for uuid, _ in bench.seen[since:]} == {bench.uuids[6]}


# One of them


async def test_no_call_is_about_a_released_gpu_and_the_others_are_watched():
    async with Bench(driver=Recording).watching() as bench:
        node = bench.nodes[0]
        await bench.monitor.release(of(bench, 3))
        calls = len(bench.driver.record)
        assert bench.driver._opened == 1
        since = await bench.rounds(3, but(3))
        await bench.lose(5)
        await bench.heal(5)
        assert bench.node.post(3, EventType.XID_CRITICAL, 79) == 0
        await bench.xid(4, 48)
        assert bench.of(3, since) == []
        opening = next(at for at, (call, _) in enumerate(bench.driver.record) if call == "close")
        assert 3 not in bench.driver.touched(opening)
        assert not bench.driver.asked(opening) & {"handle_by_index", "handle_by_uuid"}
        assert "handle_by_pci_bus_id" in bench.driver.asked(calls)
        assert bench.monitor.node == node
        bench.node.reset(3)
        await bench.monitor.resume(of(bench, 3))
        assert [sample.fault for sample in bench.samples(3, since)][:1] == [""]
        assert bench.node.post(3, EventType.XID_CRITICAL, 79) == 1
        assert bench.monitor.node == node
    assert bench.good(but(5))


async def test_a_released_gpu_may_vanish_and_come_back():
    async with Bench(driver=Recording, retention=0.0).watching() as bench:
        await bench.monitor.release(of(bench, 3))
        since, calls = len(bench.seen), len(bench.driver.record)
        bench.node.vanish(3)
        await bench.rounds(3, but(3))
        bench.node.bring_back(3)
        await bench.rounds(8, but(3))
        assert bench.driver.calls["open"] == 2
        assert 3 not in bench.driver.touched(calls)
        assert bench.of(3, since) == []
        assert bench.uuids[3] in [gpu.uuid for gpu in bench.monitor.node.gpus]
        await bench.monitor.resume(of(bench, 3))
        assert [sample.fault for sample in bench.samples(3, since)][:1] == [""]


async def test_a_gpu_plugged_in_while_another_is_released_is_found_once_that_is_resumed():
    bench = Bench(driver=Recording)
    bench.node.vanish(6)
    async with bench.watching(rounds=0):
        await bench.monitor.release(of(bench, 3))
        bench.node.bring_back(6)
        await bench.rounds(10, but(3, 6))
        assert 3 not in bench.driver.touched(len(bench.driver.record) - 1)
        await bench.monitor.resume(None)
        await bench.rounds()
    assert [gpu.uuid for gpu in bench.monitor.node.gpus] == bench.uuids


async def test_another_card_in_the_place_of_a_gpu_is_another_gpu():
    stranger = replace(remembered()[4], uuid="GPU-that-was-there")
    bench = Bench(
        driver=Recording,
        remembered=[stranger if gpu.index == 4 else gpu for gpu in remembered()],
        released=frozenset({remembered()[3].uuid}),
    )
    await bench.monitor.open()
    assert "another GPU" in bench.unreadable()["GPU-that-was-there"]
    async with bench.running():
        await bench.until(lambda: [seen for uuid, seen in bench.seen if uuid == "GPU-that-was-there"])
        (seen, *_) = [seen for uuid, seen in bench.seen if uuid == "GPU-that-was-there"]
        assert isinstance(seen, Sample)
        assert seen.fault is Fault.VANISHED
        await bench.monitor.resume(None)
        await bench.rounds()
    assert set(bench.uuids) < {gpu.uuid for gpu in bench.monitor.node.gpus}


# What holds them


async def test_a_call_that_hangs_keeps_its_gpu_and_is_named_and_the_rest_follows_by_itself(hasty):
    async with Bench(timeout=0.1, driver=Recording).watching() as bench:
        await bench.hang(3, looks=3)
        began = anyio.current_time()
        with pytest.raises(
            ReleaseError, match=rf"not closed yet.*a call to it has not returned, about GPU {bench.uuids[3]}"
        ):
            await bench.monitor.release(of(bench, 3))
        assert anyio.current_time() - began < LONG
        since = await bench.rounds(2, but(3))
        assert bench.of(3, since) == [], "nothing is told of it any more"
        bench.node.heal(3)
        await bench.monitor.release(of(bench, 3))
        calls = len(bench.driver.record)
        await bench.rounds(2, but(3))
        assert 3 not in bench.driver.touched(calls)


@pytest.mark.parametrize("which", [None, frozenset({remembered()[5].uuid})])
async def test_a_call_that_hangs_on_another_gpu_keeps_all_from_being_released(hasty, which):
    async with Bench(timeout=0.1).watching() as bench:
        await bench.hang(3, looks=3)
        with pytest.raises(ReleaseError, match=bench.uuids[3]):
            await bench.monitor.release(which)
        bench.node.heal(3)
        await bench.monitor.release(which)


@pytest.mark.parametrize("wanted", ["release", "rebound"])
async def test_a_call_that_hangs_for_minutes_needs_a_restart_if_the_driver_must_reopen(
    hasty, monkeypatch, caplog, wanted
):
    monkeypatch.setattr(reopening, "RESTART_AFTER", 1e9)
    async with Bench(timeout=0.1).watching() as bench:
        await bench.hang(3, looks=3)
        if wanted == "release":
            with pytest.raises(ReleaseError):
                await bench.monitor.release(of(bench, 5))
        else:
            await bench.vanish(5)
            bench.node.bring_back(5)
        await bench.until(lambda: "the driver cannot be reopened now" in caplog.text)
        await bench.rounds(2, [0, 1, 2])
        assert bench.monitor.restart_needed == ""
        monkeypatch.setattr(reopening, "RESTART_AFTER", 0.0)
        assert f"GPU 3 ({bench.uuids[3]})" in bench.monitor.restart_needed
        await bench.until(lambda: "a restart of the plugin is needed" in caplog.text)
        await bench.rounds(3, [0, 1, 2])
        assert caplog.text.count("a restart of the plugin is needed") == 1
        bench.node.heal(3)
        await bench.until(lambda: not bench.monitor.restart_needed)


class Holding(SimulatedDriver):
    """Holds the call named `held` until `free` is set."""

    held = ""

    def __init__(self, node):
        super().__init__(node)
        self.free = threading.Event()
        self.inside = threading.Event()

    def _hold(self, call):
        if call == self.held:
            self.inside.set()
            assert self.free.wait(LONG)

    def close(self):
        self._hold("close")
        super().close()

    def wait(self, events, timeout_ms):
        self._hold("wait")
        return super().wait(events, timeout_ms)

    def open(self):
        self._hold("open")
        super().open()


@pytest.mark.parametrize(
    ("call", "said"), [("close", "it does not close"), ("wait", "the wait for its events has not returned")]
)
async def test_a_driver_that_does_not_close_is_not_waited_for(hasty, call, said):
    async with Bench(timeout=0.1, driver=Holding).watching() as bench:
        bench.driver.held = call
        if call == "wait":
            await anyio.to_thread.run_sync(bench.driver.inside.wait, LONG)
        with pytest.raises(ReleaseError):
            await bench.monitor.release(None)
        await bench.until_turned(lambda: (by := bench.monitor._reopening.blocked_by) and said in by)
        with pytest.raises(ReleaseError, match=said):
            await bench.monitor.release(None)
        bench.driver.held = ""
        bench.driver.free.set()
        await bench.until_turned(lambda: bench.driver._opened == 0)
        await bench.monitor.release(None)


async def test_the_end_does_not_wait_for_a_release_that_hangs():
    bench = Bench(timeout=0.1)
    await bench.monitor.open()
    async with anyio.create_task_group() as group:
        group.start_soon(bench.monitor.run)
        await bench.rounds()
        await bench.hang(2)
        group.start_soon(bench.monitor.release, None)
        await bench.turned(2)
        began = anyio.current_time()
        group.cancel_scope.cancel()
    assert anyio.current_time() - began < 1
    bench.node.heal(2)
    assert await gone(driver_threads())


async def test_a_driver_that_cannot_be_opened_after_a_release_is_tried_again():
    async with Bench().watching() as bench:
        await bench.monitor.release(None)
        bench.node.refuse("open", Return.LIB_RM_VERSION_MISMATCH, times=8)
        since = len(bench.seen)
        await bench.monitor.resume(None)
        assert [bench.faults(gpu, since)[0] for gpu in ALL] == ["driver"] * 8
        assert "lib rm version mismatch" in bench.samples(0)[-1].detail
        await bench.until(lambda: all(bench.faults(gpu, since)[-1:] == [""] for gpu in ALL))
        assert bench.node.post(3, EventType.XID_CRITICAL, 79) == 1
    assert bench.driver.calls["open"] == 1 + 8 + 1, "four attempts each time"


async def test_a_driver_that_hangs_when_it_is_opened_again_holds_nothing_else():
    async with Bench(timeout=0.1, driver=Holding).watching() as bench:
        await bench.monitor.release(None)
        bench.driver.held = "open"
        since = len(bench.seen)
        await bench.monitor.resume(None)
        await bench.until(lambda: [bench.faults(gpu, since)[:1] for gpu in ALL] == [["driver"]] * 8)
        bench.driver.free.set()
        await bench.until(lambda: all(bench.faults(gpu, since)[-1:] == [""] for gpu in ALL))
    assert bench.driver.calls["open"] == 2, "one attempt at a time"


async def test_a_driver_that_opens_late_is_closed_if_all_gpus_are_released(hasty):
    async with Bench(timeout=0.1, driver=Holding).watching() as bench:
        await bench.monitor.release(None)
        bench.driver.held = "open"
        await bench.monitor.resume(None)
        with pytest.raises(ReleaseError, match="it does not open"):
            await bench.monitor.release(None)
        bench.driver.free.set()
        await bench.monitor.release(None)
        assert bench.driver._opened == 0
        assert bench.driver.calls["open"] == bench.driver.calls["close"] == 2


async def released_while_it_does_not_open(bench):
    """Release all GPUs at the start, while the call that opens the driver hangs."""
    bench.driver.held = "open"
    with pytest.raises(TimeoutError):
        await bench.monitor.open()
    with pytest.raises(ReleaseError, match="it does not open"):
        await bench.monitor.release(None)
    await bench.monitor.open()


async def test_a_driver_that_opens_late_at_the_start_is_closed_if_all_gpus_are_released(hasty, caplog):
    caplog.set_level("INFO")
    bench = Bench(timeout=0.1, driver=Holding, remembered=remembered())
    await released_while_it_does_not_open(bench)
    async with bench.running():
        await bench.turned(2)
        with pytest.raises(ReleaseError, match="it does not open"):
            await bench.monitor.release(None)
        bench.driver.free.set()
        await bench.until_turned(lambda: bench.driver.calls["close"])
        await bench.monitor.release(None)
        assert bench.driver._opened == 0
        await bench.turned(3)
    assert bench.driver.calls["open"] == bench.driver.calls["close"] == 1
    assert bench.seen == []
    assert caplog.text.count("closing the driver: all GPUs are released") == 1
    assert "reopening the driver" not in caplog.text
    assert caplog.text.count("cannot be closed now: it does not open; will be tried again; needed because all") == 1


async def test_gpus_resumed_before_a_late_driver_opens_are_found_through_it(hasty):
    bench = Bench(timeout=0.1, driver=Holding, remembered=remembered())
    await released_while_it_does_not_open(bench)
    async with bench.running():
        await bench.turned(2)
        await bench.monitor.resume(None)
        bench.driver.free.set()
        await bench.rounds(2)
        await bench.until(lambda: all(bench.faults(gpu)[-1:] == [""] for gpu in ALL))


async def test_a_driver_left_open_by_a_failed_start_is_closed_if_all_gpus_are_released(hasty):
    class Counting(Holding):
        def device_count(self):
            self._hold("device_count")
            return super().device_count()

    bench = Bench(timeout=0.1, driver=Counting, remembered=remembered())
    bench.driver.held = "device_count"
    with pytest.raises(TimeoutError):
        await bench.monitor.open()
    bench.driver.free.set()
    with pytest.raises(ReleaseError):
        await bench.monitor.release(None)
    async with bench.watching(rounds=0):
        await bench.until_turned(lambda: bench.driver._opened == 0)
        await bench.monitor.release(None)
    assert bench.driver.calls["close"] == 1


# Boots


@pytest.mark.parametrize("which", [None, frozenset({remembered()[3].uuid})])
async def test_a_boot_ends_what_was_released(which):
    async with Bench(driver=Recording).watching(rounds=0) as bench:
        await bench.monitor.release(which)
        bench.node.reboot()
        await bench.rounds(2)
        assert bench.node.post(3, EventType.XID_CRITICAL, 48) == 1
        assert bench.driver._opened == 1
    assert len(bench.boots) == 1
    assert bench.good()


async def test_a_boot_noticed_at_the_start_ends_what_was_released():
    bench = Bench(remembered=remembered(), released=None, boot_id="the boot before")
    await bench.monitor.open()
    assert bench.unreadable() == {}
    async with bench.running():
        await bench.rounds(2)
    assert bench.driver.calls["open"] == 1


# From the start


@pytest.mark.parametrize("resumed", [None, 0])
@pytest.mark.parametrize("released", [None, frozenset(gpu.uuid for gpu in remembered())])
async def test_while_all_gpus_are_released_from_the_start_the_driver_is_not_called(released, resumed):
    known = remembered()
    bench = Bench(driver=Recording, remembered=known, released=released)
    node = await bench.monitor.open()
    assert node.gpus == tuple(replace(gpu, unreadable="maintenance") for gpu in known)
    assert node.device_nodes == bench.node.profile.device_nodes
    assert bench.nodes == [node]
    async with bench.running():
        await bench.turned(5)
        assert bench.driver.record == []
        assert bench.seen == []
        if resumed is not None:
            await bench.monitor.resume(of(bench, resumed))
            await bench.rounds(1, [resumed])
            assert bench.driver.touched() <= {None, resumed}
            return
        await bench.monitor.resume(None)
        await bench.rounds()
    assert bench.unreadable() == {}
    assert [gpu.uuid for gpu in bench.nodes[-1].gpus] == bench.uuids
    assert len(bench.nodes[-1].links) == 28
    assert bench.nodes[-1].driver_version == bench.node.profile.driver_version
    assert bench.good()


async def test_some_gpus_released_at_the_start_are_not_touched():
    bench = Bench(driver=Recording, remembered=remembered(), released=frozenset(g.uuid for g in remembered()[2:4]))
    bench.node.hang(2, FOREVER)
    bench.node.lose(6)
    node = await bench.monitor.open()
    assert bench.unreadable().keys() == of(bench, 2, 3, 6)
    assert {bench.unreadable()[bench.uuids[gpu]] for gpu in (2, 3)} == {"maintenance"}
    assert [gpu.uuid for gpu in node.gpus] == bench.uuids
    async with bench.running():
        await bench.rounds(2, but(2, 3, 6))
        await bench.heal(6)
        assert not bench.driver.touched() & {2, 3}
        assert not bench.driver.asked() & {"handle_by_index", "handle_by_uuid"}
        assert bench.of(2) == bench.of(3) == []
        bench.node.heal(2)
        await bench.monitor.resume(of(bench, 2, 3))
        await bench.rounds()
    assert bench.unreadable() == {}


async def test_a_gpu_that_hangs_at_the_start_beside_released_ones_hides_no_other():
    bench = Bench(timeout=1.0, remembered=remembered(), released=frozenset({remembered()[1].uuid}))
    bench.node.hang(4, FOREVER)
    await bench.monitor.open()
    assert bench.unreadable().keys() == of(bench, 1, 4)
    async with bench.running():
        await bench.until(lambda: "hung" in bench.faults(4))
        await bench.rounds(2, but(1, 4))
        await bench.heal(4)
    assert bench.unreadable().keys() == of(bench, 1)


@pytest.mark.parametrize("released", [None, frozenset({remembered()[3].uuid})])
async def test_unknown_gpus_are_found_first_and_then_released(released):
    bench = Bench(driver=Recording, released=released)
    node = await bench.monitor.open()
    assert [gpu.uuid for gpu in node.gpus] == bench.uuids
    async with bench.running():
        await bench.monitor.release(released)
        calls = len(bench.driver.record)
        await bench.turned(3)
        assert 3 not in bench.driver.touched(calls)
        assert bench.samples(3) == []
        assert bench.driver._opened == (1 if released else 0)


async def test_a_release_while_there_is_no_driver_is_done_at_once_and_kept():
    bench = Bench(driver=Recording, remembered=remembered())
    bench.node.refuse("open", Return.DRIVER_NOT_LOADED, times=1)
    with pytest.raises(NvmlError):
        await bench.monitor.open()
    await bench.monitor.release(None)
    calls = len(bench.driver.record)
    await bench.monitor.open()
    assert bench.driver.record[calls:] == []
    async with bench.running():
        await bench.monitor.resume(None)
        await bench.rounds()


async def test_a_resume_while_there_is_no_driver_is_not_waited_for():
    bench = Bench(driver=Recording, remembered=remembered(), released=None)
    with anyio.fail_after(1):
        await bench.monitor.resume(None)
    node = await bench.monitor.open()
    assert not [gpu for gpu in node.gpus if gpu.unreadable]
    bench.monitor.close()


# Which of them


def test_released_gpus_as_a_set():
    everything, some, none = Released(every=True), Released(uuids=frozenset("ab")), Released()
    assert ("a" in everything, "a" in some, "c" in some, "a" in none) == (True, True, False, False)
    assert (bool(everything), bool(some), bool(none)) == (True, True, False)
    assert (everything.covers(some), some.covers(everything), some.covers(none)) == (True, False, True)
    assert (some.covers(Released(uuids=frozenset("a"))), some.covers(Released(uuids=frozenset("ac")))) == (True, False)
    assert some.plus(frozenset("c")) == Released(uuids=frozenset("abc"))
    assert some.plus(None) == everything == everything.plus(frozenset("a"))
    assert everything.minus(frozenset("a"), "abc") == Released(uuids=frozenset("bc"))
    assert some.minus(frozenset("a"), "abc") == Released(uuids=frozenset("b"))
    assert some.minus(None, "abc") == none == everything.minus(None, "abc")


def test_gpus_that_can_be_reached_without_released_gpus():
    gpus = [Gpu("a", 0, pci_bus_id="1"), Gpu("b", 1)]
    assert Released().leaves([])
    assert not Released(every=True).leaves(gpus)
    assert Released(uuids=frozenset("b")).leaves(gpus)
    assert not Released(uuids=frozenset("a")).leaves(gpus), "b cannot be reached without touching others"
