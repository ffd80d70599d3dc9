import logging
import threading

import pytest
from msgspec.structs import replace

from gpu_plugin.devices.node import Gpu, Link
from gpu_plugin.devices.nvml_h import EventType, Return
from gpu_plugin.health.observation import Fabric, Sample
from gpu_plugin.nvml.links import REPEATS
from gpu_plugin.nvml.port import Handle
from gpu_plugin.nvml.roster import Watched
from gpu_plugin.placement.topology import Topology
from gpu_plugin.simulation.driver import SimulatedDriver

from .monitored import LONG, Bench

PAIRS = 8 * 7 // 2
WHOLE = {(18, True)}
APART = {(0, False)}


def readings(bench, pairs=PAIRS):
    """How often the links between all GPUs were read."""
    return bench.driver.calls["common_ancestor"] / pairs


def nvlinks(node, uuid=""):
    return {(link.nvlinks, link.switched) for pair, link in node.links.items() if not uuid or uuid in pair}


def of(node, *uuids):
    return {pair: link for pair, link in node.links.items() if set(uuids) & {*pair}}


def without(node, *uuids):
    return {pair: link for pair, link in node.links.items() if not set(uuids) & {*pair}}


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "gpu_plugin.nvml.links"]


async def as_built(name):
    """The node as it is found where nothing is wrong."""
    bench = Bench(name)
    node = await bench.monitor.open()
    bench.monitor.close()
    return node


# When they are read


@pytest.mark.parametrize("name", ["hgx-h100", "dgx-a100", "dgx1-v100", "l40s-pcie-8"])
async def test_they_are_read_once_and_not_on_every_poll(name):
    bench = Bench(name)
    await bench.monitor.open()
    assert readings(bench) == 1
    async with bench.running():
        await bench.rounds(5)
        bench.node.post(0, EventType.XID_CRITICAL, 31)
        await bench.rounds(5)
    assert readings(bench) == 1
    assert len(bench.nodes) == 1


async def test_a_mesh_is_there_as_soon_as_the_gpus_have_joined_their_fabric():
    bench = Bench()
    for gpu in range(8):
        bench.node.change(gpu, fabric="in-progress")
    node = await bench.monitor.open()
    assert node.cliques == {}
    assert nvlinks(node) == APART
    async with bench.running():
        await bench.rounds(2)
        assert readings(bench) == 1
        for gpu in range(8):
            bench.node.change(gpu, fabric=None)
        await bench.rounds(2)
        assert nvlinks(bench.nodes[-1]) == WHOLE
        read = readings(bench)
        await bench.rounds(3)
        assert readings(bench) == read
    assert bench.nodes[-1] == await as_built("hgx-h100")


async def test_a_gpu_that_falls_out_of_its_fabric_leaves_the_mesh_and_the_others_keep_theirs():
    bench = Bench()
    node = await bench.monitor.open()
    three = bench.uuids[3]
    async with bench.running():
        await bench.rounds()
        bench.node.change(3, fabric="in-progress")
        await bench.until(lambda: len(bench.nodes) == 2)
        bench.node.reset(3)
        await bench.until(lambda: len(bench.nodes) == 3)
        await bench.rounds(2)
    _, fallen, back = bench.nodes
    assert set(fallen.cliques) == {*bench.uuids} - {three}
    assert nvlinks(fallen, three) == APART
    assert without(fallen, three) == without(node, three)
    assert back == node


@pytest.mark.parametrize("fabric", ["limited", "unhealthy"])
async def test_how_sound_a_fabric_is_changes_no_link(fabric):
    async with Bench().watching() as bench:
        bench.node.change(3, fabric=fabric)
        await bench.until(lambda: bench.samples(3)[-1].fabric.summary in (2, 3))
        await bench.rounds(3)
    assert readings(bench) == 1
    assert len(bench.nodes) == 1


async def test_a_link_to_a_switch_that_dies_is_one_less_to_every_other_gpu():
    async with Bench().watching() as bench:
        node = bench.nodes[0]
        bench.node.change(2, links_down=(5,))
        await bench.until(lambda: len(bench.nodes) == 2)
        await bench.rounds(2)
        assert readings(bench) == 2
    assert nvlinks(bench.nodes[-1], bench.uuids[2]) == {(17, True)}
    assert without(bench.nodes[-1], bench.uuids[2]) == without(node, bench.uuids[2])


async def test_links_are_read_again_after_the_driver_was_opened_again():
    async with Bench().watching() as bench:
        await bench.monitor.release(None)
        for gpu in range(8):
            bench.node.change(gpu, fabric="in-progress")
        await bench.monitor.resume(None)
        await bench.until_turned(lambda: nvlinks(bench.monitor.node) == APART)
        for gpu in range(8):
            bench.node.change(gpu, fabric=None)
        await bench.until_turned(lambda: nvlinks(bench.monitor.node) == WHOLE)
    assert len(bench.monitor.node.cliques) == 8


FABRIC = Fabric(3, 0, 0x1AA, 1, "ab" * 16, 7)
SEEN = Sample(nvlinks=(True, False), fabric=FABRIC)


@pytest.mark.parametrize(
    ("later", "news"),
    [
        (SEEN, False),
        (Sample(), False),
        (replace(SEEN, nvlinks=None), False),
        (replace(SEEN, fabric=None), False),
        (replace(SEEN, fabric=replace(FABRIC, health_mask=0x19A, summary=2)), False),
        (replace(SEEN, nvlinks=(True, True)), True),
        (replace(SEEN, fabric=replace(FABRIC, state=2)), True),
        (replace(SEEN, fabric=replace(FABRIC, status=1)), True),
        (replace(SEEN, fabric=replace(FABRIC, cluster="cd" * 16)), True),
        (replace(SEEN, fabric=replace(FABRIC, clique=8)), True),
    ],
)
def test_changes_of_links_and_of_the_fabric_make_links_read_again(later, news):
    watched = Watched(Gpu("GPU-a", 0), Handle(1))
    assert watched.links_changed(SEEN)
    assert watched.links_changed(later) is news
    assert watched.links_changed(later) is False


def test_a_new_description_makes_links_read_again():
    watched = Watched(Gpu("GPU-a", 0), Handle(1))
    watched.links_changed(SEEN)
    watched.update_description(Handle(2), watched.gpu)
    assert watched.links_changed(SEEN), "the links may have been read in between, while the fabric was another"
    assert not Watched(Gpu("GPU-a", 0), Handle(1)).links_changed(Sample()), "a part without NVLinks never has news"


# GPUs that are out of reach


async def test_a_lost_gpu_changes_nothing_for_the_others():
    async with Bench().watching() as bench:
        node = bench.nodes[0]
        await bench.lose(7)
        bench.node.change(0, links_down=(0,))
        await bench.until(lambda: len(bench.nodes) == 2)
        await bench.rounds(2, range(7))
    found = bench.nodes[-1]
    seven, zero = bench.uuids[7], bench.uuids[0]
    assert without(found, seven, zero) == without(node, seven, zero)
    assert of(found, seven) == of(node, seven), "what was known of it still holds"
    assert found.cliques == node.cliques
    asked = sum(bench.driver.calls.values())
    topology = Topology.of(found)
    assert {topology.scores[one][other] for one in range(1, 7) for other in range(1, one)} == {1810, 1820}
    assert sum(bench.driver.calls.values()) == asked, "who places pods asks no driver"


async def test_a_gpu_lost_during_a_reading_keeps_its_known_links():
    bench = Bench("dgx1-v100")
    node = await bench.monitor.open()
    five, zero = bench.uuids[5], bench.uuids[0]
    async with bench.running():
        await bench.rounds()
        bench.node.refuse("nvlink_remote_bus_id", Return.GPU_IS_LOST, gpu=5, times=1)
        bench.node.change(0, links_down=(0,))
        await bench.until(lambda: len(bench.nodes) == 2)
        await bench.rounds(2)
        assert readings(bench) == 1 + 21 / PAIRS, "it answers, so there is nothing to wait for"
    assert of(bench.nodes[-1], five) == of(node, five)
    assert without(bench.nodes[-1], five, zero) == without(node, five, zero)


async def test_a_gpu_lost_while_it_is_read_for_the_first_time_is_read_once_it_is_back():
    bench = Bench("dgx1-v100")
    bench.node.refuse("nvlink_remote_bus_id", Return.GPU_IS_LOST, gpu=5, times=1)
    node = await bench.monitor.open()
    assert len(node.links) == 21
    assert node.link(bench.uuids[5], bench.uuids[1]) == Link()
    async with bench.running():
        await bench.lose(5)
        await bench.rounds(2)
        assert bench.driver.calls["common_ancestor"] == 21
        bench.node.change(5, lost=False)
        await bench.until_turned(lambda: len(bench.monitor.node.links) == PAIRS)
        await bench.rounds(2)
        assert bench.driver.calls["common_ancestor"] == 21 + PAIRS
    assert bench.monitor.node == await as_built("dgx1-v100")


async def test_gpus_that_were_out_of_reach_at_a_reading_are_read_when_they_answer():
    bench = Bench("dgx1-v100", timeout=0.3)
    bench.node.lose(3)
    await bench.monitor.open()
    three, six = bench.uuids[3], bench.uuids[6]
    async with bench.running():
        await bench.hang(6)
        bench.node.heal(3)
        await bench.until(lambda: len(bench.nodes) == 2)
        assert (three, six) not in bench.nodes[1].links
        assert (six, three) not in bench.nodes[1].links
        bench.node.change(6, hung_until=None)
        await bench.until_turned(lambda: len(bench.monitor.node.links) == PAIRS)
    assert bench.monitor.node.links == (await as_built("dgx1-v100")).links


@pytest.mark.parametrize("how", ["hang", "release"])
async def test_a_gpu_that_was_not_asked_stays_in_its_mesh(how):
    bench = Bench(timeout=0.3)
    node = await bench.monitor.open()
    three = bench.uuids[3]
    async with bench.running():
        await bench.rounds()
        if how == "hang":
            await bench.hang(3)
        else:
            await bench.monitor.release(frozenset({three}))
        bench.node.change(0, links_down=(0,))
        await bench.until_turned(lambda: nvlinks(bench.monitor.node, bench.uuids[0]) == {(17, True), (18, True)})
        bench.node.change(3, hung_until=None)
    assert bench.monitor.node.cliques == node.cliques
    assert of(bench.monitor.node, three) == of(node, three)


async def test_a_slow_reading_is_repeated_if_links_changed_during_it():
    entered, free = threading.Event(), threading.Event()

    class Slow(SimulatedDriver):
        def common_ancestor(self, one, other):
            if self.slow:
                entered.set()
                free.wait(LONG)
            return super().common_ancestor(one, other)

        slow = False

    async with Bench("dgx1-v100", timeout=0.1, driver=Slow).watching(rounds=0) as bench:
        bench.driver.slow = True
        bench.node.change(0, links_down=(0,))
        await bench.until_turned(entered.is_set)
        bench.node.change(0, links_down=(0, 1))
        await bench.turned(2)
        free.set()
        bench.driver.slow = False
        wanted = sum(link.nvlinks for link in bench.nodes[0].links.values()) - 2
        await bench.until_turned(lambda: sum(link.nvlinks for link in bench.monitor.node.links.values()) == wanted)


# Refusals for the moment


async def test_a_refused_reading_is_repeated_and_logged_once(caplog):
    bench = Bench("dgx1-v100")
    bench.node.refuse("common_ancestor", Return.UNKNOWN, times=3)
    async with bench.watching(rounds=0):
        await bench.rounds(5)
    assert readings(bench) == 2
    (line,) = said(caplog)
    assert "3 pairs of GPUs" in line
    assert bench.monitor.node == await as_built("dgx1-v100")


async def test_a_reading_that_is_always_refused_is_repeated_a_few_times_and_logged_once(caplog):
    bench = Bench("dgx1-v100")
    bench.node.refuse("common_ancestor", Return.UNKNOWN)
    async with bench.watching(rounds=0):
        await bench.rounds(REPEATS + 3)
        assert readings(bench) == 1 + REPEATS
        bench.node.change(0, links_down=(0,))
        await bench.until(lambda: len(bench.nodes) == 2)
        await bench.rounds(REPEATS + 3)
    assert readings(bench) == 2 + REPEATS
    assert len(said(caplog)) == 1


async def test_a_reading_that_fails_keeps_the_known_links(caplog):
    class Odd(SimulatedDriver):
        odd = False

        def common_ancestor(self, one, other):
            if self.odd:
                raise RuntimeError("odd")
            return super().common_ancestor(one, other)

    async with Bench("dgx1-v100", driver=Odd).watching() as bench:
        node = bench.nodes[0]
        bench.driver.odd = True
        bench.node.change(0, links_down=(0,))
        await bench.until_turned(lambda: said(caplog) != [])
        await bench.rounds(2)
    assert bench.monitor.node == node
    assert [record.levelno for record in caplog.records if record.name == "gpu_plugin.nvml.links"] == [logging.ERROR]
