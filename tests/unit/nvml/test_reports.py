"""The GPU of an event: by its handle, else by the uuid that the driver reports for the handle."""

import threading

import pytest

from gpu_plugin.devices.nvml_h import ALL_INSTANCES, EventType, Return
from gpu_plugin.health.observation import DriverEvent, EventDelivery, Sample, XidEvent
from gpu_plugin.nvml import monitor, reports
from gpu_plugin.nvml.port import Event, Handle, NvmlError
from gpu_plugin.simulation.driver import SimulatedDriver

from .monitored import LONG, NEVER, Bench

XID = int(EventType.XID_CRITICAL)
STRANGE = Handle(0x5AFE)


def events(bench):
    """Return all observations but samples, with the index of the GPU."""
    return [(bench.uuids.index(uuid), seen) for uuid, seen in bench.seen if not isinstance(seen, Sample)]


async def deliver(bench, *events):
    """Let events arrive one after the other, and wait for the end of the turn that they cause."""
    async with bench.running():
        await bench.rounds()
        for event in events:
            bench.monitor._reports.receive(event)
        await bench.monitor._turned.wait()
        bench.monitor.look_now()
        await bench.rounds()


@pytest.mark.parametrize(
    ("instances", "said"),
    [
        ((), (None, None)),
        ((ALL_INSTANCES, ALL_INSTANCES), (None, None)),
        ((0, 0), (0, 0)),
        ((5, ALL_INSTANCES), (5, None)),
        ((5, 1), (5, 1)),
    ],
)
async def test_an_xid_names_the_instances_that_the_driver_names(instances, said):
    bench = Bench(poll=NEVER)
    await bench.monitor.open()
    await deliver(bench, Event(bench.driver.handle_by_index(3), XID, 31, *instances))
    assert events(bench) == [(3, XidEvent(31, *said))]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (0x2, [DriverEvent(0x2)]),
        (0x4000, [DriverEvent(0x4000)]),
        (0x8, [XidEvent(48)]),
        (0x2800, [DriverEvent(0x800), DriverEvent(0x2000)]),
        (0x800A, [DriverEvent(0x2), XidEvent(48), DriverEvent(0x8000)]),
        (1 << 40, [DriverEvent(1 << 40)]),
        (0, []),
    ],
)
async def test_each_type_of_an_event_is_observed(kind, said):
    bench = Bench(poll=NEVER)
    await bench.monitor.open()
    await deliver(bench, Event(bench.driver.handle_by_index(6), kind, 48))
    assert events(bench) == [(6, seen) for seen in said]


class Known(SimulatedDriver):
    """Has one more handle, with the uuid or the error `whose`."""

    whose: str | int = ""

    def uuid(self, handle):
        if handle != STRANGE:
            return super().uuid(handle)
        self.calls["uuid of a stranger"] += 1
        if isinstance(self.whose, int):
            raise NvmlError(self.whose, "nvmlDeviceGetUUID")
        return self.whose


async def test_the_driver_names_the_gpu_of_an_unknown_handle():
    bench = Bench(poll=NEVER, driver=Known)
    await bench.monitor.open()
    bench.driver.whose = bench.uuids[5]
    await deliver(bench, Event(STRANGE, XID, 79), Event(STRANGE, XID, 48), Event(STRANGE, 0x800, 0))
    assert events(bench) == [(5, XidEvent(79)), (5, XidEvent(48)), (5, DriverEvent(0x800))]
    assert bench.driver.calls["uuid of a stranger"] == 1


async def test_an_event_of_a_mig_devices_handle_is_of_the_gpu_it_is_cut_from():
    bench = Bench("a100-mig-mixed", poll=NEVER, driver=Known)
    node = await bench.monitor.open()
    bench.driver.whose = node.gpus[4].mig_devices[3].uuid
    await deliver(bench, Event(STRANGE, XID, 43, 9, 0))
    assert events(bench) == [(4, XidEvent(43, 9, 0))]
    bench.driver.whose = node.gpus[5].mig_devices[0].uuid  # the same handle, of another one by now
    await deliver(bench, Event(STRANGE, XID, 43, 1, 0))
    assert events(bench)[1:] == [(5, XidEvent(43, 1, 0))]


@pytest.mark.parametrize("whose", [Return.INVALID_ARGUMENT, Return.GPU_IS_LOST, "GPU-of-another-node", ""])
async def test_an_event_without_a_gpu_counts_against_no_gpu_and_is_logged_once(whose, caplog):
    bench = Bench(poll=NEVER, driver=Known)
    bench.driver.whose = whose
    await bench.monitor.open()
    await deliver(bench, Event(STRANGE, XID, 79), Event(STRANGE, XID, 79))
    looked = len(bench.samples(0))
    assert looked >= 2, "it was a reason to look"
    await deliver(bench, Event(STRANGE, XID, 79))
    assert not events(bench)
    assert caplog.text.count("came from an unknown GPU") == 1


async def test_a_driver_that_does_not_name_the_gpu_of_an_event_blocks_nothing(monkeypatch, caplog):
    monkeypatch.setattr(monitor, "LOOK_PATIENCE", 0.05)
    free = threading.Event()

    class Hanging(SimulatedDriver):
        def uuid(self, handle):
            if handle == STRANGE:
                assert free.wait(LONG)
            return super().uuid(handle)

    async with Bench(driver=Hanging).watching() as bench:
        bench.monitor._reports.receive(Event(STRANGE, XID, 79))
        await bench.until_turned(lambda: "is kept until the driver reports which GPU it is" in caplog.text)
        await bench.rounds(2)
        assert "counts against no GPU" not in caplog.text
        free.set()
        await bench.until_turned(lambda: "counts against no GPU" in caplog.text)
    assert caplog.text.count("is kept until the driver reports which GPU it is") == 1
    assert not events(bench)
    assert all(set(bench.faults(gpu)) == {""} for gpu in range(8))
    assert caplog.text.count("came from an unknown GPU, and counts against no GPU") == 1


class Silent(SimulatedDriver):
    """Answers for the uuids of `strangers` once `free` is set, and counts calls at the same time."""

    def __init__(self, node):
        super().__init__(node)
        self.free = threading.Event()
        self.strangers: dict[int, str] = {}
        self.out: list[int] = []
        self.most = 0

    def uuid(self, handle):
        if handle not in self.strangers:
            return super().uuid(handle)
        self.calls["uuid of a stranger"] += 1
        self.out.append(handle)
        self.most = max(self.most, len(self.out))
        assert self.free.wait(LONG)
        self.out.remove(handle)
        return self.strangers[handle]


async def test_the_driver_is_asked_once_for_a_gpu_and_its_late_answer_counts(monkeypatch):
    monkeypatch.setattr(monitor, "LOOK_PATIENCE", 0.02)
    bench = Bench(driver=Silent)
    bench.driver.strangers = {STRANGE: bench.uuids[5]}
    async with bench.watching(rounds=0):
        for xid in (13, 31, 43):
            bench.monitor._reports.receive(Event(STRANGE, XID, xid))
            await bench.until_turned(lambda: bench.driver.out)
            await bench.turned(2)
        assert bench.driver.calls["uuid of a stranger"] == 1
        assert not events(bench)
        bench.driver.free.set()
        await bench.until(lambda: len(events(bench)) == 3)
    assert events(bench) == [(5, XidEvent(13)), (5, XidEvent(31)), (5, XidEvent(43))]


async def test_many_unknown_handles_at_once_are_asked_about_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(monitor, "LOOK_PATIENCE", 0.02)
    bench = Bench(driver=Silent)
    handles = [Handle(STRANGE + number) for number in range(3 * reports.MAX_HANDLE_LOOKUPS)]
    bench.driver.strangers = dict.fromkeys(handles, bench.uuids[2])
    async with bench.watching(rounds=0):
        for handle in handles:
            bench.monitor._reports.receive(Event(handle, XID, 48))
        await bench.until_turned(lambda: len(bench.driver.out) == reports.MAX_HANDLE_LOOKUPS)
        await bench.turned(2)
        assert bench.driver.most == reports.MAX_HANDLE_LOOKUPS
        bench.driver.free.set()
        await bench.until(lambda: len(events(bench)) == len(handles))
    assert bench.driver.calls["uuid of a stranger"] == len(handles)


async def test_a_handle_from_before_the_driver_was_closed_is_not_asked_about_after(caplog):
    caplog.set_level("INFO")
    bench = Bench(poll=NEVER, driver=Known)
    await bench.monitor.open()
    bench.driver.whose = bench.uuids[5]
    async with bench.running():
        await bench.rounds()
        bench.monitor._reports.receive(Event(STRANGE, XID, 79))
        await bench.monitor.release(frozenset({bench.uuids[1]}))
        bench.monitor.look_now()
        await bench.turned(1)
    assert not events(bench)
    assert not bench.driver.calls["uuid of a stranger"]
    assert "before it reported the GPUs of some events, dropped: 1" in caplog.text


async def test_events_of_unknown_handles_are_kept_up_to_a_number(monkeypatch):
    monkeypatch.setattr(reports, "MAX_UNKNOWN_EVENTS", 4)
    bench = Bench(poll=NEVER, driver=Known)
    await bench.monitor.open()
    bench.driver.whose = bench.uuids[1]
    await deliver(bench, *[Event(STRANGE, XID, number) for number in range(1, 11)])
    assert events(bench) == [(1, XidEvent(number)) for number in (7, 8, 9, 10)]


async def test_failed_waits_and_their_end_are_reported_for_every_gpu():
    async with Bench().watching(rounds=0) as bench:
        await bench.until(lambda: bench.driver.calls["wait"])
        bench.node.refuse("wait", Return.UNKNOWN, times=3)
        await bench.until(lambda: EventDelivery() in bench.of(7) and len(events(bench)) == 16)
    why = "nvmlEventSetWait_v2: unknown (999)"
    assert events(bench) == [
        *[(gpu, EventDelivery(why)) for gpu in range(8)],
        *[(gpu, EventDelivery()) for gpu in range(8)],
    ]


class Stuck(SimulatedDriver):
    """A driver whose wait holds its thread until `free` is set."""

    free = threading.Event()
    holding = False

    def wait(self, events, timeout_ms):
        if self.holding:
            assert self.free.wait(LONG)
        return super().wait(events, timeout_ms)


async def test_a_wait_that_does_not_return_is_reported():
    bench = Bench(timeout=0.1, driver=Stuck)
    bench.driver.free = threading.Event()
    async with bench.watching():
        bench.driver.holding = True
        await bench.until(lambda: any(isinstance(seen, EventDelivery) and seen.trouble for _, seen in events(bench)))
        bench.driver.holding = False
        bench.driver.free.set()
        await bench.until(lambda: bench.of(7).count(EventDelivery()) == 1)
    assert [seen.trouble for gpu, seen in events(bench) if gpu == 0] == [
        "the call that waits for them has not returned",
        "",
    ]
