"""Reports of health to the cluster, and cordons from the cluster, with the real ledger."""

from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import anyio

from gpu_plugin.cluster.node_state import LOOK, NodeStateKeeper
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.resolve import resolve
from gpu_plugin.daemon import cluster_reporting
from gpu_plugin.daemon.cluster_reporting import MAX_PODS, AnnotatedCordons, ClusterReporting
from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.daemon.reported_errors import ReportedErrors
from gpu_plugin.devices.device import Device, Resource
from gpu_plugin.devices.node import Gpu
from gpu_plugin.devices.plan import Plan
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.observation import Order, Sample, XidEvent
from gpu_plugin.health.signals.orders import ANNOTATION
from gpu_plugin.kubelet.inventory import Inventory
from gpu_plugin.kubelet.offer import Offer
from gpu_plugin.kubelet.pod_listing import Holder
from gpu_plugin.kubelet.snapshot import SnapshotStore
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.state.recorder import Recorder
from tests.unit.cluster.api_server import NODE
from tests.unit.cluster.writable_server import WritableServer
from tests.unit.waiting import until

GPU = "nvidia.com/gpu"
GPUS = (Gpu("GPU-a", 0), Gpu("GPU-b", 1))
SEEN = Sample(asked=frozenset())


def settings(tmp_path, **asked):
    return resolve({"state_dir": str(tmp_path), "node_name": "node-a", **asked}, {})


def watching(tmp_path, gpus=GPUS, past: tuple[Evidence, ...] = ()):
    health = HealthWatch(settings(tmp_path), "boot-1", Pulse(), ReportedErrors())
    health.restore(past)
    health.watch(gpus)
    for gpu in gpus:
        health.observe(gpu.uuid, SEEN)
    return health


def cordoned(health):
    return {gpu.uuid for gpu in health.gpus if health.ledger.reason(gpu.uuid)}


def test_the_annotation_cordons_and_lifts_what_it_cordoned_alone(tmp_path):
    health = watching(tmp_path)
    cordons = AnnotatedCordons(health)
    cordons.apply_value("1")
    assert cordoned(health) == {"GPU-b"}
    assert "annotation nvidia.com/gpu-plugin.cordon" in health.ledger.reason("GPU-b")
    health.observe("GPU-b", Order("cordon", "mine"))
    health.observe("GPU-a", Order("cordon"))
    cordons.apply_value(None)
    assert cordoned(health) == {"GPU-a", "GPU-b"}
    assert health.ledger.reason("GPU-b") == "cordoned: mine"
    cordons.apply_value("GPU-b")
    health.observe("GPU-b", Order("uncordon"))
    assert "annotation" in health.ledger.reason("GPU-b"), "nor does an operator's word lift the annotation's"


def test_what_was_cordoned_stands_until_the_annotation_is_known(tmp_path):
    before = watching(tmp_path)
    AnnotatedCordons(before).apply_value("0,1")
    health = watching(tmp_path, past=before.evidence())
    assert cordoned(health) == {"GPU-a", "GPU-b"}, "over restarts"
    cordons = AnnotatedCordons(health)
    cordons.suspend()
    cordons.apply()
    assert cordoned(health) == {"GPU-a", "GPU-b"}, "while the API is away"
    cordons.apply_value("1")
    assert cordoned(health) == {"GPU-b"}


def test_gpus_that_are_found_later_are_meant_too_and_gone_ones_forgotten(tmp_path):
    before = watching(tmp_path)
    AnnotatedCordons(before).apply_value("0,1")
    health = watching(tmp_path, gpus=(), past=before.evidence())
    cordons = AnnotatedCordons(health)
    cordons.apply_value("0")
    health.watch(GPUS[:1])
    health.observe("GPU-a", SEEN)
    cordons.apply()
    assert cordoned(health) == {"GPU-a"}
    assert [entry.uuid for entry in health.past] == []


def test_a_gpu_that_is_named_and_not_found_yet_stays_cordoned(tmp_path):
    before = watching(tmp_path)
    AnnotatedCordons(before).apply_value("0,GPU-b")
    health = watching(tmp_path, gpus=GPUS[:1], past=before.evidence())
    cordons = AnnotatedCordons(health)
    cordons.apply_value("0,GPU-b")
    assert "GPU-b is not a GPU of this node" in cordons.complaints[0]
    health.watch(GPUS)
    health.observe("GPU-b", SEEN)
    assert cordoned(health) == {"GPU-a", "GPU-b"}, "before anybody has looked at the annotation again"


def test_switched_off_nothing_of_it_stands(tmp_path):
    before = watching(tmp_path)
    AnnotatedCordons(before).apply_value("0")
    health = watching(tmp_path, gpus=(), past=before.evidence())
    cordons = AnnotatedCordons(health)
    cordons.apply_value(None)
    health.watch(GPUS)
    for gpu in GPUS:
        health.observe(gpu.uuid, SEEN)
    cordons.apply()
    assert cordoned(health) == set()


def test_names_of_no_gpu_are_said_once(tmp_path, caplog):
    cordons = AnnotatedCordons(watching(tmp_path))
    for value in ("7", "7,0", "7,1"):
        cordons.apply_value(value)
    assert caplog.text.count("7 is not a GPU of this node") == 1
    (complaint,) = cordons.complaints
    assert complaint.startswith(
        f"the Node's annotation {ANNOTATION}: 7 is not a GPU of this node: name one by its index"
    )


class World:
    """The health and the served resources of a daemon, with settings that a test can change.

    `journal` delays writes.
    """

    def __init__(self, tmp_path, **asked):
        self.health = watching(tmp_path)
        self.path = tmp_path
        self.settings = settings(tmp_path, **asked)
        self.followers = 0
        self.held = {}
        self.writing = False
        self.journal = anyio.Event()
        self.journal.set()
        self.inventory = Inventory(SnapshotStore(), self.health.ledger.health)
        self.inventory.found(GPUS)
        parts: Any = {
            "configuration": self,
            "health": self.health,
            "store": self.inventory.store,
            "attribution": self,
            "now": SimpleNamespace(driver_trouble=""),
            "dice": lambda: 0.0,
        }
        self.reporting: Any = ClusterReporting(**parts)
        self.health.reports.subscribe(self.reporting.health_changed)

    @property
    def node(self):
        return SimpleNamespace(labels={}, annotations={ANNOTATION: "0"}, changed=Pulse(), run=self.follow)

    async def newest(self):
        return self.held

    async def written(self, _):
        self.writing = True
        await self.journal.wait()

    def serve(self, *devices):
        """Has a resource of these devices, and of no other hardware."""
        self.inventory.apply(Offer(Plan((Resource(GPU, devices),))), None, 0.0)
        return self.inventory.store.current.resources[GPU]

    async def follow(self):
        self.followers += 1
        try:
            await anyio.sleep_forever()
        finally:
            self.followers -= 1

    def change(self, **asked):
        self.settings = settings(self.path, **asked)
        self.reporting.changed()

    @asynccontextmanager
    async def running(self):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.reporting.run)
            tasks.start_soon(self.health.publish, cast("Recorder", self), self.inventory)
            yield
            tasks.cancel_scope.cancel()


def test_events_are_told_as_the_settings_of_now_ask(tmp_path):
    world = World(tmp_path)
    world.health.observe("GPU-a", XidEvent(79))
    assert world.reporting.status() is None
    world.change(node_events=True)
    world.health.observe("GPU-b", XidEvent(79))
    assert world.reporting.status().events["waiting"] == 1


async def test_of_many_pods_that_share_a_gpu_the_first_by_name_are_told(tmp_path):
    world = World(tmp_path, pod_events=True, kubeconfig="/nowhere")
    pods = [f"pod-{number:03d}" for number in range(MAX_PODS + 6)]
    world.serve(*(Device(f"GPU-a::{pod}", "GPU-a", "GPU-a", "0") for pod in pods))
    world.held = {(GPU, f"GPU-a::{pod}"): frozenset({Holder("ns", pod, "main")}) for pod in pods}
    async with world.running():
        world.health.observe("GPU-a", XidEvent(79))
        await until(lambda: world.reporting.status().events["waiting"])
    _, writer = world.reporting._api_and_events
    assert [told.news.about.name for told in writer._waiting.values()] == pods[:MAX_PODS]


async def test_news_of_health_and_of_the_settings_reach_the_node_s_condition_at_once(tmp_path):
    async with WritableServer() as server:
        world = World(tmp_path, node_condition=True, node_name=NODE, kubeconfig=server.kubeconfig(tmp_path))
        async with world.running():
            await until(lambda: (server.condition() or {}).get("status") == "True", LOOK / 2)
            world.health.observe("GPU-a", XidEvent(79))
            await until(lambda: server.condition()["status"] == "False", LOOK / 2)
            world.change(node_name=NODE, kubeconfig=str(tmp_path / "kubeconfig"))
            await until(lambda: server.condition() is None, LOOK / 2)


async def test_a_gpu_in_no_resource_is_news_once_it_is_written_down_and_changes_no_list(tmp_path):
    async with WritableServer() as server:
        world = World(tmp_path, node_condition=True, node_name=NODE, kubeconfig=server.kubeconfig(tmp_path))
        view = world.serve(Device("GPU-b", "GPU-b", "GPU-b", "1"))
        store = world.inventory.store
        before = store.current
        async with world.running():
            await until(lambda: (server.condition() or {}).get("status") == "True", LOOK / 2)
            world.writing, world.journal = False, anyio.Event()
            world.health.observe("GPU-a", XidEvent(79))
            await until(lambda: world.writing)
            assert (store.current, server.condition()["status"]) == (before, "True")
            world.journal.set()
            await until(lambda: server.condition()["status"] == "False", LOOK / 2)
        assert store.current.version == before.version + 1
        assert store.current.resources is before.resources
        assert store.current.resources[GPU] is view
        assert store.current.hardware["GPU-a"].health.verdict is Verdict.FATAL
        assert "Xid 79" in store.current.hardware["GPU-a"].health.reason
        assert store.current.hardware["GPU-b"] is before.hardware["GPU-b"]


async def test_other_words_for_the_same_verdict_hasten_no_attempt_that_failed(tmp_path, monkeypatch):
    hastened = []
    monkeypatch.setattr(NodeStateKeeper, "changed", lambda _: hastened.append(1))
    world = World(tmp_path, node_condition=True, kubeconfig="/nowhere")
    store = world.inventory.store
    async with world.running():
        await until(lambda: world.reporting._keeper is not None)
        await anyio.wait_all_tasks_blocked()
        world.health.observe("GPU-a", Sample(ecc_uncorrected=0, counting=0))
        for errors in (1, 2, 3):
            world.health.observe("GPU-a", Sample(ecc_uncorrected=errors, counting=0))
            await until(lambda: f"{errors} uncorrected" in store.current.hardware["GPU-a"].health.reason)  # noqa: B023
            await anyio.wait_all_tasks_blocked()
            assert len(hastened) == 1


async def test_the_annotation_is_followed_while_it_is_asked_for(tmp_path):
    world = World(tmp_path)
    async with world.running():
        await anyio.sleep(0.01)
        assert world.followers == 0
        world.change(cordon_annotation=True)
        await until(lambda: cordoned(world.health) == {"GPU-a"})
        assert world.reporting.status().cordoned == ("GPU-a",)
        world.change()
        await until(lambda: not cordoned(world.health))
        assert world.followers == 0


async def test_without_a_client_it_is_said_once_and_in_the_status(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise ConfigError("lightkube is not installed")

    monkeypatch.setattr(cluster_reporting, "require_client", refuse)
    world = World(tmp_path, node_condition=True)
    async with world.running():
        await until(lambda: world.reporting.status().trouble)
        world.reporting.changed()
        await anyio.sleep(0.01)
    assert world.reporting.status().trouble == ("lightkube is not installed",)
    assert caplog.text.count("lightkube is not installed") == 1


async def test_without_a_name_of_the_node_it_is_said_once_and_in_the_status(tmp_path, caplog):
    world = World(tmp_path, node_condition=True, node_name="")
    async with world.running():
        await until(lambda: world.reporting.status().trouble)
    assert "--node-name" in world.reporting.status().trouble[0]
    assert caplog.text.count("--node-name") == 1
