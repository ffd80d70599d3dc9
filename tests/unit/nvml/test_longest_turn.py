"""The time by which a turn ends if all is well, and whether it reached any GPU."""

import math

import anyio
import pytest

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml import monitor as monitor_module
from gpu_plugin.nvml import reopening
from gpu_plugin.nvml.monitor import longest_turn
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.nvml.schedule import Turn
from gpu_plugin.runtime.threads import Job
from gpu_plugin.simulation.driver import SimulatedDriver

from .monitored import LONG, NEVER, Bench, remembered

SIXTEEN = "dgx2-16"


class SlowCalls:
    """Lets every call take nearly as long as it may, by a clock of its own."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        self.waits = 0
        monkeypatch.setattr(anyio, "current_time", lambda: self.now)
        original = Job.wait

        async def wait(job, patience):
            began = self.now
            self.waits += 1
            assert await original(job, LONG)
            self.now = max(self.now, began + 0.99 * patience)  # those of one moment go on side by side
            return True

        monkeypatch.setattr(Job, "wait", wait)


@pytest.mark.parametrize("timeout", [1.0, 5.0, 30.0])
async def test_no_turn_takes_longer_than_the_longest_however_late_every_answer_is(monkeypatch, timeout):
    bench = Bench(SIXTEEN, timeout=timeout, poll=NEVER)
    watching = bench.monitor
    await watching.open()
    assert len(watching.node.gpus) == 16
    try:
        with monkeypatch.context() as patches:
            slow = SlowCalls(patches)
            for opened_anew in (False, True):
                watching._reopening.rebooted = opened_anew  # then it is closed and opened, and every GPU found again
                for watched in watching._roster.gpus:
                    watching._events.register_again(watched.gpu.uuid)
                    watched.nvlinks = None
                began, before = slow.now, slow.waits
                watching.turn_due = watching._turn_end()
                await watching._turn(Turn(whole=True, full=None))
                assert began + 0.9 < slow.now <= watching.turn_due
                assert slow.now < began + 0.75 * longest_turn(timeout), "not one GPU after the other"
                assert slow.waits - before >= 2 * 16
    finally:
        watching.close()


async def test_the_first_turn_is_due_while_the_driver_is_opened_and_none_afterwards(monkeypatch):
    monkeypatch.setattr(anyio, "current_time", lambda: 1000.0)
    due = []

    class Noted(SimulatedDriver):
        def open(self):
            due.append(bench.monitor.turn_due)
            super().open()

    bench = Bench(driver=Noted, timeout=7.0)
    assert math.isinf(bench.monitor.turn_due)
    await bench.monitor.open()
    assert due == [1000.0 + longest_turn(7.0)]
    assert math.isinf(bench.monitor.turn_due)
    bench.monitor.close()


async def test_no_turn_is_due_after_an_attempt_in_vain():
    bench = Bench()
    bench.node.refuse("open", Return.DRIVER_NOT_LOADED)
    with pytest.raises(NvmlError):
        await bench.monitor.open()
    assert math.isinf(bench.monitor.turn_due)


async def test_a_turn_that_begins_early_is_due_earlier(monkeypatch):
    bench = Bench(poll=NEVER, timeout=7.0)
    watching = bench.monitor
    await watching.open()
    due, stands = [], anyio.Event()
    real = type(watching)._turn

    async def noted(self, turn):
        due.append(self.turn_due - anyio.current_time())
        if len(due) == 2:
            stands.set()
        await real(self, turn)

    monkeypatch.setattr(type(watching), "_turn", noted)
    longest = longest_turn(7.0)
    async with bench.running():
        await bench.turned(1)
        with anyio.fail_after(10):
            while watching.turn_due < anyio.current_time() + longest + 1:  # after its turn, it waits for the next
                await anyio.lowlevel.checkpoint()
        assert watching.turn_due - anyio.current_time() > longest + 0.9 * NEVER
        watching.look_now()
        with anyio.fail_after(10):
            await stands.wait()
    assert all(longest - 1 < left <= longest for left in due)


async def test_a_turn_that_failed_gets_no_more_time(monkeypatch):
    bench = Bench(poll=NEVER)
    await bench.monitor.open()

    async def fail(*_):
        raise RuntimeError("it fell over")

    monkeypatch.setattr(type(bench.monitor), "_turn", fail)
    with pytest.raises(RuntimeError):
        await bench.monitor.run()
    owed = bench.monitor.turn_due
    monkeypatch.setattr(monitor_module, "longest_turn", lambda *_: NEVER)
    with pytest.raises(RuntimeError):
        await bench.monitor.run()
    assert bench.monitor.turn_due == owed


# Whether any GPU can be reached

ALL = range(8)


async def test_while_one_gpu_answers_there_is_no_trouble():
    bench = Bench(timeout=0.05)
    await bench.monitor.open()
    assert bench.monitor.trouble == ""
    async with bench.running():
        for gpu in ALL[1:4]:
            bench.node.lose(gpu)
        for gpu in ALL[4:]:
            bench.node.hang(gpu, NEVER)
        await bench.until(lambda: "hung" in bench.faults(7) and "lost" in bench.faults(1))
        await bench.turned(2)
        assert bench.monitor.trouble == ""
        for gpu in ALL:
            bench.node.heal(gpu)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("befall", "said"),
    [
        (lambda node, gpu: node.lose(gpu), "none of the 8 GPUs answers"),
        (lambda node, gpu: node.hang(gpu, NEVER), "none of the 8 GPUs answers"),
        (lambda node, gpu: node.vanish(gpu), "the NVIDIA driver finds no GPU on this node any more"),
    ],
    ids=["lost", "hung", "vanished"],
)
async def test_a_fault_of_all_gpus_is_the_trouble_of_the_monitor(befall, said, when):
    known = remembered()
    bench = Bench(timeout=0.05, remembered=known)
    if when == "before":
        for gpu in ALL:
            befall(bench.node, gpu)
    await bench.monitor.open()
    assert (when == "before") == bool(bench.monitor.trouble)
    async with bench.running():
        for gpu in ALL:
            befall(bench.node, gpu)
        # If the host never listed a GPU, it is not known that the GPU vanished.
        told = said if when == "after" else ("none of the 8 GPUs answers", said)
        await bench.until_turned(lambda: bench.monitor.trouble and bench.monitor.trouble in told)
        for gpu in ALL:
            bench.node.heal(gpu)
            bench.node.bring_back(gpu)
        await bench.until_turned(lambda: not bench.monitor.trouble)


async def test_an_unloaded_driver_is_the_trouble_until_it_returns(monkeypatch):
    monkeypatch.setattr(reopening, "REOPEN_AFTER", 2)
    async with Bench().watching(rounds=0) as bench:
        for gpu in ALL:
            bench.node.lose(gpu)
        bench.node.refuse("open", Return.DRIVER_NOT_LOADED, times=40)
        await bench.until_turned(lambda: bench.monitor.trouble.startswith("the NVIDIA driver cannot be used: "))
        for gpu in ALL:
            bench.node.heal(gpu)
        await bench.until_turned(lambda: not bench.monitor.trouble)


async def test_gpus_that_are_released_are_no_trouble():
    async with Bench().watching(rounds=0) as bench:
        await bench.monitor.release(None)
        await bench.turned(2)
        assert bench.monitor.trouble == ""
        await bench.monitor.resume(None)
        await bench.turned(1)
        assert bench.monitor.trouble == ""


class OneGpu(SimulatedDriver):
    def device_count(self):
        super().device_count()
        return 1


async def test_the_trouble_names_the_only_gpu():
    async with Bench(driver=OneGpu).watching(rounds=0) as bench:
        bench.node.lose(0)
        await bench.until_turned(lambda: bench.monitor.trouble == "the only GPU does not answer")
