"""GPUs that the driver is unbound from or bound to while the monitor runs, and a node that is booted."""

import pytest

from gpu_plugin.devices.device import PLACEHOLDER
from gpu_plugin.devices.nvml_h import EventType, Return
from gpu_plugin.nvml import monitor
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.host import SimulatedHost

from .monitored import FOREVER, NEVER, Bench, but, remembered


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(monitor, "CONFIRM", 0.01)


def opened(bench):
    return bench.driver.calls["open"]


async def test_a_gpu_that_the_driver_is_unbound_from_has_vanished_and_is_not_asked_any_more():
    async with Bench().watching() as bench:
        await bench.vanish(3)
        since = await bench.rounds(1)
        looked = bench.driver.calls["handle_by_uuid"]
        await bench.rounds(8)
        assert set(bench.faults(3, since)) == {"vanished"}
        assert bench.driver.calls["handle_by_uuid"] == looked
        assert [gpu.uuid for gpu in bench.monitor.node.gpus] == bench.uuids, "it stays listed"
    assert bench.samples(3)[-1].detail == (
        f"the NVIDIA driver is not bound to {bench.node.profile.gpus[3].pci_bus_id} any more"
    )
    assert bench.good(but(3))
    assert opened(bench) == 1
    assert len(bench.nodes) == 1


async def test_a_gpu_that_came_back_is_found_by_opening_the_driver_anew():
    async with Bench().watching() as bench:
        node = bench.nodes[0]
        await bench.vanish(3)
        await bench.bring_back(3)
        await bench.xid(3, 48)
        assert bench.monitor.node == node
    before, after = [[s.binding for s in bench.samples(3) if not s.fault][at] for at in (0, -1)]
    assert before is not None
    assert after is not None
    assert before != after
    assert bench.good(but(3))
    assert opened(bench) == 2


async def test_a_gpu_that_went_and_came_between_two_looks_is_found_too():
    async with Bench(poll=NEVER).watching() as bench:
        bench.node.vanish(3)
        bench.node.bring_back(3)
        bench.monitor.look_now()
        await bench.until(lambda: len(bench.faults(3)) > 1 and bench.faults(3)[-1] == "")
    assert bench.good(but(3))
    assert opened(bench) == 2


async def test_a_gpu_that_is_plugged_in_is_found_and_watched():
    bench = Bench()
    bench.node.vanish(5)
    node = await bench.monitor.open()
    assert [gpu.uuid for gpu in node.gpus] == [bench.uuids[gpu] for gpu in but(5)]
    async with bench.running():
        await bench.rounds(3, but(5))
        assert opened(bench) == 1
        bench.node.bring_back(5)
        await bench.until(lambda: len(bench.nodes) == 2)
        await bench.rounds()
        await bench.xid(5, 63)
    assert [(gpu.index, gpu.uuid) for gpu in bench.nodes[-1].gpus] == list(enumerate(bench.uuids))
    assert len(bench.nodes[-1].links) == 28
    assert bench.good()
    assert opened(bench) == 2


class Hiding(SimulatedDriver):
    """Counts seven of its eight GPUs, as if a driver parameter excluded the last."""

    def device_count(self):
        return super().device_count() - 1


async def test_a_gpu_that_nvml_hides_is_looked_for_a_few_times_and_hides_no_other():
    bench = Bench(driver=Hiding)
    node = await bench.monitor.open()
    assert len(node.gpus) == 7
    async with bench.running():
        await bench.rounds(80, range(7))
    assert opened(bench) == 3
    assert bench.good(range(7))
    assert len(bench.nodes) == 1, "nothing changed"


async def test_the_driver_is_not_opened_again_during_a_call():
    async with Bench(timeout=0.5).watching() as bench:
        bench.node.hang(2, FOREVER)
        bench.node.vanish(3)
        await bench.until(lambda: "hung" in bench.faults(2) and "vanished" in bench.faults(3))
        bench.node.bring_back(3)
        await bench.rounds(5, but(2, 3))
        assert opened(bench) == 1
        assert bench.faults(2)[-1] == "hung"
        bench.node.heal(2)
        await bench.until(lambda: bench.faults(3)[-1] == bench.faults(2)[-1] == "")
    assert opened(bench) == 2
    assert bench.good(but(2, 3))


async def test_a_gpu_that_hangs_and_is_unbound_has_vanished():
    async with Bench(timeout=0.5).watching() as bench:
        await bench.hang(2)
        bench.node.vanish(2)
        await bench.until(lambda: bench.faults(2)[-1] == "vanished")
        await bench.heal(2)


async def test_without_bindings_of_the_host_the_driver_decides(monkeypatch):
    monkeypatch.setattr(SimulatedHost, "bindings", lambda _: {})
    async with Bench().watching() as bench:
        bench.node.vanish(3)
        await bench.until(lambda: bench.faults(3)[-1] == "vanished")
        await bench.rounds(20)
        assert opened(bench) == 1
    assert bench.good(but(3))
    assert all(sample.binding is None for gpu in range(8) for sample in bench.samples(gpu))
    assert {sample.fault for sample in bench.samples(3)} <= {"", "lost", "vanished"}


@pytest.mark.parametrize("trouble", [OSError("stale file handle"), RuntimeError("odd")])
async def test_a_host_that_cannot_be_asked_changes_nothing(monkeypatch, trouble):
    bench = Bench()
    node = await bench.monitor.open()

    def broken():
        raise trouble

    async with bench.running():
        await bench.rounds()
        known = {sample.binding for sample in bench.samples(0)}
        monkeypatch.setattr(bench.monitor.host, "bindings", broken)
        since = await bench.rounds(3)
        assert {sample.binding for sample in bench.samples(0, since)} == known != {None}
    assert bench.good()
    assert bench.monitor.node == node
    assert opened(bench) == 1


async def test_a_vanished_gpu_is_dropped_after_its_time_and_found_again(caplog):
    async with Bench(retention=FOREVER).watching() as bench:
        bench.node.vanish(3)
        bench.node.lose(4)
        await bench.until(lambda: "vanished" in bench.faults(3) and "lost" in bench.faults(4))
        await bench.rounds(5)
        assert len(bench.nodes) == 1
        bench.monitor.retention = 0.0
        await bench.until(lambda: len(bench.nodes) == 2)
        assert [gpu.uuid for gpu in bench.nodes[1].gpus] == [bench.uuids[gpu] for gpu in but(3)]
        assert not [pair for pair in bench.nodes[1].links if bench.uuids[3] in pair]
        since = await bench.rounds(3, but(3))
        assert bench.samples(3, since) == []
        bench.node.bring_back(3)
        await bench.until(lambda: len(bench.nodes) == 3)
        await bench.until(lambda: bench.faults(3)[-1] == "")
    assert [gpu.uuid for gpu in bench.nodes[2].gpus] == bench.uuids
    assert caplog.text.count("is not listed any more") == 1


async def test_the_time_to_drop_a_vanished_gpu_starts_again():
    async with Bench(retention=0.3).watching() as bench:
        for _ in range(4):
            bench.node.vanish(3)
            await bench.until(lambda: bench.faults(3)[-1] == "vanished")
            await bench.bring_back(3)
            (watched,) = [each for each in bench.monitor._roster.gpus if each.gpu.uuid == bench.uuids[3]]
            assert watched.vanished_since is None


async def test_a_node_without_any_gpu_left_finds_the_next_one():
    async with Bench("h200", retention=0.0).watching() as bench:
        bench.node.vanish(0)
        await bench.until(lambda: len(bench.nodes) == 2)
        assert bench.nodes[1].gpus == ()
        bench.node.bring_back(0)
        await bench.until(lambda: len(bench.nodes) == 3)
        assert [gpu.uuid for gpu in bench.nodes[2].gpus] == bench.uuids
        await bench.until(lambda: bench.faults(0)[-1] == "")


async def test_a_remembered_gpu_that_vanished_takes_no_other_gpus_name():
    """The driver numbers the later GPUs again, so its index now belongs to a GPU that cannot be read."""
    bench = Bench(remembered=remembered())
    bench.node.vanish(1)
    bench.node.lose(2)
    node = await bench.monitor.open()
    async with bench.running():
        await bench.rounds(1, but(2))
        await bench.heal(2)
    assert sorted(gpu.uuid for gpu in node.gpus if not gpu.uuid.startswith(PLACEHOLDER)) == sorted(bench.uuids)
    assert set(bench.faults(1)) == {"vanished"}
    assert bench.uuids[1] in bench.unreadable()


async def test_a_placeholder_name_ends_when_the_gpu_is_found():
    bench = Bench()
    bench.node.vanish(5)
    bench.node.lose(3)
    await bench.monitor.open()
    assert list(bench.unreadable()) == [f"{PLACEHOLDER}3"]
    async with bench.running():
        await bench.rounds(1, but(3, 5))
        bench.node.bring_back(5)
        bench.node.heal(3)
        await bench.until(lambda: [gpu.uuid for gpu in bench.nodes[-1].gpus] == bench.uuids)
    assert bench.unreadable() == {}


# Indices


def indices(bench):
    return {bench.uuids.index(gpu.uuid): gpu.index for gpu in bench.nodes[-1].gpus}


def every_index_is_the_drivers(bench, *left_out):
    there = {
        gpu: bench.driver.uuid(bench.driver.handle_by_index(index))
        for gpu, index in indices(bench).items()
        if gpu not in left_out
    }
    return there == {gpu: bench.uuids[gpu] for gpu in but(*left_out)}


@pytest.mark.parametrize(("lost", "at"), [((), {2: 7}), ((3,), {3: 2, 2: 7})])
async def test_indices_are_those_of_the_driver_then_the_ones_that_are_left(lost, at):
    bench = Bench()
    async with bench.watching():
        for gpu in (2, 5):
            await bench.vanish(gpu)
        for gpu in lost:
            bench.node.lose(gpu)
        await bench.bring_back(5)
        assert every_index_is_the_drivers(bench, 2, *lost)
        assert {gpu: indices(bench)[gpu] for gpu in at} == at
        await bench.bring_back(2)
        assert indices(bench) == {gpu: gpu for gpu in range(8)}


@pytest.mark.parametrize(("gone", "lost"), [((1, 4), ()), ((1,), (2,))])
async def test_remembered_gpus_that_are_gone_come_after_the_indices_of_the_driver(gone, lost):
    bench = Bench(remembered=remembered())
    for gpu in gone:
        bench.node.vanish(gpu)
    for gpu in lost:
        bench.node.lose(gpu)
    node = await bench.opened()
    order = [bench.uuids[gpu] for gpu in (*but(*gone), *gone)]
    assert [(gpu.index, gpu.uuid) for gpu in node.gpus] == list(enumerate(order))


# The driver as a whole


async def test_without_a_driver_every_gpu_has_that_fault_and_no_call_is_made():
    async with Bench().watching() as bench:
        for gpu in range(8):
            bench.node.vanish(gpu)
        await bench.until(lambda: all(bench.faults(gpu)[-1] == "vanished" for gpu in range(8)))
        bench.node.refuse("open", Return.DRIVER_NOT_LOADED, times=8)
        for gpu in range(8):
            bench.node.bring_back(gpu)
        await bench.until(lambda: all(bench.faults(gpu)[-1] == "driver" for gpu in range(8)))
        asked = bench.driver.calls["handle_by_uuid"]
        detail = bench.samples(0)[-1].detail
        await bench.rounds(1)
        assert bench.driver.calls["handle_by_uuid"] == asked
        await bench.until(lambda: all(bench.faults(gpu)[-1] == "" for gpu in range(8)))
        await bench.rounds()
        assert bench.node.post(7, EventType.XID_CRITICAL, 48) == 1
    assert detail == "the driver is not open: nvmlInit_v2: driver not loaded (9)"
    assert opened(bench) == 1 + 8 + 1


# Links and boots


async def test_a_boot_is_reported_and_every_gpu_found_again():
    bench = Bench()
    await bench.monitor.open()
    first = bench.node.boot_id
    async with bench.running():
        await bench.rounds()
        await bench.vanish(3)
        bench.node.reboot()
        await bench.until(lambda: bench.boots and bench.faults(3)[-1] == "")
        assert bench.node.post(3, EventType.XID_CRITICAL, 48) == 1
        await bench.rounds(2)
    assert bench.boots == [bench.node.boot_id] != [first]
    assert opened(bench) == 2
    assert bench.good(but(3))


async def test_an_unknown_boot_is_reported_at_the_start():
    bench = Bench("h200", boot_id="the boot before")
    await bench.monitor.open()
    assert bench.boots == [bench.node.boot_id]
    async with bench.running():
        await bench.rounds(2)
    assert opened(bench) == 1
    assert len(bench.boots) == 1


# Fields that a GPU does not support


async def test_unsupported_fields_are_read_once_and_reported():
    async with Bench("t4-4").watching(rounds=0) as bench:
        await bench.rounds(2)
        learnt = bench.monitor.unsupported()
        asked = bench.driver.calls["remapped_rows"]
        await bench.rounds(3)
        assert bench.driver.calls["remapped_rows"] == asked
        assert bench.monitor.unsupported() == learnt
        bench.node.vanish(1)
        bench.node.bring_back(1)
        await bench.until(lambda: bench.driver.calls["open"] == 2)
        await bench.rounds(2)
        assert bench.driver.calls["remapped_rows"] > asked, "another driver may know more"
    assert set(learnt) == set(bench.uuids)
    assert all({"remap_pending", "remap_failure", "nvlinks", "recovery_action"} <= fields for fields in learnt.values())
    assert not any("temperature" in fields for fields in learnt.values())
    assert {sample.fault for gpu in but(1, *range(4, 8)) for sample in bench.samples(gpu)} == {""}


async def test_unsupported_fields_are_read_again_after_a_new_partition():
    async with Bench("a100-mig-mixed").watching() as bench:
        bench.node.partition(5, None)
        await bench.until(lambda: bench.samples(5)[-1].remap_pending is False)
        assert not bench.monitor.unsupported()[bench.uuids[5]] & {"remap_pending", "remap_failure"}
        bench.node.partition(5, ["7g.40gb"])
        await bench.until(lambda: bench.samples(5)[-1].remap_pending is None)
        bench.node.partition(5, None)
        await bench.until(lambda: bench.samples(5)[-1].remap_pending is False)


async def test_unsupported_fields_stay_known_while_a_gpu_is_out_of_reach():
    async with Bench("t4-4").watching(rounds=0) as bench:
        await bench.rounds(2)
        learnt = bench.monitor.unsupported()
        for watched in bench.monitor._roster.gpus:
            watched.reset()  # as where the driver is closed
        assert bench.monitor.unsupported() == learnt
        await bench.rounds(2)
        assert bench.monitor.unsupported() == learnt
