"""The daemon of one node: creates the parts and runs them together in one task group.

    Configuration ──settings──▶ offer ◀──────node────── Monitor ──observations──▶ HealthWatch
                                  │                                                   │ reasons
                                  ▼                                                   ▼
    PodResources ──who holds──▶ Inventory ──▶ SnapshotStore ──▶ Endpoints, one a resource ──▶ kubelet

A part that fails is started again. The other parts continue.
"""

import logging
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
from msgspec.structs import replace

from gpu_plugin import __version__
from gpu_plugin.cluster.labels.keeper import NodeLabels
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings
from gpu_plugin.containers.cdi_files.watch import CdiWatch
from gpu_plugin.daemon.cluster_reporting import ClusterReporting
from gpu_plugin.daemon.commands import Commands
from gpu_plugin.daemon.configuration import Configuration
from gpu_plugin.daemon.discovery import Discovery, NoDriverError
from gpu_plugin.daemon.event_log import EventLog
from gpu_plugin.daemon.faulting_pods import FaultingPods
from gpu_plugin.daemon.hardware import Hardware
from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.daemon.knowledge import NodeKnowledge
from gpu_plugin.daemon.listener_content import ListenerContent
from gpu_plugin.daemon.node_view import NodeView
from gpu_plugin.daemon.now import Now
from gpu_plugin.daemon.offering import Offering
from gpu_plugin.daemon.opened_state import STATE_PATIENCE, Next, OpenedState, Recalled, recall
from gpu_plugin.daemon.operations import Operations
from gpu_plugin.daemon.reported_errors import ReportedErrors
from gpu_plugin.daemon.status_answers import StatusAnswers
from gpu_plugin.daemon.takeover import Takeover, TakeoverError
from gpu_plugin.kubelet.attribution import PodAttribution
from gpu_plugin.kubelet.counts import KubeletCounts
from gpu_plugin.kubelet.directory import watch
from gpu_plugin.kubelet.endpoint import Endpoints, Shared
from gpu_plugin.kubelet.inventory import Inventory
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.kubelet.snapshot import SnapshotStore
from gpu_plugin.nvml.call_times import CallTimes
from gpu_plugin.nvml.monitor import Monitor
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.signals import Signals
from gpu_plugin.runtime.supervision import LONGEST_RETRY, PartGroup, forever
from gpu_plugin.runtime.threads import NoAnswerError, SlowCall, begin
from gpu_plugin.state.directory import StateDirectory
from gpu_plugin.state.event_store import EventStore
from gpu_plugin.state.memory import Memory
from gpu_plugin.state.node_lock import RETRY, NodeLock, Outcome
from gpu_plugin.state.recorder import Recorder
from gpu_plugin.telemetry.listener.listener import Listener

log = logging.getLogger(__name__)

LAST_SAVE = 0.5
"""Limit in seconds for the write of the last events at the exit."""


class Daemon:
    """One node's plugin, from start to clean exit."""

    def __init__(
        self,
        configuration: Configuration,
        hardware: Hardware,
        listener: Listener | None = None,
        begins: Next | None = None,
    ) -> None:
        """`listener` answers probes and scrapes, and stops with this daemon.

        `begins` is how this daemon begins if another daemon of this process ran before.
        """
        begins = begins or Next()
        opened = begins.opened
        self._opened = opened
        self._claims = begins.claims
        self._next: Next | None = None
        """Set if this daemon has to end for the next daemon of this process."""
        self._handed_over = False
        """Whether the state directory belongs to a daemon of another process."""
        self.configuration = configuration
        self.hardware = hardware
        self._listener = listener
        state_dir, socket_dir = Path(self.settings.state_dir), Path(self.settings.socket_dir)
        settings, boot_id = configuration.store, hardware.host.boot_id()
        self._state = StateDirectory(state_dir)
        self._memory = Memory(self._state, boot_id) if opened is None else opened.memory
        self._lock = NodeLock(state_dir, socket_dir, __version__) if opened is None else opened.lock
        self._now = Now()
        self._counts = KubeletCounts()
        call_times = CallTimes(settings)

        # The kubelet's side: the lists, which pods hold devices, and the registrations.
        self.store = SnapshotStore()
        self._registrations = Registrations()
        self._attribution = PodAttribution(settings)

        # Health and its memory. Each change of evidence, hardware or lists rings `unsaved`.
        unsaved, errors = Pulse(), ReportedErrors()
        self._health = HealthWatch(self.settings, boot_id, unsaved, errors)
        self._pods = FaultingPods(errors, self._attribution, self.store, self._health)
        self._inventory = Inventory(self.store, self._health.ledger.health)
        self._offering = Offering(self._inventory, settings, unsaved, self._registrations)
        self._recorder = Recorder(self._memory, NodeKnowledge(self._health, self._inventory, self._now), unsaved)

        # Orders, events, and the reports to the cluster.
        self._operations = Operations(self._health, self._now, self._recorder)
        event_store = EventStore(self._memory.log, time.time) if opened is None else opened.events
        self._events = EventLog(event_store, self._operations)
        self._cluster = ClusterReporting(
            configuration=configuration,
            health=self._health,
            store=self.store,
            attribution=self._attribution,
            now=self._now,
        )
        self._health.reports.subscribe(self._events.health)
        self._health.reports.subscribe(self._cluster.health_changed)
        self._registrations.subscribe(self._events.registration)

        # The parts that follow hardware and settings.
        self._labels = NodeLabels(settings, hardware.host, self._state)
        self._specs = CdiWatch(settings.current, hardware.host, hardware.driver_roots, self._inventory.cdi_changed)
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
            unsaved=unsaved,
            call_times=call_times,
        )

        # The life of the daemon, and the commands of operators.
        self._stop_requested = False
        self._state_call: SlowCall[Any] = SlowCall("state")
        self._recalled = False
        self._socket_dir_changed = Pulse()
        self._claimed = Pulse()
        self._state_dir_changed = Pulse()
        self._takeover = Takeover(
            self._lock, self._now, self._health, self._inventory, self._registrations, self._memory, self._recorder
        )
        self._view = NodeView(
            now=self._now,
            configuration=configuration,
            health=self._health,
            operations=self._operations,
            inventory=self._inventory,
            offering=self._offering,
            cluster=self._cluster,
            labels=self._labels,
            events=self._events,
            recorder=self._recorder,
            registrations=self._registrations,
            attribution=self._attribution,
            counts=self._counts,
            call_times=call_times,
        )
        self._answers = StatusAnswers(self._view)
        self._content = ListenerContent(configuration.store, self._view, self._answers)
        self._commands = Commands(
            state_dir,
            hardware.verbs,
            self._operations,
            self._view,
            self._answers,
            self._events,
            self._takeover,
            self._now,
        )

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self.configuration.settings

    async def run(self, signals: Signals) -> int | Next:
        """Run until a signal and return the exit status, or return the next daemon of this process if it has to start.

        The next daemon starts if this daemon served without the state directory and the directory answers again, and if the
        node was handed over to a daemon of another process.
        """
        status, why_stopped = 0, "ended without a signal"

        def stop() -> None:
            self._stop_requested = True
            if self._listener is not None:
                self._listener.stop()
            parts.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as parts:
                self._parts = parts
                if self._listener is not None:
                    self._listener.ask(self._content)
                signals.on_stop(stop)
                signals.on_reload(self.configuration.request_read)
                parts.start_soon(self._begin)
        except* (NoDriverError, ConfigError, TakeoverError) as group:
            for error in group.exceptions:
                for line in str(error).splitlines():
                    log.error("%s", line)  # noqa: TRY400 - the sentence is for people; a trace would hide it
                why_stopped = str(error)
            status = 2 if group.subgroup(ConfigError) else 1
        finally:
            if self._recalled and not self._handed_over:  # else the file would lose the events that were not read
                self._events.daemon(f"stopped: {signals.stopped_by or why_stopped}")
                with anyio.CancelScope(shield=True):
                    await self._events.store.save_within(LAST_SAVE)
            if self._next is None or self._next.opened is None:
                self._lock.release()
        if self._next is not None and status == 0 and not self._stop_requested:
            call = "write to the state directory" if self._recorder.writes else "call to the driver"
            if not self._recorder.writes and await self._driver_closed():
                return self._next
            why_stopped = f"a {call} does not return; ending, so that a new process starts with the stored state"
        self._lock.release()
        if status == 0 and not self._stop_requested:
            log.error("%s", why_stopped)
            status = 1
        log.info("stopped")
        return status

    async def _driver_closed(self) -> bool:
        return self._now.monitor is None or await self._now.monitor.shut()

    async def _begin(self) -> None:
        log.info("gpu-plugin %s starting", __version__)
        if self._opened is None:
            try:
                await self._takeover.wait_for_node(
                    Path(self.settings.state_dir), self._state_call, self._answers.waiting, claims=self._claims
                )
                recalled: Recalled = await self._state_call.joined(self._recall, STATE_PATIENCE)
            except NoAnswerError as error:
                await self._serve_without_memory(str(error))
                return
        else:
            recalled = self._opened.recalled
        self._recalled = True
        self._events.daemon(f"gpu-plugin {__version__} started, process {os.getpid()}")
        unasked = "the driver has not been asked about it yet"
        gpus = tuple(replace(gpu, unreadable=unasked) for gpu in recalled.gpus)
        self._health.restore(recalled.evidence, gpus)
        self._inventory.remember(recalled.devices.listed, recalled.devices.foreign)
        self._inventory.found(self._health.gpus)
        monitor = self._now.monitor = self._discovery.monitor(recalled.gpus, recalled.before)
        consequence = "a restart loses the changes of state"
        self._keepers = PartGroup(
            self._parts,
            ("the control socket", self._commands.run),
            ("the lock of the directory", partial(self._keep_node, self._socket_dir_changed)),
            (
                "the watch on the state directory",
                partial(watch, self._state.path, self._state_dir_changed, consequence),
            ),
            ("the lock of the state directory", partial(self._keep_node, self._state_dir_changed)),
            ("the watch on other plugins", self._watch_plugins),
            ("the state directory", self._recorder.run),
            ("the event store", self._events.store.run),
            ("the search for faulting pods", self._pods.run),
            ("the CDI specifications", self._keep_specs),
            ("the reports to the cluster", self._cluster.run),
            ("the labels of the node", self._labels.run),
        )
        self._keepers.start()
        self._start_serving()
        self._parts.start_soon(forever, "the watch on MPS daemons", self._offering.watch_mps)
        self._parts.start_soon(self._takeover.until_over)
        self._parts.start_soon(self._hand_over)
        await self._specs.recall()
        await self._watch_gpus(monitor)

    def _start_serving(self) -> None:
        """Start the parts that serve the kubelet, with or without the memory of earlier processes."""
        self._servers = PartGroup(
            self._parts,
            ("the directory watch", partial(watch, Path(self.settings.socket_dir), self._socket_dir_changed)),
            ("the endpoints", self._serve),
        )
        self._servers.start()
        others = (
            ("the configuration watch", self.configuration.watch),
            ("the configuration", self._configure),
            ("the health of the listed devices", partial(self._health.publish, self._recorder, self._inventory)),
            ("the query which pods hold devices", self._attribution.run),
            ("the offers and the retirement of devices", self._offering.settle),
        )
        for name, run in others:
            self._parts.start_soon(forever, name, run)

    async def _hand_over(self) -> None:
        """Hand the node over to a new daemon that claims it. End this daemon when the new daemon serves."""
        while True:
            await self._claimed.wait()
            if not self._takeover.serves_pods:
                log.info(
                    "a new daemon asks for the node, and pods get no device from this daemon: ending for the new one"
                )
                break
            await self._takeover.over.wait()
            if not self._lock.write_leaving(leaving=True):
                continue
            self._events.daemon("a new daemon takes over")
            await self._keepers.end()
            await self._events.store.save_within(LAST_SAVE)
            # A write that hangs may end after the new daemon has written.
            if self._recorder.writes or not self._memory.log.release():
                log.warning("the state directory does not answer, so the node is not handed over")
                self._lock.write_leaving(leaving=False)
                self._keepers.start()
                await self._recorder.hanging_writes()
                await self._events.store.hanging_write()
                continue
            self._handed_over = True
            outcome = await self._takeover.hand_over()
            if outcome is Outcome.NEW_SERVES:
                break
            self._handed_over = False
            if outcome is Outcome.REGISTERED:
                await self._servers.end()  # each registration needs its own socket
                self._servers.start()
            self._keepers.start()  # last: the next claim may be there
        self._next = Next(claims=False)
        self._parts.cancel_scope.cancel()

    async def _watch_gpus(self, monitor: Monitor) -> None:
        await self._discovery.find(monitor)
        await forever("the GPU monitor", monitor.run)

    def _recall(self) -> Recalled:
        return recall(self._state, self._memory, self._events.store)

    async def _serve_without_memory(self, why: str) -> None:
        """Serve the kubelet, with every device Unhealthy, while the state directory does not answer.

        Write nothing to the state directory: a write would replace the memory of earlier processes. Never returns. This daemon
        ends when the state directory answers.
        """
        self._now.memory = f"the state directory {self.settings.state_dir} does not answer ({why})"
        consequence = (
            "so it is not known which GPUs have a fault, are cordoned or are held by pods, and all are withheld"
        )
        log.error(
            "%s, %s until it answers: check its disk. The resources are registered nevertheless",
            self._now.memory,
            consequence,
        )
        self._health.ledger.withhold(f"{self._now.memory}, {consequence}")
        self._parts.start_soon(self._end_once_state_answers)
        while held_by := await begin(self._lock.take_directory, "directory-lock").result():
            if held_by != self._now.waits_for:
                log.warning("waiting: %s", held_by)
            self._now.waits_for = held_by
            # Not in a blocking call: this daemon may end before the lock is free, and the next daemon of this process needs it.
            await anyio.sleep(RETRY)
        self._now.waits_for = ""
        monitor = self._now.monitor = self._discovery.monitor(())
        self._start_serving()
        await self._watch_gpus(monitor)

    async def _end_once_state_answers(self) -> None:
        """End this daemon when the state directory is locked and read, however long both take.

        The next daemon starts with the content that was read. If it had to read again, no GPU would ever be offered on a node
        whose disk always takes longer than STATE_PATIENCE.
        """
        outcome: Recalled | str = await self._state_call.joined(self._lock.take, math.inf)  # or the call under way
        if outcome == "":
            outcome = await self._state_call.joined(self._recall, math.inf)
        opened = None
        if isinstance(outcome, Recalled):
            opened = OpenedState(self._lock, self._memory, self._events.store, outcome)
        log.info(
            "the state directory %s answers again: restarting the daemon with its content", self.settings.state_dir
        )
        self._next = Next(opened, self._claims)
        self._parts.cancel_scope.cancel()

    async def _keep_node(self, changed: Pulse) -> None:
        """Restore the state files and the control socket if files or directories of this daemon are gone.

        End this daemon if a directory was recreated and another daemon has locked it: a restart waits for that daemon.
        """
        while not (why := self._lock.follow()):
            if self._lock.claimed():
                self._claimed.ring()
            self.hardware.keep()
            self._recorder.look()
            self.configuration.check_stored_choice()
            self._commands.check_socket.ring()
            await changed.wait(LONGEST_RETRY)
        log.error("%s; ending, so that a restart waits for it", why)
        self._parts.cancel_scope.cancel()

    async def _serve(self) -> None:
        registration = Path(self.settings.registration_socket) if self.settings.registration_socket else None
        directory = Path(self.settings.socket_dir)
        registered = self._specs.registered
        if self._lock.former_serves:  # a registration would replace the former daemon's list
            await self._takeover.may_register.wait()
        shared = Shared(
            self.store, registration, directory, self._socket_dir_changed, registered, self._registrations, self._counts
        )
        await Endpoints(shared).run()

    async def _watch_plugins(self) -> None:
        from gpu_plugin.kubelet.takeover import TakeoverWatch  # noqa: PLC0415 - the import would delay the first list

        settings = self.configuration.store
        await TakeoverWatch(self.store, self._registrations, settings, self._socket_dir_changed, self._counts).run()

    async def _keep_specs(self) -> None:
        try:
            await self._specs.run()
        finally:
            in_use = self._lock.former_serves  # by the former daemon, which continues
            if self._stop_requested and self.settings.cdi_remove_on_exit and not in_use:
                await self._specs.remove()

    async def _configure(self) -> None:
        """Put new configurations in force, and report each attempt to the events and the cluster."""
        while True:
            await self.configuration.update(self._discovery)
            self._events.configuration(self.configuration.status())
            self._cluster.changed()
