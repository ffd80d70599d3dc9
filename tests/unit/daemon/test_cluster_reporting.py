"""How health reaches the cluster, and the cluster's word reaches the ledger: with the real ledger, and no API."""

from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio

from gpu_plugin.cluster.cordon_annotation import ANNOTATION
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.resolve import resolve
from gpu_plugin.daemon import cluster_reporting
from gpu_plugin.daemon.cluster_reporting import AnnotatedCordons, ClusterReporting
from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.observation import Order, Sample, XidEvent

GPUS = (Gpu("GPU-a", 0), Gpu("GPU-b", 1))
SEEN = Sample(asked=frozenset())


def settings(tmp_path, **asked):
    return resolve({"state_dir": str(tmp_path), "node_name": "node-a", **asked}, {})


def watching(tmp_path, gpus=GPUS, past: tuple[Evidence, ...] = ()):
    health = HealthWatch(settings(tmp_path), "boot-1", lambda: None, lambda _: None)
    health.remember(past)
    health.watch(gpus)
    for gpu in gpus:
        health.observe(gpu.uuid, SEEN)
    return health


def cordoned(health):
    return {gpu.uuid for gpu in health.gpus if health.ledger.reason(gpu.uuid)}


def test_the_annotation_cordons_and_lifts_what_it_cordoned_alone(tmp_path):
    health = watching(tmp_path)
    cordons = AnnotatedCordons(health)
    cordons.told("1")
    assert cordoned(health) == {"GPU-b"}
    assert "annotation nvidia.com/gpu-plugin.cordon" in health.ledger.reason("GPU-b")
    health.observe("GPU-b", Order("cordon", "mine"))
    health.observe("GPU-a", Order("cordon"))
    cordons.told(None)
    assert cordoned(health) == {"GPU-a", "GPU-b"}
    assert health.ledger.reason("GPU-b") == "cordoned: mine"
    cordons.told("GPU-b")
    health.observe("GPU-b", Order("uncordon"))
    assert "annotation" in health.ledger.reason("GPU-b"), "nor does an operator's word lift the annotation's"


def test_what_was_cordoned_stands_until_the_annotation_is_known(tmp_path):
    before = watching(tmp_path)
    AnnotatedCordons(before).told("0,1")
    health = watching(tmp_path, past=before.evidence())
    assert cordoned(health) == {"GPU-a", "GPU-b"}, "over restarts"
    cordons = AnnotatedCordons(health)
    cordons.wait()
    cordons.settle()
    assert cordoned(health) == {"GPU-a", "GPU-b"}, "while the API is away"
    cordons.told("1")
    assert cordoned(health) == {"GPU-b"}


def test_gpus_that_are_found_later_are_meant_too_and_gone_ones_forgotten(tmp_path):
    before = watching(tmp_path)
    AnnotatedCordons(before).told("0,1")
    health = watching(tmp_path, gpus=(), past=before.evidence())
    cordons = AnnotatedCordons(health)
    cordons.told("0")
    health.watch(GPUS[:1])
    health.observe("GPU-a", SEEN)
    cordons.settle()
    assert cordoned(health) == {"GPU-a"}
    assert [entry.uuid for entry in health.past] == []


def test_switched_off_nothing_of_it_stands(tmp_path):
    before = watching(tmp_path)
    AnnotatedCordons(before).told("0")
    health = watching(tmp_path, gpus=(), past=before.evidence())
    cordons = AnnotatedCordons(health)
    cordons.lift()
    health.watch(GPUS)
    for gpu in GPUS:
        health.observe(gpu.uuid, SEEN)
    cordons.settle()
    assert cordoned(health) == set()


def test_names_of_no_gpu_are_said_once(tmp_path, caplog):
    cordons = AnnotatedCordons(watching(tmp_path))
    for value in ("7", "7,0", "7,1"):
        cordons.told(value)
    assert caplog.text.count("7 is not a GPU of this node") == 1
    (complaint,) = cordons.complaints
    assert complaint.startswith(
        f"the Node's annotation {ANNOTATION}: 7 is not a GPU of this node: name one by its index"
    )


class World:
    """A daemon's health, whose settings can be changed."""

    def __init__(self, tmp_path, **asked):
        self.health = watching(tmp_path)
        self.path = tmp_path
        self.settings = settings(tmp_path, **asked)
        self.followers = []
        parts: Any = {
            "settings": lambda: self.settings,
            "health": self.health,
            "snapshot": lambda: SimpleNamespace(resources={}),
            "holders": self.holders,
            "trouble": lambda: "",
            "node": self,
            "dice": lambda: 0.0,
        }
        self.reporting: Any = ClusterReporting(**parts)
        self.health.reports.subscribe(self.reporting.heard)

    async def holders(self):
        return {}

    async def follow_annotation(self, name, told):
        assert name == ANNOTATION
        self.followers.append(told)
        told("0")
        try:
            await anyio.sleep_forever()
        finally:
            self.followers.remove(told)

    def change(self, **asked):
        self.settings = settings(self.path, **asked)
        self.reporting.changed()

    @asynccontextmanager
    async def running(self):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.reporting.run)
            yield
            tasks.cancel_scope.cancel()


async def until(met):
    with anyio.fail_after(10):
        while not met():
            await anyio.sleep(0.001)


def test_events_are_told_as_the_settings_of_now_ask(tmp_path):
    world = World(tmp_path)
    world.health.observe("GPU-a", XidEvent(79))
    assert world.reporting.status() is None
    world.change(node_events=True)
    world.health.observe("GPU-b", XidEvent(79))
    assert world.reporting.status()["events"]["waiting"] == 1


async def test_the_annotation_is_followed_while_it_is_asked_for(tmp_path):
    world = World(tmp_path)
    async with world.running():
        await anyio.sleep(0.01)
        assert world.followers == []
        world.change(cordon_annotation=True)
        await until(lambda: cordoned(world.health) == {"GPU-a"})
        assert world.reporting.status()["cordoned"] == ["GPU-a"]
        world.change()
        await until(lambda: not cordoned(world.health))
        assert world.followers == []


async def test_without_a_client_it_is_said_once_and_in_the_status(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise ConfigError("lightkube is not installed")

    monkeypatch.setattr(cluster_reporting, "require_client", refuse)
    world = World(tmp_path, node_condition=True)
    async with world.running():
        await until(lambda: world.reporting.status()["trouble"])
        world.reporting.changed()
        await anyio.sleep(0.01)
    assert world.reporting.status()["trouble"] == ["lightkube is not installed"]
    assert caplog.text.count("lightkube is not installed") == 1


async def test_without_a_name_of_the_node_it_is_said_once_and_in_the_status(tmp_path, caplog):
    world = World(tmp_path, node_condition=True, node_name="")
    async with world.running():
        await until(lambda: world.reporting.status()["trouble"])
    assert "--node-name" in world.reporting.status()["trouble"][0]
    assert caplog.text.count("--node-name") == 1
