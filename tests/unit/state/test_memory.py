"""All state outlives a restart, and orders of operators outlive a boot, too."""

import asyncio
import threading
import time

import anyio
import msgspec
import pytest
from msgspec.structs import replace

from gpu_plugin.config.sharing import SharedResource
from gpu_plugin.devices.device import MIG, Device, Resource
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.latch import Latch, Marks, Proof, Recovery, Verdict
from gpu_plugin.health.signals import SIGNALS, orders
from gpu_plugin.health.signals.clocks import SlowMinutes
from gpu_plugin.health.signals.recovery_action import RequestedAction
from gpu_plugin.health.signals.xid import Occurrences
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.state import recorder as recorder_module
from gpu_plugin.state.directory import StateDirectory
from gpu_plugin.state.log import DEVICES, FILES, GPUS, HEALTH, StateLog, read_log
from gpu_plugin.state.memory import Memory, Remembered
from gpu_plugin.state.recorder import Known, Recorder
from tests.state_log import store

NODE = Node((Gpu("GPU-1", 0, 0, "0000:1b:00.0", "NVIDIA H100"), Gpu("GPU-unreadable-1", 1)))
LISTED = (Resource("nvidia.com/gpu", (Device("GPU-1", "GPU-1", "GPU-1", "0", numa=(0,), nodes=("/dev/nvidia0",)),)),)
XID = Evidence(
    "one",
    "GPU-1",
    "xid",
    Latch(Occurrences((1.0,)), Verdict.FATAL, "Xid 79", 1.5, Proof.REBOOT, Recovery(Marks(7, 8, 9))),
    "79",
    "MIG-1",
)
MAINTENANCE = Evidence("one", "GPU-1", "maintenance", orders.release(2.0))
CORDON = Evidence("one", "GPU-1", "cordon", Latch(orders.Reason(), Verdict.FATAL, "cordoned", 3.0, Proof.OPERATOR))
OLD_CORDON = Evidence("zero", "GPU-2", "cordon", Latch(orders.Reason(), Verdict.FATAL, "cordoned", 0.5, Proof.OPERATOR))
EVERYTHING = (XID, MAINTENANCE, CORDON, OLD_CORDON)


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


def memory(state, boot="one"):
    made = Memory(StateDirectory(state), boot)
    made.log.load()
    return made


def write(to: Memory, evidence, node, listed) -> bool:
    """Return True if all is written."""
    written = to.write_evidence(evidence)
    return to.write_hardware(node, listed) and written


def test_the_same_boot_remembers_everything_a_release_included(state):
    assert write(memory(state), EVERYTHING, NODE, LISTED)
    assert memory(state).evidence() == EVERYTHING
    assert [gpu.uuid for gpu in memory(state).gpus()] == ["GPU-1"]
    assert [resource.name for resource in memory(state).devices().listed] == ["nvidia.com/gpu"]


def test_another_boot_remembers_cordons_alone(state):
    write(memory(state), EVERYTHING, NODE, LISTED)
    later = memory(state, "two")
    assert later.evidence() == (CORDON, OLD_CORDON)
    assert (later.gpus(), later.devices().listed) == ((), ())


def test_each_entry_is_of_its_own_boot(state):
    write(
        memory(state, "two"), (XID, *EVERYTHING[2:]), NODE, LISTED
    )  # a boot under a running process: XID is of before
    assert memory(state, "two").evidence() == (CORDON, OLD_CORDON)


def test_after_a_boot_it_writes_for_the_new_one(state):
    known = memory(state)
    write(known, (XID,), NODE, LISTED)
    known.booted("two")
    assert write(known, (), NODE, LISTED)
    assert memory(state).gpus() == ()
    assert memory(state, "two").gpus()


def test_without_gpus_what_is_known_of_them_stays(state):
    write(memory(state), (XID,), NODE, LISTED)
    assert write(memory(state), (XID, CORDON), Node(), ())
    assert memory(state).evidence() == (XID, CORDON)
    assert memory(state).gpus()
    assert memory(state).devices().listed


@pytest.mark.parametrize("content", [7, {"boot_id": 7}, {"boot_id": "one", "evidence": {"uuid": "GPU-1"}}, "[" * 99])
def test_an_invalid_record_is_logged_and_replaced(state, caplog, content):
    known = memory(state)
    known.log.write(HEALTH, content)
    assert known.evidence() == ()
    (record,) = caplog.records
    assert HEALTH in record.getMessage()
    assert write(known, (XID,), NODE, LISTED)
    assert memory(state).evidence() == (XID,)


def test_gpus_of_an_earlier_boot_are_remembered_until_they_are_found(state):
    assert memory(state).before() == ()
    gone = Gpu("GPU-gone", 7, 7, "0000:2b:00.0", "NVIDIA H100")
    write(memory(state), (), Node(NODE.gpus, absent=(gone,)), LISTED)
    assert memory(state).before() == (gone,)
    assert memory(state, "two").before() == (NODE.gpus[0], gone)


def test_devices_are_remembered_as_they_were_also_devices_that_cannot_be_listed(state):
    part = Device("MIG-1::0", "GPU-1", "MIG-1", "0:1", kind=MIG)
    shared = replace(part, sharing=SharedResource("nvidia.com/mig", "nvidia.com/mig", 2, "time-slicing"))
    listed = (*LISTED, Resource("nvidia.com/mig", (shared,)))
    foreign = (Resource("example.com/gpu", (Device(f"GPU-1::{'0' * 300}", "GPU-1", "GPU-1", "0"),)),)
    memory(state).write_hardware(NODE, listed, foreign)
    assert memory(state).devices() == Remembered(listed, foreign)


@pytest.mark.parametrize("kind", [GPUS, DEVICES])
@pytest.mark.parametrize("content", [7, {"boot_id": 7}, {"boot_id": "one", "gpus": [{}], "resources": {"x": [{}]}}])
def test_an_invalid_record_of_hardware_is_logged_and_replaced(state, caplog, kind, content):
    write(memory(state), (XID,), NODE, LISTED)
    store(state, kind, content)
    known = memory(state)
    found = (known.gpus(), known.devices().listed)
    assert found == (((), LISTED) if kind == GPUS else (known.gpus(), ()))
    assert kind in caplog.records[0].getMessage()
    assert known.evidence() == (XID,)
    assert write(known, (XID,), NODE, LISTED)
    assert memory(state).devices().listed == LISTED
    assert memory(state).gpus()


class Fixed:
    """Knows `now`."""

    def __init__(self, now: Known) -> None:
        self.now = now

    @property
    def revision(self) -> int:
        return self.now.revision

    def known(self) -> Known:
        return self.now


class Disk:
    """A recorder and its memory. `at` is the present state, and `writes` has the evidence of each write."""

    def __init__(self, monkeypatch, directory):
        self.at = Known(0, (), Node(), ())
        self.writes: list[tuple[Evidence, ...]] = []
        self.fails = False
        self.unsaved = Pulse()
        self.recorder = Recorder(Memory(StateDirectory(directory), "one"), self, self.unsaved)
        monkeypatch.setattr(Memory, "write_evidence", self.write)
        monkeypatch.setattr(Memory, "write_hardware", lambda *_: True)

    def write(self, evidence):
        if self.fails:
            return False
        self.writes.append(evidence)
        return True

    @property
    def revision(self):
        return self.at.revision

    def known(self):
        return self.at

    def learn(self, *evidence):
        self.at = Known(self.at.revision + 1, evidence, NODE, LISTED)
        self.unsaved.ring()

    async def until(self, *writes):
        with anyio.fail_after(10):
            while self.writes[-len(writes) :] != list(writes):
                await anyio.sleep(0.005)


@pytest.fixture
async def disk(monkeypatch, tmp_path):
    disk = Disk(monkeypatch, tmp_path)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(disk.recorder.run)
        await anyio.wait_all_tasks_blocked()
        yield disk
        tasks.cancel_scope.cancel()


class TestRecorder:
    async def test_where_nothing_is_known_nothing_is_written(self, disk):
        disk.unsaved.ring()
        await anyio.wait_all_tasks_blocked()
        assert disk.writes == []
        assert await disk.recorder.written()

    async def test_what_changes_is_written(self, disk):
        disk.learn(XID)
        await disk.until((XID,))
        disk.learn(XID, CORDON)
        assert await disk.recorder.written()
        assert disk.writes == [(XID,), (XID, CORDON)]
        assert await disk.recorder.written()

    async def test_a_write_that_fails_is_tried_again_and_whoever_waits_hears_of_it(self, disk, monkeypatch):
        monkeypatch.setattr(recorder_module, "RETRY", 0.01)
        monkeypatch.setattr(recorder_module, "WRITTEN_SOON", 0.1)
        disk.fails = True
        disk.learn(XID)
        assert not await disk.recorder.written()
        disk.fails = False
        monkeypatch.setattr(recorder_module, "WRITTEN_SOON", 10.0)
        await disk.until((XID,))
        with anyio.fail_after(10):
            while (
                not await disk.recorder.written()
            ):  # the thread has written it, and the loop may not have the result yet
                await anyio.sleep(0.001)

    async def test_what_is_learnt_last_is_written_at_the_end(self, monkeypatch, tmp_path):
        disk = Disk(monkeypatch, tmp_path)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(disk.recorder.run)
            await anyio.wait_all_tasks_blocked()
            disk.at = Known(1, (XID,), NODE, LISTED)
            tasks.cancel_scope.cancel()
        assert disk.writes == [(XID,)]

    @pytest.mark.parametrize("kind", ["write_evidence", "write_hardware"])
    async def test_a_write_under_way_at_the_end_takes_nothing_of_the_time_for_the_last_one(
        self, monkeypatch, tmp_path, kind
    ):
        disk, real, ahead, held = Disk(monkeypatch, tmp_path), anyio.current_time, 0.0, threading.Event()
        moment = recorder_module.LAST_WRITE / 10
        begun: list[object] = []
        done: list[object] = []

        def write(*_):
            nonlocal ahead
            begun.append(disk.at)
            held.wait(10)
            if not done:
                ahead += recorder_module.LAST_WRITE  # the first write seems to take all of this time
            time.sleep(moment)
            done.append(disk.at)
            return True

        monkeypatch.setattr(Memory, kind, write)
        monkeypatch.setattr(anyio, "current_time", lambda: real() + ahead)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(disk.recorder.run)
            disk.learn(XID)
            with anyio.fail_after(10):
                while not begun:
                    await anyio.sleep(0.001)
            disk.learn(XID, CORDON)
            tasks.cancel_scope.cancel()
            asyncio.get_running_loop().call_later(moment, held.set)
        assert len(done) == 2

    async def test_a_disk_that_keeps_hardware_waiting_keeps_no_word_on_health_waiting(self, disk, monkeypatch):
        held = threading.Event()
        monkeypatch.setattr(Memory, "write_hardware", lambda *_: held.wait(10))
        disk.learn(XID)
        assert await disk.recorder.written()
        disk.learn(XID, CORDON)
        assert await disk.recorder.written()
        assert disk.writes == [(XID,), (XID, CORDON)]
        held.set()


async def test_each_change_of_evidence_is_written_to_the_disk_too(state, monkeypatch):
    add, sync, done, synced = StateLog.write, StateLog.sync, threading.Event(), []

    def slow(log, kind, content):
        if kind == HEALTH and CORDON in content["evidence"]:
            done.wait(0.2)  # the other thread has all the time to overtake this one
        return add(log, kind, content)

    def watched(log):
        written = sync(log)
        synced.append(read_log(state).latest[HEALTH].content)
        return written

    async def until(signal):
        with anyio.fail_after(10):
            while not synced or signal not in synced[-1]:
                await anyio.sleep(0.005)

    monkeypatch.setattr(StateLog, "write", slow)
    monkeypatch.setattr(StateLog, "sync", watched)
    knows, unsaved = Fixed(Known(1, (XID,), NODE, LISTED)), Pulse()
    recorder = Recorder(memory(state), knows, unsaved)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(recorder.run)
        await until(b"xid")
        knows.now = Known(2, (XID, CORDON), NODE, LISTED)
        unsaved.ring()
        await until(b"cordon")
        tasks.cancel_scope.cancel()


def changed(signal: str = "xid", memory: object = None, recovery: object = None, **latch: object) -> dict[str, object]:
    """Return the stored form of XID with these changes."""
    entry = msgspec.to_builtins(XID)
    part = {"xid": "79", "flapping": "xid 48"}.get(signal, "")
    found = {**entry["latch"], "memory": {} if memory is None else memory, **latch}
    return {
        **entry,
        "signal": signal,
        "part": part,
        "latch": found if recovery is None else {**found, "recovery": recovery},
    }


@pytest.mark.parametrize(
    "wrong",
    [
        changed(since=1e18),
        changed(recovery={"marks": {"taken": 1e18}}),
        changed(recovery={"since": 1e18}),
        changed(since="yesterday"),
        changed(recovery=7),
        {"boot_id": "one", "uuid": "GPU-1"},
        "x",
    ],
)
def test_an_entry_that_cannot_be_true_is_left_out_alone_and_said(state, caplog, wrong):
    known = memory(state)
    known.log.write(HEALTH, {"boot_id": "one", "evidence": [CORDON, wrong, MAINTENANCE]})
    assert memory(state).evidence() == (CORDON, MAINTENANCE)
    (record,) = caplog.records
    assert "entry 1 is invalid and left out: " in record.getMessage()


@pytest.mark.parametrize(
    ("signal", "remembered", "read"),
    [
        ("xid", {"times": [-2.0], "last": -1.0}, Occurrences((0.0,), last=0.0)),
        ("recovery-action", {"action": 1, "excused": -30.0}, RequestedAction(action=1, excused=0.0)),
        ("hw-slowdown", {"watched": -30.0}, SlowMinutes(watched=0.0)),
        ("xid", {"times": [-1e18]}, SIGNALS["xid"].memory),
        ("xid", {"within": 1e18}, SIGNALS["xid"].memory),
        ("xid", {"last": 7e19}, SIGNALS["xid"].memory),
        ("flapping", {"hold": 1e18}, SIGNALS["flapping"].memory),
        ("flapping", {"hold": -1.0}, SIGNALS["flapping"].memory),
        ("hw-slowdown", {"watched": 1e18}, SIGNALS["hw-slowdown"].memory),
        ("recovery-action", {"excused": 1e18}, SIGNALS["recovery-action"].memory),
        ("unanswered", {"failures": [7e19]}, SIGNALS["unanswered"].memory),
        ("pcie-errors", {"times": [7e19]}, SIGNALS["pcie-errors"].memory),
        ("application-errors", {"unknown": [7e19]}, SIGNALS["application-errors"].memory),
        ("xid", {"moons": 7}, Occurrences()),
        ("xid", 7, Occurrences()),
    ],
)
def test_times_a_little_before_0_and_a_memory_that_cannot_be_read_drop_no_entry(state, signal, remembered, read):
    wrong = changed(signal, remembered, {"marks": {"taken": -1.0}}, since=-5.0)
    memory(state).log.write(HEALTH, {"boot_id": "one", "evidence": [wrong]})
    (entry,) = memory(state).evidence()
    latch = entry.latch
    assert (latch.verdict, latch.since, latch.memory, latch.recovery.marks.taken) == (Verdict.FATAL, 0.0, read, 0.0)


def test_a_signal_that_another_version_has_is_kept_and_costs_nothing(state):
    strange = replace(XID, signal="moonlight", latch=replace(XID.latch, memory={"phase": 3}))
    write(memory(state), (strange,), NODE, LISTED)
    assert memory(state).evidence() == (strange,)


async def test_a_recorder_that_is_told_to_look_restores_the_log(state):
    recorder = Recorder(memory(state), Fixed(Known(1, EVERYTHING, NODE, LISTED)), Pulse())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(recorder.run)
        await anyio.wait_all_tasks_blocked()
        assert await recorder.written()
        for name in FILES:
            (state / name).unlink()
        with anyio.fail_after(10):
            while len(read_log(state).latest) < 3:
                recorder.look()
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    assert memory(state).evidence() == EVERYTHING


def test_a_daemon_that_gets_the_directory_back_reads_what_was_written_and_writes_all_again(state):
    former = memory(state)
    write(former, (XID,), NODE, LISTED)
    new = memory(state)
    new.evidence()
    write(new, (CORDON,), NODE, LISTED)
    assert former.taken_back() == (CORDON,)
    assert write(former, (XID,), NODE, LISTED)
    assert memory(state).evidence() == (XID,)


@pytest.mark.parametrize("written", [(), (CORDON,)])
def test_what_a_former_daemon_passes_on_is_remembered_until_it_is_written_elsewhere(state, written):
    if written:
        write(memory(state), written, NODE, LISTED)
    assert memory(state).hand_over((XID,))
    new = memory(state)
    assert new.evidence() == (*written, XID)
    assert new.handed_over() == (XID,)
    assert memory(state, "two").handed_over() == ()
    new.forget_handover()
    assert memory(state).evidence() == written
