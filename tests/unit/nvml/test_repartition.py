"""GPUs that are repartitioned while the monitor watches."""

from itertools import pairwise

import pytest
from msgspec.structs import replace

from gpu_plugin.devices.nvml_h import EventType, Return
from gpu_plugin.nvml import monitor, questions
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.simulation import faults

from .monitored import NEVER, Bench

MIXED = "a100-mig-mixed"
SEVEN, HALVES = 4, 5
"""Indices of GPUs of that node: cut into seven, and into two."""


def profiles(node, gpu):
    return [device.profile for device in node.gpus[gpu].mig_devices]


def recut(bench, gpu, value):
    faults.apply(bench.node, {"gpu": gpu, "mig": value})


async def test_open_finds_every_slice_with_its_capabilities():
    bench = Bench(MIXED)
    node = await bench.monitor.open()
    bench.monitor.close()
    assert [len(gpu.mig_devices) for gpu in node.gpus] == [0, 0, 0, 0, 7, 2, 4, 3]
    assert [gpu.mig_enabled for gpu in node.gpus] == [False] * 4 + [True] * 4
    minors = bench.monitor.host.mig_minors()
    for gpu in node.gpus:
        for device in gpu.mig_devices:
            instance = f"gpu{gpu.minor}/gi{device.gpu_instance}"
            assert device.gpu_instance_cap == minors[f"{instance}/access"]
            assert device.compute_instance_cap == minors[f"{instance}/ci{device.compute_instance}/access"]
            assert f"/dev/nvidia-caps/nvidia-cap{device.compute_instance_cap}" in node.device_nodes


async def test_an_event_of_it_is_asked_for_and_noticed_within_one_look():
    async with Bench(MIXED, poll=NEVER).watching() as bench:
        recut(bench, HALVES, "1g.5gb,2g.10gb")
        await bench.until(lambda: profiles(bench.nodes[-1], HALVES) == ["2g.10gb", "1g.5gb"])
        node = bench.nodes[-1]
        looked = len(bench.samples(HALVES))
    assert looked == 2, "one before, one on account of the event"
    assert [device.gpu_instance_cap for device in node.gpus[HALVES].mig_devices] == [705, 741]
    assert "/dev/nvidia-caps/nvidia-cap742" in node.device_nodes
    assert bench.good()
    assert [gpu for gpu in node.gpus if gpu.index != HALVES] == [
        gpu for gpu in bench.nodes[0].gpus if gpu.index != HALVES
    ]


async def test_after_a_change_the_gpus_are_looked_at_again_soon(monkeypatch):
    monkeypatch.setattr(monitor, "CONFIRM", 0.01)
    async with Bench(MIXED, poll=NEVER).watching() as bench:
        recut(bench, HALVES, "7g.40gb")
        await bench.until(lambda: len(bench.samples(HALVES)) >= 3)
    assert len(bench.samples(HALVES)) == 3, "and then no more"


async def test_without_events_the_poll_notices_it():
    bench = Bench(MIXED)
    bench.node.refuse("register_events", Return.NOT_SUPPORTED)
    async with bench.watching():
        assert bench.node.post(HALVES, EventType.MIG_CONFIG_CHANGE, 0) == 0
        recut(bench, HALVES, "4g.20gb")
        await bench.until(lambda: profiles(bench.nodes[-1], HALVES) == ["4g.20gb"])
    assert bench.good()


async def test_other_minors_for_the_same_slices_are_passed_on(monkeypatch):
    bench = Bench(MIXED)
    await bench.monitor.open()
    host = bench.monitor.host
    moved = {name: minor + 1000 for name, minor in host.mig_minors().items()}
    async with bench.running():
        await bench.rounds()
        assert len(bench.nodes) == 1
        monkeypatch.setattr(host, "mig_minors", lambda: moved)
        await bench.until(lambda: len(bench.nodes) == 2)
        await bench.rounds(2)
    assert [device.gpu_instance_cap for device in bench.nodes[0].gpus[HALVES].mig_devices] == [687, 696]
    assert [device.gpu_instance_cap for device in bench.nodes[1].gpus[HALVES].mig_devices] == [1687, 1696]
    assert len(bench.nodes) == 2


async def test_a_host_that_cannot_be_asked_leaves_what_was_known(monkeypatch):
    bench = Bench(MIXED)
    await bench.monitor.open()

    def odd():
        raise RuntimeError("odd")

    async with bench.running():
        await bench.rounds()
        monkeypatch.setattr(bench.monitor.host, "mig_minors", odd)
        recut(bench, HALVES, "3g.20gb")
        await bench.until(lambda: len(bench.nodes) == 2)
    first = bench.nodes[0]
    assert bench.nodes[1].gpus[SEVEN] == first.gpus[SEVEN]
    assert bench.nodes[1].device_nodes == first.device_nodes
    assert bench.nodes[1].gpus[HALVES].mig_devices == first.gpus[HALVES].mig_devices[:1]


async def test_mig_mode_off_and_on_again():
    async with Bench(MIXED).watching() as bench:
        whole = bench.nodes[0]
        recut(bench, HALVES, "none")
        await bench.until(lambda: not bench.nodes[-1].gpus[HALVES].mig_enabled)
        assert bench.nodes[-1].gpus[HALVES] == replace(whole.gpus[HALVES], mig_enabled=False, mig_devices=())
        recut(bench, HALVES, "3g.20gb,3g.20gb")
        await bench.until(lambda: bench.nodes[-1].gpus[HALVES].mig_enabled)
        assert bench.nodes[-1].gpus == whole.gpus, "the very same devices"
        recut(bench, 0, "7g.40gb")
        await bench.until(lambda: profiles(bench.nodes[-1], 0) == ["7g.40gb"])
        await bench.until(lambda: bench.driver.calls["register_events"] == 8 + 3)
        assert bench.node.post(0, EventType.MIG_CONFIG_CHANGE, 0) == 1
    assert bench.good()


async def test_a_mode_that_waits_for_a_reset_is_followed_and_withdrawn(caplog):
    caplog.set_level("INFO")
    bench = Bench(MIXED)
    whole = await bench.monitor.open()
    real, first = bench.driver.mig_mode, bench.driver.handle_by_index(0)
    async with bench.running():
        await bench.rounds()
        bench.driver.mig_mode = lambda handle: (0, 1) if handle == first else real(handle)
        await bench.until(lambda: bench.nodes[-1].gpus[0].mig_pending is True)
        assert bench.nodes[-1].gpus[0] == replace(whole.gpus[0], mig_pending=True)
        await bench.rounds(3)
        said = [text for text in caplog.messages if "MIG mode" in text]
        assert len(said) == 1
        assert "after a reset" in said[0]
        bench.driver.mig_mode = real
        await bench.until(lambda: bench.nodes[-1].gpus[0].mig_pending is None)
    assert bench.nodes[-1].gpus == whole.gpus
    assert bench.good()


async def test_a_partition_that_flaps_is_followed_to_its_last_state():
    async with Bench(MIXED).watching() as bench:
        for turn in range(40):
            recut(bench, HALVES, ("1g.5gb", "none", "3g.20gb,3g.20gb", "empty", "1c.3g.20gb")[turn % 5])
            if not turn % 7:
                await bench.rounds()
        await bench.until(lambda: profiles(bench.nodes[-1], HALVES) == ["1c.3g.20gb"])
        await bench.rounds(3)
        assert profiles(bench.nodes[-1], HALVES) == ["1c.3g.20gb"]
    assert bench.good()
    assert all(one != other for one, other in pairwise(bench.nodes)), "nothing twice in a row"


class Slices:
    """Makes one MIG index of one GPU unreadable."""

    def __init__(self, bench, monkeypatch, gpu, index, code=Return.UNKNOWN, call="uuid"):
        self.failing = False
        self.asked = 0
        real = getattr(bench.driver, call)
        handle = bench.driver.handle_by_index

        def some(of, *rest):
            mine = bench.driver.mig_handle(handle(gpu), index) if call == "uuid" else handle(gpu)
            if self.failing and of == mine and (call == "uuid" or rest == (index,)):
                self.asked += 1
                raise NvmlError(code, f"nvml {call}")
            return real(of, *rest)

        monkeypatch.setattr(bench.driver, call, some)


async def test_a_slice_that_is_unreadable_for_a_moment_stays(monkeypatch, caplog):
    monkeypatch.setattr(monitor, "CONFIRM", 0.01)
    bench = Bench(MIXED, poll=NEVER)
    await bench.monitor.open()
    slices = Slices(bench, monkeypatch, HALVES, 1)
    async with bench.running():
        await bench.rounds()
        slices.failing = True
        bench.monitor.look_now()
        await bench.until(lambda: len(bench.samples(HALVES)) >= 3)  # looked at again soon
        slices.failing = False
        bench.monitor.look_now()
        await bench.rounds(1)
    assert slices.asked == 2
    assert len(bench.nodes) == 1
    assert bench.good()
    assert caplog.text.count("MIG device 1 cannot be read") == 1


@pytest.mark.parametrize("call", ["uuid", "mig_handle"])
async def test_a_slice_that_stays_unreadable_counts_as_gone_and_the_others_stay(monkeypatch, caplog, call):
    bench = Bench(MIXED)
    await bench.monitor.open()
    slices = Slices(bench, monkeypatch, SEVEN, 3, Return.INVALID_ARGUMENT, call)
    async with bench.running():
        await bench.rounds()
        slices.failing = True
        await bench.until(lambda: len(bench.nodes) == 2)
        assert [device.index for device in bench.nodes[1].gpus[SEVEN].mig_devices] == [0, 1, 2, 4, 5, 6]
        assert bench.unreadable() == {}
        slices.failing = False
        await bench.until(lambda: len(bench.nodes) == 3)
        assert bench.nodes[2].gpus == bench.nodes[0].gpus
    assert bench.good()
    assert caplog.text.count("MIG device 3 cannot be read") == 1


@pytest.mark.parametrize("call", ["mig_mode", "max_mig_devices"])
@pytest.mark.parametrize("code", [Return.UNKNOWN, Return.GPU_IS_LOST])
async def test_an_unreadable_partition_changes_nothing(call, code, caplog):
    async with Bench(MIXED).watching() as bench:
        bench.node.refuse(call, code, gpu=SEVEN, times=3)
        for _ in range(4):
            bench.monitor.look_now()
            await bench.rounds()
    assert bench.driver.calls[call] >= 12
    assert caplog.text.count("its MIG devices cannot be read now") == 1
    assert len(bench.nodes) == 1
    assert bench.good()


async def test_a_lost_gpu_stays_cut_as_it_was_and_is_read_again_after_its_repair():
    async with Bench(MIXED).watching() as bench:
        whole = bench.nodes[0]
        await bench.lose(HALVES)
        recut(bench, HALVES, "2g.10gb")
        await bench.rounds(2)
        assert bench.nodes[-1].gpus == whole.gpus
        bench.node.heal(HALVES)
        await bench.until(lambda: profiles(bench.nodes[-1], HALVES) == ["2g.10gb"])
        assert {device.gpu_instance_cap for device in bench.nodes[-1].gpus[HALVES].mig_devices} == {705}
    assert bench.faults(HALVES)[-1] == ""


async def test_parts_without_mig_are_asked_once():
    async with Bench("l40s-pcie-8").watching(rounds=0) as bench:
        await bench.rounds(4)
    assert bench.driver.calls["mig_mode"] == 8 + 8, "by the probe, and by the first look"
    assert bench.driver.calls["max_mig_devices"] == 0


async def test_outside_mig_mode_looks_ask_for_the_mode_alone_each_in_its_turn(monkeypatch):
    bench = Bench("hgx-h100")
    monkeypatch.setattr(bench.monitor.host, "mig_minors", lambda: pytest.fail("asked"))
    async with bench.watching(rounds=0):
        await bench.rounds(2 * questions.TURNS)
    assert bench.driver.calls["mig_mode"] >= 8 * 4, "by the probe, by the first look, and by one in six since"
    assert bench.driver.calls["max_mig_devices"] == bench.driver.calls["mig_handle"] == 0


async def test_a_new_partition_without_an_event_is_found_within_six_rounds():
    async with Bench("h100-mig-single", poll=0.01).watching(rounds=0) as bench:
        await bench.rounds(1)
        bench.driver.wait = lambda *_: (_ for _ in ()).throw(NvmlError(Return.TIMEOUT, "nvmlEventSetWait_v2"))
        since = len(bench.seen)
        for gpu in range(8):
            bench.node.partition(gpu, ["3g.40gb"])
        await bench.until(lambda: all(len(gpu.mig_devices) == 1 for gpu in bench.nodes[-1].gpus))
        assert max(len(bench.samples(gpu, since)) for gpu in range(8)) <= questions.TURNS + 2
