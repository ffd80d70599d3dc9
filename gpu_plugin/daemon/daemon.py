"""The daemon of one node: makes the parts and has them run together in one task group.

    Configuration ──settings──▶ offer ◀──────node────── Monitor ──observations──▶ HealthWatch
                                  │                                                   │ reasons
                                  ▼                                                   ▼
    PodResources ──who holds──▶ Inventory ──▶ SnapshotStore ──▶ Endpoints, one a resource ──▶ kubelet

A part that fails is begun again and takes no other with it.
"""

import logging
import os
import socket
import stat
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.abc
from msgspec.structs import asdict, replace

from gpu_plugin import __version__
from gpu_plugin.cluster.labels.keeper import NodeLabels
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings
from gpu_plugin.control import SOCKET
from gpu_plugin.control.server import Verb, serve, serve_refusals
from gpu_plugin.daemon.cluster_reporting import ClusterReporting
from gpu_plugin.daemon.discovery import Discovery, NoDriverError
from gpu_plugin.daemon.event_log import LOGGED_VERBS, EventLog
from gpu_plugin.daemon.faulting_pods import FaultingPods
from gpu_plugin.daemon.hardware import Hardware
from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.daemon.node_view import NodeView, Now
from gpu_plugin.daemon.offering import Offering
from gpu_plugin.daemon.operations import Operations
from gpu_plugin.daemon.state_files import FILES
from gpu_plugin.health.observation import ApplicationError
from gpu_plugin.host.cdi.watch import CdiWatch
from gpu_plugin.inventory.inventory import Inventory
from gpu_plugin.inventory.snapshot import SnapshotStore
from gpu_plugin.kubelet.attribution import PodAttribution
from gpu_plugin.kubelet.counts import KubeletCounts
from gpu_plugin.kubelet.directory import watch
from gpu_plugin.kubelet.endpoint import Endpoints, Shared
from gpu_plugin.kubelet.pod_listing import HoldersByDevice
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.nvml.call_times import CallTimes
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.signals import restore_default_actions, told_to_stop
from gpu_plugin.runtime.supervision import LONGEST_RETRY, forever
from gpu_plugin.sources.configuration import Configuration
from gpu_plugin.state.directory import StateDirectory, set_aside
from gpu_plugin.state.event_store import EventStore
from gpu_plugin.state.memory import Memory
from gpu_plugin.state.node_lock import RETRY, NodeLock
from gpu_plugin.state.recorder import Known, Recorder
from gpu_plugin.telemetry.listener.listener import Listener

if TYPE_CHECKING:
    from gpu_plugin.telemetry.listener.status_page import Source

log = logging.getLogger(__name__)


class Daemon:
    """One node's plugin, from start to clean exit."""

    def __init__(self, configuration: Configuration, hardware: Hardware, listener: Listener | None = None) -> None:
        """`listener` answers probes and scrapes by what is known here, and stops when this is told to."""
        self.configuration = configuration
        self.hardware = hardware
        self._listener = listener
        self._events = EventLog(EventStore(Path(self.settings.state_dir), time.time), lambda: self._health.gpus)
        self._registrations = Registrations(changed=self._events.registration)
        self._now = Now()
        self.store = SnapshotStore()
        self._state = StateDirectory(Path(self.settings.state_dir))
        self._memory = Memory(self._state, hardware.host.boot_id())
        self._recorder = Recorder(self._memory, self._known, lambda: self._health.ledger.revision)
        self._attribution = PodAttribution(lambda: Path(self.settings.effective_pod_resources_socket))
        self._pods = FaultingPods(self._attribution.newest_pods, lambda: self.store.current, self._observe)
        self._health = HealthWatch(self.settings, hardware.host.boot_id(), self._recorder.changed, self._pods.heard)
        self._health.reports.subscribe(self._events.health)
        self._operations = Operations(self._health, lambda: self._now.monitor, self._recorder.written)
        self._inventory = Inventory(self.store, self._health.ledger.health)
        self._offering = Offering(
            self._inventory, lambda: self.settings, self._recorder.changed, self._registrations.heard
        )
        self._counts = KubeletCounts()
        self._cluster = ClusterReporting(
            settings=lambda: self.settings,
            health=self._health,
            store=self.store,
            holders=self._attribution.newest,
            trouble=lambda: self._now.driver_trouble,
            node=lambda: configuration.node,
        )
        self._health.reports.subscribe(self._cluster.heard)
        self._told_to_stop = False
        self._why_stopped = ""
        self._look = Pulse()
        self._state_look = Pulse()
        self._commands_look = Pulse()
        self._lock = NodeLock(Path(self.settings.state_dir), Path(self.settings.socket_dir), __version__)
        self._labels = NodeLabels(lambda: self.settings, hardware.host, self._state)
        self._specs = CdiWatch(lambda: self.settings, hardware.host, hardware.driver_roots, self._inventory.cdi_changed)
        self._discovery = Discovery(
            now=self._now,
            configuration=configuration,
            hardware=hardware,
            health=self._health,
            operations=self._operations,
            inventory=self._inventory,
            offering=self._offering,
            cluster=self._cluster,
            specs=self._specs,
            labels=self._labels,
            events=self._events,
            memory=self._memory,
            recorder=self._recorder,
            registrations=self._registrations,
            attribution=self._attribution,
            counts=self._counts,
            call_times=CallTimes(lambda: self.settings.nvml_timeout),
        )
        self._view = NodeView(**asdict(self._discovery))

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self.configuration.settings

    async def run(self) -> int:
        """Runs until a signal ends it. Returns the exit status."""
        status = 0
        try:
            async with anyio.create_task_group() as parts:
                self._parts = parts
                if self._listener is not None:
                    self._listener.ask(self._view.facts, self._view.scraped, self._page)
                parts.start_soon(self._signals)
                parts.start_soon(self._begin)
        except* (NoDriverError, ConfigError) as group:
            for error in group.exceptions:
                for line in str(error).splitlines():
                    log.error("%s", line)  # noqa: TRY400 - the sentence is for people, a trace would bury it
                self._why_stopped = str(error)
            status = 2 if group.subgroup(ConfigError) else 1
        finally:
            try:
                restore_default_actions()  # the last save blocks, for ever where its disk hangs
                if not self._now.waits_for:
                    self._events.daemon(f"stopped: {self._why_stopped or 'ended without being told to'}")
                    self._events.store.save()
            finally:
                self._lock.release()
        if status == 0 and not self._told_to_stop:
            log.error("ended without being told to")
            status = 1
        log.info("stopped")
        return status

    async def _begin(self) -> None:
        log.info("gpu-plugin %s starting", __version__)
        await self._have_the_node()
        self._state.tidy(FILES)
        self._memory.reserve()
        self._events.store.recall()
        self._events.daemon(f"gpu-plugin {__version__} started, process {os.getpid()}")
        remembered = self._memory.gpus()
        unasked = "the driver has not been asked about it yet"
        self._health.remember(self._memory.evidence(), tuple(replace(gpu, unreadable=unasked) for gpu in remembered))
        self._inventory.remember(self._memory.listed(), self._memory.foreign())
        self._inventory.found(self._health.gpus)
        self._now.monitor = self._discovery.monitor(remembered)
        consequence = "a restart forgets what happens"
        for name, run in (
            ("the control socket", self._control),
            ("the directory watch", partial(watch, Path(self.settings.socket_dir), self._look)),
            ("the lock of the directory", partial(self._keep_the_node, self._look)),
            ("the watch on the state directory", partial(watch, self._state.path, self._state_look, consequence)),
            ("the lock of the state directory", partial(self._keep_the_node, self._state_look)),
            ("the watch on other plugins", self._watch_plugins),
            ("the state directory", self._recorder.run),
            ("the event store", self._events.store.run),
            ("the configuration watch", self.configuration.watch),
            ("the configuration", self._configure),
            ("the health reports", partial(self._health.tell, self._recorder.written, self._inventory.health_changed)),
            ("the search for faulting pods", self._pods.run),
            ("the query which pods hold what", self._attribution.run),
            ("the retirement of devices", self._offering.settle),
            ("the watch on MPS daemons", self._offering.watch_mps),
            ("the CDI specifications", self._keep_specs),
            ("the reports to the cluster", self._cluster.run),
            ("the endpoints", self._serve),
            ("the labels of the node", self._labels.run),
        ):
            self._parts.start_soon(forever, name, run)
        await self._specs.recall()
        await self._discovery.find(self._now.monitor)
        await forever("the GPU monitor", self._now.monitor.run)

    async def _have_the_node(self) -> None:
        """Waits until no other daemon has this node; until then nothing is read, written or served."""
        async with AsyncExitStack() as meanwhile:
            while why := self._lock.take():
                if why != self._now.waits_for:
                    log.warning("waiting: %s", why)
                if self._lock.has_state and not self._now.waits_for:  # else the other one answers there
                    make_way(self.settings)
                    refusals = serve_refusals(
                        Path(self.settings.state_dir),
                        lambda: f"this daemon waits: {self._now.waits_for}",
                        {"status": self._view.waiting},
                    )
                    await meanwhile.enter_async_context(refusals)
                self._now.waits_for = why
                await anyio.sleep(RETRY)
        if self._now.waits_for:
            log.info("the other daemon has ended; starting")
        self._now.waits_for = ""

    async def _keep_the_node(self, bell: Pulse) -> None:
        """Has what this daemon knows written down again, and commands reach it, where its files or directories are gone.

        Ends this daemon where a directory was recreated and another daemon has it by now: a restart waits for it.
        """
        while not (why := self._lock.follow()):
            self.hardware.keep()
            self._recorder.look()
            self._events.store.look()
            self.configuration.look()
            self._commands_look.ring()
            await bell.wait(LONGEST_RETRY)
        log.error("%s; ending, so that a restart waits for it", why)
        self._parts.cancel_scope.cancel()

    async def _signals(self) -> None:
        self._why_stopped = await told_to_stop(self.configuration.ask)
        self._told_to_stop = True
        if self._listener is not None:
            self._listener.stop()
        self._parts.cancel_scope.cancel()

    async def _serve(self) -> None:
        registration = Path(self.settings.registration_socket) if self.settings.registration_socket else None
        directory = Path(self.settings.socket_dir)
        registered = self._specs.registered.set
        shared = Shared(self.store, registration, directory, self._look, registered, self._registrations, self._counts)
        await Endpoints(shared).run()

    async def _watch_plugins(self) -> None:
        from gpu_plugin.kubelet.takeover import TakeoverWatch  # noqa: PLC0415 - pods need not wait for it

        def socket() -> Path:
            return Path(self.settings.effective_pod_resources_socket)

        await TakeoverWatch(self.store, self._registrations, socket, self._look.ring).run()

    async def _control(self) -> None:
        """Answers commands; another daemon on the same state directory is waited out."""
        verbs = {name: self._then_look(verb) for name, verb in self.hardware.verbs.items()}
        verbs |= {**self._operations.verbs, "explain": self._view.explain}
        events = self._events
        verbs = {n: events.order(n, verb) if n in LOGGED_VERBS else events.resolved(verb) for n, verb in verbs.items()}
        verbs |= {"status": self._view.status, "topology": self._view.topology, "events": events.answer}
        while True:
            make_way(self.settings)
            try:
                async with serve(Path(self.settings.state_dir), verbs) as stands:
                    while stands():
                        await self._commands_look.wait(LONGEST_RETRY)
                log.warning("the control socket was removed, renamed or replaced: it is made again")
            except ConfigError as error:
                log.warning("commands cannot reach this daemon: %s", error)
                await anyio.sleep(LONGEST_RETRY)

    def _then_look(self, verb: Verb) -> Verb:
        """The verb, after which the GPUs are looked at: whatever it did to them need not wait for their turn."""

        async def acted(request: Mapping[str, object]) -> Mapping[str, object]:
            reply = await verb(request)
            if self._now.monitor is not None:
                self._now.monitor.look_now()
            return reply

        return acted

    async def _keep_specs(self) -> None:
        try:
            await self._specs.run()
        finally:
            if self._told_to_stop and self.settings.cdi_remove_on_exit:
                await self._specs.remove()

    def _observe(self, uuid: str, error: ApplicationError) -> None:
        self._health.observe(uuid, error)

    def _page(self) -> "Source":
        from gpu_plugin.telemetry.listener.status_page import Source  # noqa: PLC0415 - only who has a listener pays for it

        return Source(
            on=lambda: self.settings.status_page,
            names=lambda: (*self.settings.status_page_hosts, (self.settings.node_name or socket.gethostname()).lower()),
            held=self._held_by_containers,
            material=self._view.material,
            news=self._events.store.news,
        )

    async def _held_by_containers(self) -> tuple[HoldersByDevice | None, str]:
        if not self.settings.pod_metrics:
            return None, "naming pods is switched off (--pod-metrics=false)"
        held = await self._attribution.current()
        return held, "" if held is not None else self._attribution.trouble

    def _known(self) -> Known:
        inventory = self._inventory
        return Known(
            self._health.ledger.revision, self._health.evidence(), self._now.node, inventory.listed, inventory.foreign
        )

    async def _configure(self) -> None:
        def was_read() -> None:
            self._events.configuration(self.configuration.status())
            self._cluster.changed()

        await self.configuration.run(self._discovery.take, was_read)


def make_way(settings: Settings) -> None:
    """Puts aside what stands in the control socket's place and is none."""
    set_aside(Path(settings.state_dir) / SOCKET, stat.S_ISSOCK)
