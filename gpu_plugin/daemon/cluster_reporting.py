"""What the cluster is told of this node's GPUs, and which of them it cordons: Events, condition, taint, annotation.

    changes of health ──▶ Events on the Node, and on the pods that hold the GPU     cluster/events
    ledger, once told ──▶ condition GPUHealthy and taint of the Node                cluster/node_state
    annotation ─────────▶ orders to the ledger                                      cluster/node_metadata, cordon_annotation

Each part runs only while the settings ask for it, and follows them. Whatever the API server does, nothing else waits for it.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from gpu_plugin.cluster.connection import require_client
from gpu_plugin.cluster.cordon_annotation import Cordoned, cordoned
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings
from gpu_plugin.daemon.configuration import Configuration
from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.daemon.now import Now
from gpu_plugin.health.latch import Transition
from gpu_plugin.health.observation import Order
from gpu_plugin.health.signals.orders import ANNOTATED, ANNOTATION
from gpu_plugin.kubelet.attribution import PodAttribution
from gpu_plugin.kubelet.snapshot import SnapshotStore
from gpu_plugin.runtime.backoff import START_SPREAD
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.supervision import forever
from gpu_plugin.runtime.threads import Workers, settled
from gpu_plugin.state.directory import StateDirectory
from gpu_plugin.state.records import OWN_MARKS_FILE, OwnMarks

if TYPE_CHECKING:
    from gpu_plugin.cluster.events import EventWriter
    from gpu_plugin.cluster.node_api import NodeApi
    from gpu_plugin.cluster.node_condition import GpuFitness
    from gpu_plugin.cluster.node_state import EnabledReports, NodeStateKeeper

log = logging.getLogger(__name__)

MAX_CHANGES = 64
"""Changes of health that wait for their pods at most; of more, the oldest are let go."""

MAX_PODS = 64
"""Pods that are told of one change at most."""

WRITE_PATIENCE = 5.0
"""Seconds that the state directory may take: a dead disk holds no more than its thread."""


class ClusterReporting:
    """Runs the parts that talk to the cluster of this node's GPUs. Everything here is on the event loop."""

    def __init__(
        self,
        *,
        configuration: Configuration,
        health: HealthWatch,
        store: SnapshotStore,
        attribution: PodAttribution,
        now: Now,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        dice: Callable[[], float] = random.random,
    ) -> None:
        """Takes the parts that know what to report.

        `store` has the hardware and its health as the kubelet knows them, and `attribution` the containers that hold devices.
        `wall` returns Unix seconds, and `clock` the seconds of a steady clock. `dice`, in [0, 1), spreads nodes that begin
        together.
        """
        first = configuration.settings
        self._configuration = configuration
        self._health = health
        self._store = store
        self._attribution = attribution
        self._now = now
        self._wall = wall
        self._state = StateDirectory(Path(first.state_dir))
        self._clock = clock
        self._dice = dice
        self._node_and_kubeconfig = first.node_name, first.kubeconfig
        self._api_and_events: tuple[NodeApi, EventWriter] | None = None
        self._keeper: NodeStateKeeper | None = None
        self._cordons = AnnotatedCordons(health)
        self._changes: deque[tuple[Transition, float]] = deque(maxlen=MAX_CHANGES)
        self._threads = Workers("cluster-state")
        self._changes_added = Pulse()
        self._settings_changed = Pulse()
        self._client = ""

    def health_changed(self, change: Transition) -> None:
        """A change of a signal's verdict: tells it as the settings ask for."""
        settings, now = self._configuration.settings, self._wall()
        if settings.node_events or settings.pod_events:
            from gpu_plugin.cluster import health_news  # noqa: PLC0415 - for those alone who report
            from gpu_plugin.cluster.correlation import Object  # noqa: PLC0415

            _, events = self._writer()
            name, _ = self._node_and_kubeconfig
            about = Object(
                "Node", name, uid=name
            )  # the uid of the kubelet's own Events about it (pkg/kubelet, nodeRef)
            if settings.node_events and (news := health_news.news(change, self._health.gpus, about, now)):
                events.tell(news)
            if settings.pod_events and health_news.concerns_pods(change):
                self._changes.append((change, now))
                self._changes_added.ring()

    def changed(self) -> None:
        """The settings are others, or other GPUs were found."""
        self._cordons.apply()
        self._settings_changed.ring()
        if self._keeper is not None:
            self._keeper.changed()

    def status(self) -> Mapping[str, object] | None:
        """For `gpu-plugin status`; None where nothing of it is asked for.

        `trouble` has a sentence for each thing that does not work, and for each name in the annotation that is no GPU's;
        `cordoned` are uuids; `requests` counts what was asked since the start, and what was in vain, without the watch.
        """
        settings = self._configuration.settings
        if not _reports(settings):
            return None
        trouble = [self._client]
        api, events = self._writer()
        if settings.node_events or settings.pod_events:
            trouble.append(events.trouble and f"Kubernetes Events are not written: {events.trouble}")
        if self._keeper is not None and self._keeper.trouble:
            trouble.append(f"condition and taint of the Node are not written: {self._keeper.trouble}")
        if settings.cordon_annotation:
            trouble += self._cordons.complaints
        return {
            "node": api.node_name,
            "requests": {"sent": api.requests, "failed": api.failures},
            "events": {"written": events.written, "dropped": events.dropped, "waiting": events.waiting},
            "cordoned": sorted(self._cordons.uuids) if settings.cordon_annotation else [],
            "trouble": [each for each in trouble if each],
        }

    async def run(self) -> None:
        """Never returns."""
        try:
            marks = await self._threads.run(partial(self._state.read, OWN_MARKS_FILE, OwnMarks), WRITE_PATIENCE)
        except TimeoutError:
            marks = None
        marks = marks or OwnMarks()
        try:
            if not _reports(self._configuration.settings):
                self._cordons.apply_value(None)
            while not _reports(self._configuration.settings) and marks == OwnMarks():
                await self._settings_changed.wait()
            while not self._has_client():
                await self._settings_changed.wait()
            from gpu_plugin.cluster.node_state import NodeStateKeeper  # noqa: PLC0415 - for those alone who report

            api, events = self._writer()
            self._keeper = NodeStateKeeper(api, self, marks, clock=self._clock, wall=self._wall, dice=self._dice)
            async with anyio.create_task_group() as parts:
                parts.start_soon(forever, "the writing of Kubernetes Events", events.run)
                parts.start_soon(forever, "the condition and taint of the Node", self._keeper.run)
                parts.start_soon(forever, "the news for condition and taint", self._follow_hardware)
                parts.start_soon(forever, "the Events of pods", self._report_to_pods)
                parts.start_soon(forever, "the cordon by annotation", self._follow_annotation)
        finally:
            self._threads.close()

    def _writer(self) -> "tuple[NodeApi, EventWriter]":
        if self._api_and_events is None:
            from gpu_plugin.cluster.events import EventWriter  # noqa: PLC0415 - for those alone who report
            from gpu_plugin.cluster.node_api import NodeApi  # noqa: PLC0415

            api = NodeApi(*self._node_and_kubeconfig)
            self._api_and_events = api, EventWriter(api, self._clock)
        return self._api_and_events

    def _has_client(self) -> bool:
        """Whether there are a client and a Node's name to ask about; logs once why not."""
        before, self._client = self._client, ""
        try:
            require_client("reporting to the cluster", ", or switch it off")
            if not self._node_and_kubeconfig[0]:
                raise ConfigError("reporting to the cluster needs the Node's name: set --node-name (NODE_NAME)")
        except ConfigError as error:
            self._client = str(error)
            if not before:
                log.error("%s", error)  # noqa: TRY400 - the sentence is for people
        return not self._client

    def enabled_reports(self) -> "EnabledReports":
        """The reports that the settings enable."""
        from gpu_plugin.cluster.node_state import EnabledReports  # noqa: PLC0415 - as above

        settings = self._configuration.settings
        effect = "" if settings.node_taint == "none" else settings.node_taint
        return EnabledReports(settings.node_condition, effect, _reports(settings))

    async def write_marks(self, marks: OwnMarks) -> None:
        """Write our marks on the Node to the state directory, within WRITE_PATIENCE if it answers."""
        await settled(self._threads.begin(partial(self._state.write, OWN_MARKS_FILE, marks)), WRITE_PATIENCE)

    def fitness(self) -> "tuple[Sequence[GpuFitness], str | None]":
        """The fitness of the node's GPUs, and why no GPU can be reached."""
        from gpu_plugin.cluster.node_condition import fitness_of  # noqa: PLC0415 - as above

        return tuple(fitness_of(self._health.ledger, gpu) for gpu in self._health.gpus), self._now.driver_trouble

    async def _follow_hardware(self) -> None:
        """Has condition and taint looked at again whenever a verdict on any hardware is published as another.

        Other words for the same verdicts (a count of errors, a peak temperature) wait for the next look: each change hastens
        what failed, so words that change all the time would undo the pauses between attempts.
        """
        verdicts = _verdicts(self._store)
        while True:
            await self._store.changed.wait()
            if (now := _verdicts(self._store)) != verdicts:
                verdicts = now
                if self._keeper is not None:
                    self._keeper.changed()

    async def _report_to_pods(self) -> None:
        from gpu_plugin.cluster import health_news  # noqa: PLC0415 - as above
        from gpu_plugin.cluster.correlation import Object  # noqa: PLC0415

        _, events = self._writer()
        while True:
            if not self._changes:
                await self._changes_added.wait()
                continue
            change, at = self._changes.popleft()
            allocated = await self._attribution.newest()
            if allocated is None:
                continue
            pods = health_news.pods_on(change, allocated, self._store.current)
            for namespace, pod in sorted(pods)[:MAX_PODS]:
                about = Object("Pod", pod, namespace)
                if (news := health_news.news(change, self._health.gpus, about, at)) is not None:
                    events.tell(news)

    async def _follow_annotation(self) -> None:
        """Obeys the annotation while the settings ask for that; what it cordoned is lifted once they do not."""
        while True:
            if not self._follows_annotation():
                self._cordons.apply_value(None)
                await self._settings_changed.wait()
                continue
            self._cordons.suspend()
            async with anyio.create_task_group() as following:
                following.start_soon(self._read_annotation)
                while self._follows_annotation():
                    await self._settings_changed.wait()
                following.cancel_scope.cancel()

    def _follows_annotation(self) -> bool:
        return self._configuration.settings.cordon_annotation

    async def _read_annotation(self) -> None:
        await anyio.sleep(START_SPREAD * self._dice())
        await self._configuration.node.follow_annotation(ANNOTATION, self._cordons.apply_value)


class AnnotatedCordons:
    """Turns what the annotation says into orders. As long as it is not known, those of before stand."""

    def __init__(self, health: HealthWatch) -> None:
        self._health = health
        self._value: str | None = None
        self._known = False
        self._wanted = Cordoned()

    @property
    def uuids(self) -> frozenset[str]:
        """The GPUs that are cordoned so."""
        ledger = self._health.ledger
        return frozenset(
            gpu.uuid
            for gpu in self._health.gpus
            if any(key.signal == ANNOTATED for key, _, _ in ledger.standing(gpu.uuid))
        )

    @property
    def complaints(self) -> tuple[str, ...]:
        """A sentence for each name in the annotation that is of no GPU of this node."""
        return tuple(f"the Node's annotation {ANNOTATION}: {each}" for each in self._wanted.complaints)

    def apply_value(self, value: str | None) -> None:
        """Takes the annotation's value, None where there is none or it has no say, and settles."""
        self._value, self._known = value, True
        self.apply()

    def suspend(self) -> None:
        """The annotation has a say from now on, and is not known yet: what it cordoned before stands."""
        self._known = False

    def apply(self) -> None:
        """Has the GPUs that are known now cordoned as the annotation says, and no others."""
        gpus = self._health.gpus
        if not self._known or not gpus:
            return
        before, self._wanted = self._wanted, cordoned(self._value, gpus)
        for complaint in self._wanted.complaints:
            if complaint not in before.complaints:
                log.warning("the Node's annotation %s: %s", ANNOTATION, complaint)
        cordoned_now = self.uuids
        for gpu in gpus:
            if gpu.uuid in self._wanted.uuids and gpu.uuid not in cordoned_now:
                self._health.observe(gpu.uuid, Order("annotate"))
            elif gpu.uuid not in self._wanted.uuids and gpu.uuid in cordoned_now:
                self._health.observe(gpu.uuid, Order("unannotate"))
        for entry in self._health.past:  # of GPUs that have not been found again
            if entry.signal == ANNOTATED and not self._wanted.complaints:
                self._health.drop_past(entry.uuid, ANNOTATED)


def _verdicts(store: SnapshotStore) -> Mapping[str, object]:
    """What stands against each GPU and MIG device, by uuid, without the words for it."""
    return {uuid: each.health.standing for uuid, each in store.current.hardware.items()}


def _reports(settings: Settings) -> bool:
    return bool(
        settings.node_events
        or settings.pod_events
        or settings.node_condition
        or settings.node_taint != "none"
        or settings.cordon_annotation
    )
