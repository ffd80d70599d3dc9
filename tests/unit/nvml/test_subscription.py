"""Events of each GPU arrive although the event set or a GPU in it fails."""

import threading
from collections.abc import Sequence

import pytest

from gpu_plugin.devices.node import Gpu
from gpu_plugin.devices.nvml_h import EventType, Return
from gpu_plugin.health.observation import EventDelivery, XidEvent
from gpu_plugin.nvml import subscription
from gpu_plugin.nvml.port import EventSet, Handle, NvmlError
from gpu_plugin.simulation.driver import SimulatedDriver

from .monitored import LONG, NEVER, Bench, remembered

XID = EventType.XID_CRITICAL


class ByTheHeader(SimulatedDriver):
    """Of the event set as nvml.h has it: a wait fails while a GPU of it is lost; UNKNOWN to a registration undoes it.

    `lost` are handles of GPUs that only the wait reports as lost.
    """

    def __init__(self, node):
        super().__init__(node)
        self.members: dict[EventSet, set[Handle]] = {}
        self.undefined: set[EventSet] = set()
        self.lost: set[Handle] = set()
        self.waiting: set[EventSet] = set()
        self.freed_under = 0
        self.refusing: dict[Handle, int] = {}

    def event_set(self):
        made = super().event_set()
        self.members[made] = set()
        return made

    def free_event_set(self, events):
        self.freed_under += events in self.waiting
        del self.members[events]
        self.undefined.discard(events)
        super().free_event_set(events)

    def register_events(self, handle, mask, events):
        code = self.refusing.get(handle)
        if code is not None:
            if code in (Return.UNKNOWN, Return.GPU_IS_LOST):
                self.undefined.add(events)
            raise NvmlError(code, "nvmlDeviceRegisterEvents")
        super().register_events(handle, mask, events)
        self.members[events].add(handle)

    def wait(self, events, timeout_ms):
        self.waiting.add(events)
        try:
            for handle in self.members.get(events, set()):
                gone = self._find(handle)
                if handle in self.lost or gone is None or self._node.failing(gone, self._departures[gone]) is not None:
                    raise NvmlError(Return.GPU_IS_LOST, "nvmlEventSetWait_v2")
            event = super().wait(events, timeout_ms)
            if events in self.undefined:
                raise NvmlError(Return.TIMEOUT, "nvmlEventSetWait_v2")  # no event of it arrives
            return event
        finally:
            self.waiting.discard(events)

    def close(self):
        assert not self.members, "what is not freed before the driver is closed is lost"
        super().close()


async def arrives(bench, gpu, xid=95):
    """Post an Xid of the GPU, which must arrive."""
    since = len(bench.seen)
    assert bench.node.post(gpu, XID, xid) >= 1
    await bench.until(lambda: XidEvent(xid) in bench.of(gpu, since))


async def test_a_lost_gpu_stops_only_its_own_events_until_it_answers():
    async with Bench(driver=ByTheHeader).watching() as bench:
        await bench.lose(2)
        await bench.until_turned(lambda: bench.driver.calls["event_set"] >= 2)
        await arrives(bench, 5)
        await bench.heal(2)
        await bench.until_turned(lambda: any(len(each) == 8 for each in bench.driver.members.values()))
        await arrives(bench, 2)
        assert len(bench.driver.members) == 1, "what is replaced is freed"
        await bench.monitor.release(None)
        assert bench.driver.members == {}
    assert bench.driver.freed_under == 0
    assert not any(bench.deliveries(gpu)[-1:] not in ([], [""]) for gpu in range(8))


async def test_a_gpu_that_only_the_wait_reports_as_lost_is_found_by_trials():
    bench = Bench(driver=ByTheHeader)
    await bench.monitor.open()
    bad = bench.driver.handle_by_index(4)
    async with bench.running():
        await bench.rounds()
        bench.driver.lost.add(bad)
        await bench.until(lambda: any(bench.deliveries(4)))
        # Events in a set that is replaced are lost.
        await bench.until_turned(lambda: [len(each - {bad}) for each in bench.driver.members.values()] == [7])
        await arrives(bench, 5)
        assert [gpu for gpu in range(8) if any(bench.deliveries(gpu)[-1:])] == [4]
        assert "lost" in bench.deliveries(4)[-1]
        bench.driver.lost.clear()
        await bench.until(lambda: bench.deliveries(4)[-1] == "")
        await arrives(bench, 4)
    assert bench.driver.freed_under == 0


async def test_failed_event_sets_do_not_count_after_the_driver_was_opened_again():
    bench = Bench(driver=ByTheHeader)
    await bench.monitor.open()
    first, then = bench.driver.handle_by_index(3), bench.driver.handle_by_index(4)
    async with bench.running():
        await bench.rounds()
        bench.driver.lost.add(first)
        await bench.until(lambda: any(bench.deliveries(3)[-1:]))
        await bench.until_turned(lambda: [len(each - {first}) for each in bench.driver.members.values()] == [7])
        bench.driver.lost.add(then)
        await bench.until(lambda: any(bench.deliveries(5)[-1:]))  # after several sets in a row, the next one waits
        bench.driver.lost.clear()
        await bench.monitor.release(None)
        since = len(bench.seen)
        await bench.monitor.resume(None)
        await bench.until(lambda: bench.deliveries(5)[-1] == "")
        assert not any(bench.deliveries(5, since))
        await arrives(bench, 5)


@pytest.mark.parametrize("code", [Return.UNKNOWN, Return.GPU_IS_LOST])
async def test_a_set_that_a_registration_broke_is_made_again_without_that_gpu(code):
    bench = Bench(driver=ByTheHeader)
    bench.driver.open()
    bench.driver.refusing[bench.driver.handle_by_index(3)] = code
    bench.driver.close()
    async with bench.watching():
        assert not bench.driver.undefined
        for gpu in (0, 2, 4, 7):
            await arrives(bench, gpu)
        assert [
            gpu
            for gpu in range(8)
            if any(bench.deliveries(gpu)) or bench.first.count((bench.uuids[gpu], EventDelivery())) > 1
        ] in ([], [3])
        bench.driver.refusing.clear()
        await bench.until_turned(lambda: any(len(each) == 8 for each in bench.driver.members.values()))
        await arrives(bench, 3)
    assert bench.driver.freed_under == 0


async def test_a_refused_read_of_event_types_is_repeated():
    bench = Bench()
    bench.node.refuse("supported_event_types", Return.UNKNOWN, gpu=6, times=2)
    async with bench.watching(rounds=0):
        await bench.until_turned(lambda: bench.driver.calls["register_events"] == 8)
        await arrives(bench, 6, 79)


async def test_xids_arrive_if_the_driver_refuses_other_types(caplog):
    class Choosy(SimulatedDriver):
        def register_events(self, handle, mask, events):
            if mask != XID:
                raise NvmlError(Return.NOT_SUPPORTED, "nvmlDeviceRegisterEvents")
            super().register_events(handle, mask, events)

    async with Bench(driver=Choosy).watching() as bench:
        await arrives(bench, 1, 79)
    assert "too old" not in caplog.text
    assert not any(any(bench.deliveries(gpu)) for gpu in range(8))


async def test_a_failed_registration_is_reported_and_lack_of_support_is_not(caplog):
    bench = Bench()
    bench.node.refuse("register_events", Return.NOT_SUPPORTED, gpu=4)
    bench.node.refuse("supported_event_types", Return.GPU_IS_LOST, gpu=5)
    async with bench.watching(rounds=0):
        await bench.rounds(2)
    told = [
        (uuid, seen.trouble)
        for uuid, seen in [*bench.first, *bench.seen]
        if isinstance(seen, EventDelivery) and seen.trouble
    ]
    assert {uuid for uuid, _ in told} == {bench.uuids[5]}
    assert "registering for them failed" in told[0][1]
    assert f"GPU {bench.uuids[5]}: its events are not received" in caplog.text
    assert "it reports no events" not in caplog.text


async def test_the_first_report_of_each_gpu_follows_its_registration_with_health():
    reports_before = []

    def met(_: Sequence[Gpu]) -> None:
        reports_before.append(dict(bench.event_deliveries))

    bench: Bench = Bench(met=met)
    bench.node.refuse("supported_event_types", Return.GPU_IS_LOST, gpu=5)
    await bench.monitor.open()
    bench.monitor.close()
    assert reports_before == [{}]
    trouble = bench.event_deliveries.pop(bench.uuids[5])
    assert len(trouble) == 1
    assert "registering for them failed" in trouble[0]
    assert bench.event_deliveries == {uuid: [""] for uuid in bench.uuids if uuid != bench.uuids[5]}


async def test_nothing_is_reported_of_a_gpu_that_is_missing_until_it_returns():
    bench = Bench(remembered=remembered())
    bench.node.vanish(2)
    async with bench.watching(rounds=0):
        await bench.rounds(2, [0, 7])
        assert bench.uuids[2] not in bench.event_deliveries
        bench.node.bring_back(2)
        await bench.until_turned(lambda: bench.event_deliveries.get(bench.uuids[2]) == [""])


class HoldingOne(ByTheHeader):
    """Holds the registration of one GPU until `free` is set, and counts sets that are freed during it."""

    held = Handle(0)

    def __init__(self, node):
        super().__init__(node)
        self.free, self.inside = threading.Event(), set()

    def register_events(self, handle, mask, events):
        if handle == self.held:
            self.inside.add(events)
            assert self.free.wait(LONG)
            self.inside.discard(events)
        super().register_events(handle, mask, events)

    def free_event_set(self, events):
        self.freed_under += events in self.inside
        super().free_event_set(events)


async def test_a_set_under_a_registration_that_hangs_is_left_behind_and_freed_after_it(monkeypatch):
    monkeypatch.setattr(subscription, "PATIENCE", 0.05)
    bench = Bench(driver=HoldingOne)
    bench.driver.open()
    bench.driver.held, bad = bench.driver.handle_by_index(1), bench.driver.handle_by_index(3)
    bench.driver.refusing[bad] = Return.UNKNOWN
    bench.driver.close()
    async with bench.watching(rounds=0):
        await bench.rounds(2, [0, 2, 3])
        assert bench.driver.inside <= bench.driver.members.keys(), "the one that it hangs in is not freed"
        for gpu in (0, 7):
            await arrives(bench, gpu)
        mine = [seen for uuid, seen in [*bench.first, *bench.seen] if uuid == bench.uuids[1]]
        assert any(isinstance(seen, EventDelivery) and "has not answered" in seen.trouble for seen in mine)
        bench.driver.free.set()
        await bench.until_turned(lambda: not bench.driver.undefined & bench.driver.members.keys())
        await bench.until_turned(lambda: any(len(each) == 7 for each in bench.driver.members.values()))
        await arrives(bench, 1)
    assert bench.driver.freed_under == 0


async def test_after_a_new_set_every_gpu_is_looked_at():
    async with Bench(driver=ByTheHeader, poll=NEVER).watching() as bench:
        since = len(bench.seen)
        bench.node.lose(2)
        await bench.until_turned(lambda: bench.driver.calls["event_set"] >= 2)
        made = len(bench.seen)
        await bench.until(lambda: all(bench.samples(gpu, made) for gpu in range(8)))
        assert all(seen.asked is None or "pcie_width" in seen.asked for seen in bench.samples(5, since))
