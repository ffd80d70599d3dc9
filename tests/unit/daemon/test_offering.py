"""Offers and their publication. Offers of large nodes are prepared on a thread."""

import gc
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec
import pytest

from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import SettingsStore
from gpu_plugin.config.sharing import NamePattern
from gpu_plugin.containers.cdi.readiness import CdiReadiness
from gpu_plugin.daemon import offering as offering_module
from gpu_plugin.daemon.offering import MAX_JUDGEMENTS, Offering
from gpu_plugin.devices import recent_allocations as given_module
from gpu_plugin.devices import retirement
from gpu_plugin.devices.device import Resource
from gpu_plugin.devices.node import Gpu, Link, Node
from gpu_plugin.health.latch import Health
from gpu_plugin.kubelet import checkpoint, listing, pod_resources
from gpu_plugin.kubelet import inventory as inventory_module
from gpu_plugin.kubelet.holders import Holders
from gpu_plugin.kubelet.holding import History, Holding, KubeletReadings, weigh
from gpu_plugin.kubelet.inventory import Inventory
from gpu_plugin.kubelet.offer import offer
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.kubelet.snapshot import SnapshotStore
from gpu_plugin.placement.subsets import IMMEDIATE_GPUS, Placement, Subsets
from tests.unit.daemon.calling_pulse import CallingPulse

GPU = "nvidia.com/gpu"

pytestmark = pytest.mark.anyio


@pytest.fixture
def settings(short_path):
    return resolve(
        {"device_plugin_dir": str(short_path), "pod_resources_socket": f"{short_path}/pod-resources.sock"}, {}
    )


def node(count: int, *bridged: tuple[int, int]) -> Node:
    gpus = tuple(Gpu(f"GPU-{at:02}", at) for at in range(count))
    return Node(gpus, {(gpus[one].uuid, gpus[other].uuid): Link(2) for one, other in bridged})


class Served:
    """A running offering, with the placements that it published."""

    def __init__(self, settings) -> None:
        self.settings = settings
        self.published: list[Placement] = []
        self.inventory = Inventory(SnapshotStore(), lambda _gpu, _visible: Health())
        self.unheard: set[str] = set()
        self.offering = Offering(
            self.inventory, SettingsStore(settings), CallingPulse(self._note), cast("Registrations", self)
        )

    def heard(self, resource: str) -> bool:
        return resource not in self.unheard

    def _note(self) -> None:
        self.published.append(self.view.placement)

    def take(self, probed: Node, **changes) -> None:
        before = self.inventory.offer.placement
        self.offering.publish(offer(probed, msgspec.structs.replace(self.settings, **changes), "/", before))

    @property
    def view(self):
        return self.inventory.store.current.resources[GPU]

    async def until(self, expected) -> None:
        with anyio.fail_after(10):
            while not expected():
                await self.inventory.store.changed.wait(0.05)


@asynccontextmanager
async def serving(settings):
    served = Served(settings)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(served.offering.settle)
        yield served
        tasks.cancel_scope.cancel()


def linked(served, one: int, other: int):
    return lambda: (
        GPU in served.inventory.store.current.resources and served.view.placement.topology.scores[one][other] > 100
    )


@pytest.mark.parametrize("count", [2, IMMEDIATE_GPUS, IMMEDIATE_GPUS + 1, 16, 20])
async def test_a_published_placement_is_ready_for_every_size_of_node(settings, count):
    async with serving(settings) as served:
        served.take(node(count, (0, 1)))
        await served.until(linked(served, 0, 1))
        assert served.view.placement.ready
        assert (served.view.placement.subsets is None) is (count > 16)
        assert len(served.view.resource.devices) == count


@pytest.mark.parametrize("count", [1, 3, 12])
async def test_a_change_of_many_resources_is_one_line_with_details_at_debug(settings, caplog, count):
    caplog.set_level("DEBUG")
    gpus = [Gpu(f"GPU-{at:02}", at, model=f"M{at:02}", unreadable="lost") for at in range(count)]
    names = tuple(NamePattern(gpu.model, f"nvidia.com/gpu.{gpu.model}") for gpu in gpus[1:])
    async with serving(settings) as served:
        served.take(Node(tuple(gpus)), gpu_names=names)
        with anyio.fail_after(10):
            while len(served.inventory.store.current.resources) < count:
                await served.inventory.store.changed.wait(0.05)
    said = [record for record in caplog.records if GPU in record.getMessage()]
    lists = [record for record in said if "Unhealthy" in record.getMessage()]
    withheld = [record for record in said if "is withheld" in record.getMessage()]
    for records in (lists, withheld):
        assert len([record for record in records if record.levelname != "DEBUG"]) == 1
        everything = "".join(record.getMessage() for record in records)
        assert all(f"{name}: " in everything for name in (GPU, *(pattern.name for pattern in names)))


async def test_the_placement_is_kept_if_no_link_changes(settings):
    async with serving(settings) as served:
        served.take(node(12, (0, 1)))
        await served.until(linked(served, 0, 1))
        before, version = served.view.placement, served.inventory.store.current.version
        served.take(node(12, (0, 1)))
        assert served.inventory.store.current.version == version
        served.take(node(12, (0, 1)), shared_devices_allocation_policy="packed")
        assert served.view.policy == "packed"  # at once
        assert served.view.placement is before
        served.take(node(12, (0, 2)))
        assert served.view.placement is before  # the former placement is used until the new placement is ready
        await served.until(linked(served, 0, 2))
        assert served.view.placement.ready
        assert served.view.placement is not before


async def test_offers_during_a_preparation_share_its_work_and_the_last_offer_wins(settings, monkeypatch):
    made, going, judged = [], threading.Event(), threading.Event()
    original = Placement.of

    def slow(topology):
        made.append(topology)
        judged.set()
        going.wait(10)
        return original(topology)

    monkeypatch.setattr(Placement, "of", slow)
    async with serving(settings) as served:
        served.take(node(12, (0, 1)))
        await anyio.to_thread.run_sync(judged.wait)
        for policy in ("packed", "spread"):
            served.take(node(12, (0, 1)), shared_devices_allocation_policy=policy)
        going.set()
        await served.until(linked(served, 0, 1))
        assert (served.view.policy, len(made)) == ("spread", 1)


async def test_links_that_change_during_a_judgement_are_judged_again(settings, monkeypatch):
    going, judged = threading.Event(), threading.Event()
    original = Placement.of

    def slow(topology):
        judged.set()
        going.wait(10)
        return original(topology)

    monkeypatch.setattr(Placement, "of", slow)
    async with serving(settings) as served:
        served.take(node(12, (0, 1)))
        await anyio.to_thread.run_sync(judged.wait)
        served.take(node(12, (2, 3)))
        going.set()
        await served.until(linked(served, 2, 3))
        assert not linked(served, 0, 1)()
        assert len(served.published) == 1


async def test_links_that_always_change_delay_no_offer(settings, monkeypatch):
    judged, original = [], Placement.of

    def flapping(topology):
        judged.append(topology)
        if len(judged) < 7:
            anyio.from_thread.run_sync(served.take, node(12, (0, len(judged) + 1)))
        return original(topology)

    monkeypatch.setattr(Placement, "of", flapping)
    async with serving(settings) as served:
        served.take(node(12, (0, 1)))
        await served.until(lambda: linked(served, 0, 7)() and served.view.placement.ready)
    assert len(judged) == 7
    assert [judged.index(each.topology) for each in served.published] == [MAX_JUDGEMENTS, 2 * MAX_JUDGEMENTS, 6, 6]
    assert [each.ready for each in served.published] == [False, False, False, True]


async def test_links_that_change_during_a_query_for_holders_get_a_ready_placement(settings, monkeypatch):
    asked, answer = anyio.Event(), anyio.Event()

    async def slow(_holders, _socket, _retired):
        asked.set()
        await answer.wait()
        return Holding(frozenset())

    monkeypatch.setattr(Holders, "ask", slow)
    async with serving(settings) as served:
        served.take(node(12, (0, 1)))
        await asked.wait()
        served.take(node(12, (2, 3)))
        answer.set()
        await served.until(lambda: linked(served, 2, 3)() and served.view.placement.ready)
        assert not linked(served, 0, 1)()


async def test_links_are_judged_after_a_failed_judgement(settings, monkeypatch):
    original = Placement.of

    def broken_once(topology):
        if topology.scores[0][1] > 100:
            anyio.from_thread.run_sync(served.take, node(12, (0, 2)))
            raise MemoryError
        return original(topology)

    monkeypatch.setattr(Placement, "of", broken_once)
    async with serving(settings) as served:
        served.take(node(12, (0, 1)))
        await served.until(lambda: linked(served, 0, 2)() and served.view.placement.ready)


async def test_gpus_are_served_if_the_judgement_of_their_sets_fails(settings, monkeypatch, caplog):
    def broken(_topology):
        raise MemoryError

    monkeypatch.setattr(Subsets, "of", broken)
    async with serving(settings) as served:
        served.take(node(12, (0, 1)))
        await served.until(linked(served, 0, 1))
        assert not served.view.placement.ready
        assert len(served.view.resource.devices) == 12
        await anyio.wait_all_tasks_blocked()
        assert caplog.text.count("judging sets of GPUs failed") == 1
        assert not anyio.to_thread.current_default_thread_limiter().borrowed_tokens
        served.take(node(12, (0, 1)), shared_devices_allocation_policy="packed")
        await served.until(lambda: served.view.policy == "packed")
    assert caplog.text.count("judging sets of GPUs failed") == 2  # tried again with the next offer, and not before
    assert "judging sets of GPUs failed; pods get good ones, which may not be the best" in caplog.text


async def test_a_missing_device_node_is_logged_once(settings, caplog):
    async with serving(settings) as served:
        served.take(node(1), gds_enabled=True)
        await served.until(lambda: GPU in served.inventory.store.current.resources)
        served.take(node(2), gds_enabled=True)
        await served.until(lambda: len(served.view.resource.devices) == 2)
    assert caplog.text.count("--gds-enabled is set and there is no device node") == 1


@pytest.mark.parametrize("known", [True, False])
async def test_a_live_change_to_cdi_names_waits_a_limited_time_for_specifications(settings, monkeypatch, known):
    monkeypatch.setattr(offering_module, "SPECS_PATIENCE", 60.0 if known else 0.05)
    async with serving(settings) as served:
        served.take(node(2))
        await served.until(lambda: served.inventory.store.current.version)
        served.take(node(2), device_list_strategy=("cdi-cri",))
        if known:
            await anyio.wait_all_tasks_blocked()
            assert served.view.access.strategies == ("envvar",)
            assert all(device.healthy for device in served.view.resource.devices)
            served.inventory.cdi_changed(CdiReadiness({"GPU-00": frozenset(), "GPU-01": frozenset()}, ""))
        await served.until(lambda: served.view.access.by_cdi)
        assert [device.healthy for device in served.view.resource.devices] == [known, known]


def holding(monkeypatch, *answers):
    """Set the answers about devices that pods hold, query by query. The last answer is repeated."""
    left = list(answers)

    async def ask(_holders, _socket, _retired):
        return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(Holders, "ask", ask)


async def test_a_device_held_only_by_the_checkpoint_makes_one_resend(settings, monkeypatch):
    key = (GPU, "GPU-00")
    holding(monkeypatch, Holding(frozenset()), Holding(frozenset({key}), written=frozenset({key})))
    monkeypatch.setattr(offering_module, "HOLDERS_POLL", 0.01)
    async with serving(settings) as served:
        served.take(node(2))
        await served.until(lambda: GPU in served.inventory.store.current.resources)
        assert served.inventory.store.resends(GPU) == 0
        served.unheard = {GPU, "nvidia.com/x"}
        served.take(node(1), gpu_names=(NamePattern("*", "nvidia.com/x"),))
        await anyio.sleep(0.05)
        assert served.inventory.store.resends(GPU) == 0
        served.unheard = {"nvidia.com/x"}
        await served.until(lambda: served.inventory.store.resends(GPU) == 1)
        await anyio.sleep(0.05)
        assert served.inventory.store.resends(GPU) == 1  # not at every question


async def test_the_first_offer_waits_for_the_devices_of_pods(settings, monkeypatch):
    uuid = "GPU-00000000-0000-0000-0000-000000000000"
    foreign = frozenset({("example.com/gpu", uuid)})
    holding(monkeypatch, Holding(foreign, foreign, writing=1), Holding())
    probed = Node((Gpu(uuid, 0), Gpu("GPU-01", 1)))
    async with serving(settings) as served:
        served.inventory.remember([Resource(GPU, offer(probed, settings, "/").plan.resources[0].devices)])
        served.take(probed)
        assert served.inventory.unpublished
        await served.until(lambda: not served.inventory.unpublished)
        assert [device.healthy for device in served.view.resource.devices] == [False, True]
        served.take(probed)  # published at once, without a query
        assert [device.healthy for device in served.view.resource.devices] == [False, True]


async def test_an_answer_older_than_a_retirement_frees_nothing(settings, monkeypatch):
    asked: list[set[tuple[str, str]]] = []
    going, nothing = anyio.Event(), Holding(frozenset(), writing=1)
    renamed = {"gpu_names": (NamePattern("*", "nvidia.com/x"),)}

    async def ask(_holders, _socket, retired):
        asked.append(set(retired))
        if len(asked) == 2:
            served.take(node(1), **renamed)  # while it is under way
        elif len(asked) == 3:
            await going.wait()
        return nothing

    monkeypatch.setattr(Holders, "ask", ask)
    monkeypatch.setattr(offering_module, "HOLDERS_CHECK", 0.01)
    monkeypatch.setattr(offering_module, "HOLDERS_POLL", 0.01)
    async with serving(settings) as served:
        served.take(node(1))
        await served.until(lambda: len(asked) == 3)
        new = served.inventory.store.current.resources["nvidia.com/x"].resource.devices
        assert [device.healthy for device in new] == [False]
        assert asked[2] == {(GPU, "GPU-00")}
        going.set()
        await served.until(lambda: served.inventory.store.current.resources["nvidia.com/x"].resource.devices[0].healthy)


async def test_a_device_allocated_during_a_query_is_not_confirmed_by_its_answer(settings, monkeypatch):
    key = (GPU, "GPU-00")
    asked: list[None] = []

    async def ask(_holders, _socket, _retired):
        asked.append(None)
        await anyio.sleep(0.002)
        if len(asked) == 2:
            served.inventory.store.recent.note(GPU, ["GPU-00"], anyio.current_time())
        return Holding(frozenset({key}), frozenset({key}) if len(asked) == 2 else frozenset(), writing=1)

    monkeypatch.setattr(Holders, "ask", ask)
    monkeypatch.setattr(offering_module, "HOLDERS_CHECK", 0.01)
    async with serving(settings) as served:
        recent = served.inventory.store.recent
        served.take(node(1))
        await served.until(lambda: len(asked) >= 4)
        assert recent.unconfirmed([key]) == {key}


async def test_capacity_that_waits_for_pod_resources_is_logged_once(settings, monkeypatch, caplog):
    allocated = frozenset({(GPU, "GPU-00")})
    questions: list[None] = []

    async def ask(_holders, _socket, _retired):
        questions.append(None)
        first = len(questions) == 1
        return (
            Holding(frozenset(), writing=1, answered=True)
            if first
            else Holding(allocated, written=allocated, writing=1)
        )

    monkeypatch.setattr(Holders, "ask", ask)
    monkeypatch.setattr(offering_module, "HOLDERS_POLL", 0.002)
    async with serving(settings) as served:
        served.take(node(1))
        await served.until(lambda: GPU in served.inventory.store.current.resources)
        served.take(node(1), gpu_names=(NamePattern("*", "nvidia.com/x"),))
        await served.until(lambda: len(questions) > 8)
    assert sum("without PodResources" in record.getMessage() for record in caplog.records) == 1


RENAMED = {"gpu_names": (NamePattern("*", "nvidia.com/x"),)}


async def test_without_a_checkpoint_devices_retired_by_the_offer_stay_withheld(settings):
    served = Served(settings)
    served.offering._apply(offer(node(1), settings, "/"), Holding(), 0.0)
    silent, _ = weigh(History(), KubeletReadings((0, 0, 1), frozenset()), {})
    served.offering._apply(offer(node(1), msgspec.structs.replace(settings, **RENAMED), "/"), silent, 1.0)
    [device] = served.inventory.store.current.resources["nvidia.com/x"].resource.devices
    assert device.reason == "a pod may still hold its hardware as GPU-00"


async def test_an_allocated_device_without_a_record_makes_one_resend(settings, monkeypatch):
    holding(monkeypatch, Holding(frozenset(), writing=1))
    monkeypatch.setattr(offering_module, "HOLDERS_POLL", 0.01)
    monkeypatch.setattr(given_module, "ENTERED", 0.01)
    async with serving(settings) as served:
        served.take(node(1))
        await served.until(lambda: GPU in served.inventory.store.current.resources)
        served.inventory.store.recent.note(GPU, ["GPU-00"], anyio.current_time())
        served.take(node(1), **RENAMED)
        await served.until(lambda: served.inventory.store.resends(GPU) == 1)


async def test_one_resend_serves_held_and_recently_allocated_devices(settings, monkeypatch):
    kept = (GPU, "GPU-00")
    holding(
        monkeypatch, Holding(frozenset(), writing=1), Holding(frozenset({kept}), written=frozenset({kept}), writing=1)
    )
    monkeypatch.setattr(offering_module, "HOLDERS_POLL", 0.01)
    monkeypatch.setattr(given_module, "ENTERED", 0.5)
    async with serving(settings) as served:
        served.take(node(2))
        await served.until(lambda: GPU in served.inventory.store.current.resources)
        given = anyio.current_time()
        served.inventory.store.recent.note(GPU, ["GPU-01"], given)
        served.take(node(2), **RENAMED)
        await served.until(lambda: served.inventory.store.resends(GPU) == 1)
        assert anyio.current_time() - given >= 0.5


class Witnesses:
    """The kubelet's data, read by the real `Holders`. `reads` has the healthy devices at each read."""

    def __init__(self, monkeypatch) -> None:
        self.listed: frozenset[tuple[str, str]] = frozenset()
        self.written: dict[tuple[str, str], frozenset[str]] = {}
        self.failing: Exception | None = None
        self.inventory: Inventory | None = None
        self.reads: list[list[str]] = []
        monkeypatch.setattr(checkpoint, "read", self._read)
        monkeypatch.setattr(pod_resources, "allocated", self._held)

    def _read(self, _directory):
        views = () if self.inventory is None else self.inventory.store.current.resources.values()
        self.reads.append([device.id for view in views for device in view.resource.devices if device.healthy])
        if self.failing is not None:
            raise self.failing
        return self.written, (len(self.written), 0, 0, 0)

    async def _held(self, _socket, _patience):
        await anyio.sleep(0.001)
        return self.listed


HELD = "GPU-00000000-0000-0000-0000-000000000000"


async def test_foreign_held_hardware_is_not_offered_while_the_checkpoint_is_unreadable(settings, monkeypatch, caplog):
    said = Witnesses(monkeypatch)
    said.written = {
        ("example.com/gpu", HELD): frozenset({"pod"})
    }  # a plain init container's: PodResources never lists it
    monkeypatch.setattr(offering_module, "HOLDERS_POLL", 0.005)
    async with serving(settings) as served:
        said.inventory = served.inventory
        served.take(Node((Gpu(HELD, 0),)))
        await served.until(lambda: len(said.reads) > 4)
        said.failing = checkpoint.CheckpointError("Input/output error")
        said.reads.clear()
        await served.until(lambda: len(said.reads) > 20)
        said.failing = None
        await served.until(lambda: len(said.reads) > 24)
        assert not any(said.reads)
        said.written = {}
        await served.until(lambda: served.view.resource.devices[0].healthy)
    lines = [record.getMessage() for record in caplog.records if "checkpoint" in record.getMessage()]
    assert len(lines) == 1
    assert (
        f"checkpoint {settings.socket_dir}/kubelet_internal_checkpoint cannot be read: Input/output error." in lines[0]
    )


@pytest.mark.parametrize("listed", [False, True])
async def test_a_missing_checkpoint_is_logged_if_capacity_waits_for_it(settings, monkeypatch, caplog, listed):
    said = Witnesses(monkeypatch)
    said.failing = checkpoint.NoCheckpointError("No such file or directory")
    said.listed = frozenset({(GPU, "GPU-00")} if listed else ())  # a device that a pod holds waits for the pod
    monkeypatch.setattr(offering_module, "HOLDERS_POLL", 0.005)
    async with serving(settings) as served:
        served.take(node(1))
        await served.until(lambda: GPU in served.inventory.store.current.resources)
        served.take(node(1), **RENAMED)
        said.reads.clear()
        await served.until(lambda: len(said.reads) > 12)
    assert ("cannot be read: No such file or directory" in caplog.text) is not listed
    assert "without PodResources" not in caplog.text


@pytest.mark.parametrize(("patience", "withheld"), [(60, True), (0.0, False)])
async def test_the_first_offer_waits_a_limited_time_for_an_unreadable_checkpoint(
    settings, monkeypatch, patience, withheld
):
    said = Witnesses(monkeypatch)
    said.written = {("example.com/gpu", HELD): frozenset({"pod"})}
    said.failing = checkpoint.CheckpointError("Input/output error")
    monkeypatch.setattr(offering_module, "HOLDERS_SOON", 0.005)
    monkeypatch.setattr(offering_module, "FIRST_PATIENCE", patience)
    async with serving(settings) as served:
        said.inventory = served.inventory
        served.take(Node((Gpu(HELD, 0),)))
        await served.until(lambda: len(said.reads) > 4 or GPU in served.inventory.store.current.resources)
        said.failing = None
        await served.until(lambda: GPU in served.inventory.store.current.resources)
        assert served.view.resource.devices[0].healthy is not withheld


async def test_held_devices_without_a_list_appear_at_the_periodic_query(settings, monkeypatch):
    uuid = "GPU-00000000-0000-0000-0000-000000000000"
    key = (GPU, uuid)
    nothing = Holding(frozenset())
    holding(monkeypatch, nothing, nothing, nothing, Holding(frozenset({key}), frozenset({key})))
    monkeypatch.setattr(offering_module, "HOLDERS_CHECK", 0.02)
    async with serving(settings) as served:
        served.take(node(2))
        await served.until(lambda: GPU in served.inventory.store.current.resources)
        await served.until(lambda: uuid in [device.id for device in served.view.resource.devices])
        assert not served.view.device(uuid).healthy
    assert offering_module.HOLDERS_CHECK <= 30


@pytest.mark.parametrize("times", [0, 1, MAX_JUDGEMENTS])
async def test_many_devices_are_judged_on_a_thread_with_their_newest_health(settings, monkeypatch, times):
    """`times` is the number of health changes while the devices are judged."""
    holding(monkeypatch, Holding(frozenset(), writing=1))
    monkeypatch.setattr(offering_module, "HOLDERS_POLL", 0.01)
    monkeypatch.setattr(offering_module, "OFF_LOOP_DEVICES", 1)
    monkeypatch.setattr(Served, "_note", lambda _: None)
    monkeypatch.setattr(listing, "WITHDRAW", 0.0)
    monkeypatch.setattr(retirement, "SETTLE", 0.0)
    loops, sick, threads = threading.current_thread(), [], []  # type: ignore[var-annotated]

    def change() -> None:
        sick.append(f"Xid {len(sick)}")
        served.inventory.health_changed("GPU-00")

    def disturbed(standing):
        thread = threading.current_thread()
        if len(sick) < times and thread is not loops:
            anyio.from_thread.run_sync(change)
        threads.append(thread is loops)
        return listing.judge(standing)

    async with serving(settings) as served:
        monkeypatch.setattr(
            served.inventory, "_health", lambda gpu, _: Health(reason=sick[-1] if sick and gpu == "GPU-00" else "")
        )
        served.take(node(2))
        await served.until(lambda: GPU in served.inventory.store.current.resources)
        monkeypatch.setattr(offering_module, "judge", disturbed)
        monkeypatch.setattr(inventory_module, "judge", disturbed)
        served.take(node(2), gpu_names=(NamePattern("*", "nvidia.com/x"),))
        await served.until(lambda: set(served.inventory.store.current.resources) == {"nvidia.com/x"})
        devices = served.inventory.store.current.resources["nvidia.com/x"].resource.devices
        assert [device.reason for device in devices] == [sick[-1] if sick else "", ""]
    assert (True in threads) is (times >= MAX_JUDGEMENTS)
    assert len(sick) == times
    assert gc.isenabled()


async def test_changes_during_the_judgement_of_a_new_offer_are_applied(settings, monkeypatch):
    """GPU-01 is in no list yet when its health changes, and a newer offer replaces the first one before it is published."""
    holding(monkeypatch, Holding(frozenset(), writing=1))
    monkeypatch.setattr(offering_module, "OFF_LOOP_DEVICES", 1)
    sick: list[str] = []
    names: list[set[str]] = []

    def changed() -> None:
        sick.append("Xid 79")
        served.inventory.health_changed("GPU-01")

    def newer() -> None:
        served.take(node(2), gpu_names=(NamePattern("*", "nvidia.com/newest"),))

    def newest_is_served() -> bool:
        names.append(set(served.inventory.store.current.resources))
        return "nvidia.com/newest" in names[-1]

    def disturbed(standing):
        if disturbances:
            anyio.from_thread.run_sync(disturbances.pop(0))
        return listing.judge(standing)

    async with serving(settings) as served:
        monkeypatch.setattr(
            served.inventory, "_health", lambda gpu, _: Health(reason=sick[-1] if sick and gpu == "GPU-01" else "")
        )
        served.take(node(1))
        await served.until(lambda: GPU in served.inventory.store.current.resources)
        disturbances = [changed]
        monkeypatch.setattr(offering_module, "judge", disturbed)
        served.take(node(2))
        await served.until(lambda: len(served.view.resource.devices) == 2)
        assert [device.reason for device in served.view.resource.devices] == ["", "Xid 79"]
        disturbances.append(newer)
        served.take(node(2), gpu_names=(NamePattern("*", "nvidia.com/older"),))
        await served.until(newest_is_served)
        assert not any("nvidia.com/older" in seen for seen in names)


def test_the_next_query_is_scheduled_after_all_awaited_times(settings):
    """A slow answer may arrive after the time at which the next query is useful."""
    served = Served(settings)
    served.inventory.apply(offer(node(2), settings, "/"), frozenset(), 0)
    served.inventory.apply(offer(node(1), settings, "/"), frozenset(), 0)
    served.inventory.store.recent.note(GPU, ["GPU-01"], 0)
    assert served.inventory.leaving
    assert served.offering._pause(100.0) == offering_module.HOLDERS_POLL


def test_without_pod_resources_the_remedy_is_logged_once(settings, caplog):
    served = Served(settings)
    for _ in range(2 * offering_module.UNANSWERED_LIMIT):
        served.offering._log_long_waits(Holding(frozenset({(GPU, "GPU-00")}), writing=1), {(GPU, "GPU-00")})
    (said,) = caplog.messages
    assert settings.effective_pod_resources_socket in said
    assert str(Path(settings.socket_dir) / checkpoint.NAME) in said


async def test_devices_without_room_in_a_list_are_offered_after_former_devices_left(settings, monkeypatch, caplog):
    monkeypatch.setattr(listing, "MAX_LIST_BYTES", 200)  # of nine devices
    monkeypatch.setattr(retirement, "SETTLE", 0.0)
    monkeypatch.setattr(offering_module, "HOLDERS_POLL", 0.01)
    formers = Node(tuple(Gpu(f"GPU-{at:02}", at) for at in range(6)))
    others = Node(tuple(Gpu(f"GPU-{at:02}", at) for at in range(10, 16)))
    going = anyio.Event()

    async def ask(_holders, _socket, _retired):
        await going.wait()
        return Holding(frozenset(), writing=1, answered=True)

    async with serving(settings) as served:
        served.take(formers)
        await served.until(lambda: GPU in served.inventory.store.current.resources)
        monkeypatch.setattr(Holders, "ask", ask)
        served.take(others)
        assert {device.id for device in served.view.resource.devices} > {gpu.uuid for gpu in formers.gpus}
        assert len(served.view.resource.devices) == 9
        going.set()
        await served.until(lambda: [d.id for d in served.view.resource.devices] == [gpu.uuid for gpu in others.gpus])
    [line] = [record.getMessage() for record in caplog.records if "not offered yet" in record.getMessage()]
    assert line.startswith(f"{GPU}: 3 devices are not offered yet")


@pytest.mark.parametrize("by", ["kubelet_internal_checkpoint", "pod-resources.sock"])
async def test_held_devices_that_cannot_be_listed_are_logged_once_with_the_source(settings, monkeypatch, caplog, by):
    odd = [(GPU, f"{HELD}::{'0' * length}") for length in (300, 301)]
    said = Witnesses(monkeypatch)
    said.written = {key: frozenset({"pod"}) for key in odd} if by.endswith("checkpoint") else {}
    said.listed = frozenset() if said.written else frozenset(odd)
    monkeypatch.setattr(offering_module, "HOLDERS_POLL", 0.005)
    async with serving(settings) as served:
        said.inventory = served.inventory
        served.take(Node((Gpu(HELD, 0), Gpu("GPU-01", 1))))
        await served.until(lambda: len(said.reads) > 8)
        said.failing = checkpoint.CheckpointError("Input/output error")
        said.reads.clear()
        await served.until(lambda: len(said.reads) > 8)
        said.failing = None
        await served.until(lambda: len(said.reads) > 16)
        assert [device.healthy for device in served.view.resource.devices] == [False, True]
    [line] = [record.getMessage() for record in caplog.records if "says that a pod holds" in record.getMessage()]
    assert line.startswith(f"{settings.socket_dir}/{by} ")
    assert f"{GPU} (and 1 more such device)" in line
    assert "342" in line
    assert len(line) < 400
