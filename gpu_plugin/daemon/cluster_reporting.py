"""Report the health of this node's GPUs to the cluster, and apply the cordons of the Node's annotation.

    changes of health ──▶ Events on the Node, and on the pods that hold the GPU     cluster/events
    ledger ─────────────▶ condition GPUHealthy and taint of the Node                cluster/node_state
    annotation ─────────▶ orders to the ledger                                      cluster/node_metadata, cordon_annotation

Each part runs only while the settings enable it. No other part of the daemon waits for the API server.
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
from gpu_plugin.devices.gpu_names import called
from gpu_plugin.health.latch import Transition
from gpu_plugin.health.observation import Order
from gpu_plugin.health.signals.orders import ANNOTATED, ANNOTATION
from gpu_plugin.kubelet.attribution import PodAttribution
from gpu_plugin.kubelet.snapshot import SnapshotStore
from gpu_plugin.runtime.backoff import START_SPREAD
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.supervision import forever
from gpu_plugin.runtime.threads import begin
from gpu_plugin.state.directory import StateDirectory
from gpu_plugin.state.records import OWN_MARKS_FILE, OwnMarks

if TYPE_CHECKING:
    from gpu_plugin.cluster.events import EventWriter
    from gpu_plugin.cluster.node_api import NodeApi
    from gpu_plugin.cluster.node_condition import GpuFitness
    from gpu_plugin.cluster.node_state import EnabledReports, NodeStateKeeper
    from gpu_plugin.status import model

log = logging.getLogger(__name__)

MAX_CHANGES = 64
"""Limit of changes of health in the queue for Events on pods. A full queue drops the oldest change."""

MAX_PODS = 64
"""Limit of pods that get an Event about one change."""

WRITE_PATIENCE = 5.0
"""Seconds to wait for the state directory. A call that hangs blocks only its thread."""


class ClusterReporting:
    """Runs the parts that report to the cluster. Everything here runs on the event loop."""

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
        """Store the sources of the reports.

        `store` has the hardware and its health as they are published to the kubelet, and `attribution` the containers that hold
        devices. `wall` returns Unix seconds, and `clock` the seconds of a steady clock. `dice` returns a random number in
        [0, 1), which spreads the first requests of nodes that start together.
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
        self._changes_added = Pulse()
        self._settings_changed = Pulse()
        self._client = ""

    def health_changed(self, change: Transition) -> None:
        """Report a change of a signal's verdict by Events, as far as the settings enable them."""
        settings, now = self._configuration.settings, self._wall()
        if settings.node_events or settings.pod_events:
            from gpu_plugin.cluster import health_news  # noqa: PLC0415 - for those alone who report
            from gpu_plugin.cluster.correlation import Object  # noqa: PLC0415

            _, events = self._writer()
            name, _ = self._node_and_kubeconfig
            about = Object(
                "Node", name, uid=name
            )  # the uid that the kubelet's own Events about the Node have (pkg/kubelet, nodeRef)
            if settings.node_events and (news := health_news.news(change, self._health.gpus, about, now)):
                events.tell(news)
            if settings.pod_events and health_news.concerns_pods(change):
                self._changes.append((change, now))
                self._changes_added.ring()

    def changed(self) -> None:
        """Apply changed settings, or a changed set of GPUs."""
        self._cordons.apply()
        self._settings_changed.ring()
        if self._keeper is not None:
            self._keeper.changed()

    def status(self) -> "model.Cluster | None":
        """Return the entry of the status; None if the settings enable no report.

        A name in the annotation that matches no GPU is trouble. The requests are without the watch.
        """
        from gpu_plugin.status import model  # noqa: PLC0415 - pods wait for the daemon's start

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
        return model.Cluster(
            node=api.node_name,
            requests={"sent": api.requests, "failed": api.failures},
            events={"written": events.written, "dropped": events.dropped, "waiting": events.waiting},
            cordoned=tuple(sorted(self._cordons.uuids)) if settings.cordon_annotation else (),
            trouble=tuple(filter(None, trouble)),
        )

    async def run(self) -> None:
        """Run the parts that the settings enable. Never returns."""
        try:
            marks = await begin(partial(self._state.read, OWN_MARKS_FILE, OwnMarks), "cluster-state").result(
                WRITE_PATIENCE
            )
        except TimeoutError:
            marks = None
        marks = marks or OwnMarks()
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
            parts.start_soon(forever, "the updates of condition and taint", self._follow_hardware)
            parts.start_soon(forever, "the Events of pods", self._report_to_pods)
            parts.start_soon(forever, "the cordon by annotation", self._follow_annotation)

    def _writer(self) -> "tuple[NodeApi, EventWriter]":
        if self._api_and_events is None:
            from gpu_plugin.cluster.events import EventWriter  # noqa: PLC0415 - for those alone who report
            from gpu_plugin.cluster.node_api import NodeApi  # noqa: PLC0415

            api = NodeApi(*self._node_and_kubeconfig)
            self._api_and_events = api, EventWriter(api, self._clock)
        return self._api_and_events

    def _has_client(self) -> bool:
        """Return True if the client is installed and the Node's name is set. Log the reason once if not."""
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
        await begin(partial(self._state.write, OWN_MARKS_FILE, marks), "cluster-state").wait(WRITE_PATIENCE)

    def fitness(self) -> "tuple[Sequence[GpuFitness], str | None]":
        """The fitness of the node's GPUs, and why no GPU can be reached."""
        from gpu_plugin.cluster.node_condition import fitness_of  # noqa: PLC0415 - as above
        from gpu_plugin.health.explain import explain  # noqa: PLC0415
        from gpu_plugin.status import gpus  # noqa: PLC0415

        ledger, now = self._health.ledger, self._health.now()
        entries = ((gpu, explain(ledger, gpu, now), ledger.standing(gpu.uuid, None)) for gpu in self._health.gpus)
        found = tuple(fitness_of(called(gpu), gpus.gpu(gpu, known, standing)) for gpu, known, standing in entries)
        return found, self._now.driver_trouble

    async def _follow_hardware(self) -> None:
        """Have condition and taint updated whenever the published verdict of any hardware changes.

        Changed details of the same verdict (a count of errors, a peak temperature) wait for the next regular update. Each
        call of `changed` retries failed requests at once, so frequent changes of details would undo the back-off.
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
        """Apply the annotation's cordons while the settings enable it. Lift them when the settings disable it."""
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
        node = self._configuration.node
        async with anyio.create_task_group() as following:
            following.start_soon(node.run)
            while node.labels is None:  # the annotations are not known either
                await node.changed.wait()
            while True:
                value = node.annotations.get(ANNOTATION)
                self._cordons.apply_value(value)
                while node.annotations.get(ANNOTATION) == value:
                    await node.changed.wait()


class AnnotatedCordons:
    """Turns the annotation's value into orders. While the value is not known, the earlier cordons stay."""

    def __init__(self, health: HealthWatch) -> None:
        self._health = health
        self._value: str | None = None
        self._known = False
        self._wanted = Cordoned()

    @property
    def uuids(self) -> frozenset[str]:
        """The GPUs that the annotation has cordoned."""
        ledger = self._health.ledger
        return frozenset(
            gpu.uuid
            for gpu in self._health.gpus
            if any(key.signal == ANNOTATED for key, _, _ in ledger.standing(gpu.uuid))
        )

    @property
    def complaints(self) -> tuple[str, ...]:
        """A sentence for each name in the annotation that matches no GPU of this node."""
        return tuple(f"the Node's annotation {ANNOTATION}: {each}" for each in self._wanted.complaints)

    def apply_value(self, value: str | None) -> None:
        """Store the annotation's value and apply it. None if the Node has no annotation, or the settings disable it."""
        self._value, self._known = value, True
        self.apply()

    def suspend(self) -> None:
        """Keep the earlier cordons until the next value: the settings enable the annotation, and its value is not known yet."""
        self._known = False

    def apply(self) -> None:
        """Cordon the known GPUs that the annotation names, and lift this cordon from all other GPUs."""
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
    """Return the open verdicts of each GPU and MIG device, by uuid, without their details."""
    return {uuid: each.health.standing for uuid, each in store.current.hardware.items()}


def _reports(settings: Settings) -> bool:
    return bool(
        settings.node_events
        or settings.pod_events
        or settings.node_condition
        or settings.node_taint != "none"
        or settings.cordon_annotation
    )
