"""The monitor survives exceptions of the driver, canceled calls and other settings, and keeps its budget of calls."""

from functools import partial

import anyio
import pytest

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.health.observation import Sample
from gpu_plugin.nvml import monitor, session
from gpu_plugin.nvml.driver_calls import DriverCalls
from gpu_plugin.nvml.finding import HostState, read_host
from gpu_plugin.nvml.links import Links
from gpu_plugin.nvml.port import NVML_FUNCTIONS, NvmlError
from gpu_plugin.nvml.questions import TURNS
from gpu_plugin.nvml.roster import Watched
from gpu_plugin.nvml.session import DriverSession
from gpu_plugin.runtime.threads import SlowCall
from gpu_plugin.simulation import profile
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode

from .machine import Machine
from .monitored import LONG, NEVER, Bench
from .test_driver_calls import Gate

NOT_ASKED_BY_MONITORS = {"compute_mode", "set_compute_mode"}


class Raising(SimulatedDriver):
    """Raises another error than NvmlError from one call, `left` times."""

    call, error, left = "", OSError(5, "Input/output error"), 0

    def __getattribute__(self, name):
        own = object.__getattribute__(self, "__dict__")
        if name == own.get("call") and own["left"] > 0:
            own["left"] -= 1
            return self._raise
        return super().__getattribute__(name)

    def _raise(self, *_, **__):
        raise self.error


def broken(bench, call, times, error):
    bench.driver.error, bench.driver.left, bench.driver.call = error, times, call


@pytest.mark.parametrize("call", sorted(set(NVML_FUNCTIONS) - NOT_ASKED_BY_MONITORS))
async def test_looks_continue_after_any_exception_of_a_call(monkeypatch, call):
    monkeypatch.setattr(monitor, "CONFIRM", 0.0)
    monkeypatch.setattr(session, "PATIENCE", 0.0)
    async with Bench(driver=Raising, poll=0.001).watching() as bench:
        for times, error in ((1, OSError(5, "Input/output error")), (10_000, ValueError("what?"))):
            broken(bench, call, times, error)
            bench.node.lose(2)  # so that handles are looked up again
            await bench.turned(2)
            bench.node.heal(2)
            bench.monitor._reopening.rebooted = True  # so that the driver is opened again
            await bench.turned(3)
            bench.driver.left = 0
            bench.monitor._reopening.rebooted = True
            await bench.until(lambda: all(bench.faults(gpu)[-1:] == [""] for gpu in range(8)))


@pytest.mark.parametrize("call", ["open", "driver_version", "device_count"])
async def test_a_start_that_raises_anything_is_a_refusal_of_the_driver(monkeypatch, call):
    bench = Bench(driver=Raising)
    broken(bench, call, 1, OSError("cannot allocate memory"))
    with pytest.raises(NvmlError, match="cannot allocate memory"):
        await bench.monitor.open()
    assert len((await bench.monitor.open()).gpus) == 8
    bench.monitor.close()


@pytest.mark.parametrize("name", ["hgx-h100", "dgx1-v100", "a100-mig-mixed"])
async def test_every_round_of_eight_gpus_keeps_to_ten_calls_each(name):
    bench = Bench(name, poll=0.001)
    several = {"pcie_link": 2, "nvlink_states": len(bench.node.profile.remotes[0]), "wait": 0}
    await bench.monitor.open()

    def made():
        return sum(count * several.get(call, 1) for call, count in bench.driver.calls.items())

    async with bench.running():
        await bench.rounds(2)
        rounds = []
        for _ in range(2 * TURNS):
            before = made()
            await bench.rounds(1)
            rounds.append(made() - before)
    assert max(rounds) <= 80, "the core readings are among them every time"


# Opening


class Slow(SimulatedDriver):
    """Opens once let go."""

    def __init__(self, node):
        super().__init__(node)
        self.gate = Gate()
        self.gate.free.set()

    def open(self):
        self.gate()
        super().open()


async def test_a_slow_opening_is_no_fault_of_a_gpu_for_a_while(monkeypatch):
    monkeypatch.setattr(monitor, "CONFIRM", 0.0)
    async with Bench(driver=Slow, timeout=LONG).watching() as bench:
        bench.monitor.timeout = 1.0
        monkeypatch.setattr(session, "PATIENCE", LONG)
        bench.driver.gate.free.clear()
        since = len(bench.seen)
        await bench.monitor.release(frozenset({bench.uuids[3]}))
        closed = len(bench.seen)  # a turn under way may end before the driver is closed
        await bench.turned(2)
        assert bench.seen[closed:] == []
        bench.driver.gate.free.set()
        await bench.rounds(1, [gpu for gpu in range(8) if gpu != 3])
        assert {seen.fault for _, seen in bench.seen[since:] if isinstance(seen, Sample)} == {""}
        bench.driver.gate.free.clear()
        monkeypatch.setattr(session, "PATIENCE", 2.0)
        since = len(bench.seen)
        bench.monitor._reopening.rebooted = True
        await bench.until(lambda: bench.faults(5, since)[:1] == ["driver"])
        bench.driver.gate.free.set()


def test_a_driver_that_refuses_is_tried_for_a_whole_second():
    assert sum(session.RETRY_PAUSES) == pytest.approx(1.0)


async def test_all_attempts_together_take_no_longer_than_the_timeout():
    class Refusing(SimulatedDriver):
        def open(self):
            self.calls["open"] += 1
            raise NvmlError(Return.UNKNOWN, "nvmlInit_v2")

    calls = DriverCalls()
    driver = Refusing(SimulatedNode(profile.load("h200")))
    with pytest.raises(NvmlError):
        await DriverSession(driver, calls).open(0.05, (0.01, NEVER, 0.01))
    calls.close()
    assert driver.calls["open"] == 2


# What is called off


async def test_a_canceled_close_stays_under_way():
    calls, gate = DriverCalls(), Gate()

    class Held(SimulatedDriver):
        def close(self):
            gate()
            super().close()

    driver = Held(SimulatedNode(profile.load("h200")))
    opened = DriverSession(driver, calls)
    await opened.open(LONG)
    with anyio.move_on_after(0.01):
        await opened.close(LONG)
    assert opened.holds, "the call that closes it is under way"
    with pytest.raises(TimeoutError, match="closes"):
        await opened.open(0.01)
    gate.free.set()
    assert await opened.close(LONG)
    assert driver.calls == {"open": 1, "driver_version": 1, "device_count": 1, "cuda_version": 1, "close": 1}
    calls.close()


async def test_canceled_readings_of_the_host_and_of_links_stay_under_way(monkeypatch):
    machine, calls, gate, asked = Machine("hgx-h100"), DriverCalls(), Gate(), []
    gpus, handles = machine.found()

    def boot_id():
        asked.append("host")
        return gate()

    def ancestor(*_):
        asked.append("links")
        gate()
        return 0

    monkeypatch.setattr(machine.host, "boot_id", boot_id)
    monkeypatch.setattr(machine.driver, "common_ancestor", ancestor)
    asking: SlowCall[HostState] = SlowCall("host-state")
    see, links = partial(read_host, machine.host, sliced=False), Links(machine.driver, machine.host, calls)
    watched = [Watched(gpu, handles[gpu.uuid]) for gpu in gpus[:2]]
    for _ in range(3):
        with anyio.move_on_after(0.02):
            await asking.joined(see, LONG)
        with anyio.move_on_after(0.02):
            await links.read(watched, LONG)
    assert sorted(asked) == ["host", "links"]
    gate.free.set()
    seen = await asking.joined(see, LONG)
    assert seen.boot_id == "through"
    calls.close()


# Settings


async def test_a_changed_poll_interval_and_health_checks_apply_at_once():
    async with Bench(poll=NEVER).watching(rounds=0) as bench:
        await bench.rounds(1)
        await bench.until_turned(lambda: bench.monitor._over is not None) if bench.monitor._over is None else None
        due = bench.monitor.turn_due
        bench.monitor.retune(0.01, LONG, 60.0, judging=True)
        assert bench.monitor.turn_due < due - NEVER / 2
        await bench.rounds(2)
        bench.monitor.retune(NEVER, LONG, 60.0, judging=True)
        await bench.turned(1) if bench.monitor._over is None else None
        since = len(bench.seen)
        bench.monitor.retune(NEVER, LONG, 60.0, judging=False)
        await bench.rounds(1)
        unjudged = [seen for _, seen in bench.seen[since:] if isinstance(seen, Sample)]
        assert {(seen.margin, seen.recovery_action, seen.core_answered) for seen in unjudged} == {(None, None, True)}
        assert bench.monitor.retention == 60.0


@pytest.mark.parametrize("lacking", [("temperature",), ("temperature", "total_energy", "clocks_event_reasons")])
async def test_without_health_checks_a_gpu_without_temperature_is_still_read(lacking):
    bench = Bench(poll=NEVER, judging=False)
    for call in lacking:
        bench.node.refuse(call, Return.NOT_SUPPORTED, gpu=3)
    bench.node.refuse("mig_mode", Return.NOT_SUPPORTED, gpu=3)
    async with bench.watching(rounds=0):
        await bench.rounds(2) if bench.seen else await bench.rounds(1)
        bench.node.lose(3)
        bench.monitor.look_now()
        await bench.until(lambda: bench.faults(3)[-1:] == ["lost"])


# New handles and first looks


async def test_a_gpu_with_a_new_handle_is_read_completely():
    bench = Bench()
    await bench.monitor.open()
    watched = bench.monitor._roster.gpus[4]
    watched.handle = None
    first = await bench.monitor._poller.look(watched, LONG, LONG, full=False)
    again = await bench.monitor._poller.look(watched, LONG, LONG, full=False)
    assert first.sample is not None
    assert first.sample.asked is None
    assert again.sample is not None
    assert again.sample.asked is not None
    bench.monitor.close()


async def test_first_looks_may_take_longer(monkeypatch):
    monkeypatch.setattr(monitor, "LOOK_PATIENCE", 0.01)
    bench = Bench(driver=lambda node: SimulatedDriver(node, latency={"temperature": 0.05}))
    await bench.opened()
    assert {uuid for uuid, seen in bench.seen if isinstance(seen, Sample)} == set(bench.uuids)
