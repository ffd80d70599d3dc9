"""The daemon: builds the parts and lets them run together. The only module that knows all others.

    Configuration ──settings──▶ offer ◀──────node────── Monitor ──observations──▶ HealthWatch
                                  │                                                   │ reasons
                                  ▼                                                   ▼
    PodResources ──who holds──▶ Inventory ──▶ SnapshotStore ──▶ Endpoints, one a resource ──▶ kubelet

One task group holds every part. A part that fails is begun again and takes no other with it.
"""

import gc
import importlib.util
import logging
import os
import random
import socket
import stat
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.abc
from msgspec.structs import replace

from gpu_plugin import __version__, control
from gpu_plugin.cdi.watch import CdiWatch
from gpu_plugin.cluster.labels.keeper import NodeLabels
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings
from gpu_plugin.daemon.cluster_reporting import ClusterReporting
from gpu_plugin.daemon.event_log import ORDERS, EventLog
from gpu_plugin.daemon.faulting_pods import FaultingPods
from gpu_plugin.daemon.hardware import Hardware, hardware_for
from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.daemon.node_view import NodeView, Now, without_configuration
from gpu_plugin.daemon.offering import Offering
from gpu_plugin.daemon.operations import Operations
from gpu_plugin.devices.naming import is_placeholder
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.health.observation import Observation
from gpu_plugin.inventory.inventory import Inventory
from gpu_plugin.inventory.offer import Offer, offer, without_gone
from gpu_plugin.inventory.snapshot import SnapshotStore
from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.attribution import HoldersByDevice, PodAttribution
from gpu_plugin.kubelet.counts import KubeletCounts
from gpu_plugin.kubelet.directory import watch
from gpu_plugin.kubelet.endpoint import Endpoints
from gpu_plugin.kubelet.holders import Pods
from gpu_plugin.kubelet.pod_listing import pods
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.nvml.call_times import CallTimes
from gpu_plugin.nvml.monitor import Monitor
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.runtime.backoff import ON_NODE, Backoff
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.signals import told_to_stop
from gpu_plugin.runtime.supervision import FIRST_RETRY, LONGEST_RETRY, forever
from gpu_plugin.sources.configuration import Configuration, Resolve, Wait, begin_with, tell_settings
from gpu_plugin.sources.list_strategy import ListStrategy, tell
from gpu_plugin.state.directory import StateDirectory, require_apart, require_directory, set_aside
from gpu_plugin.state.event_store import EventStore
from gpu_plugin.state.memory import Memory
from gpu_plugin.state.node_lock import RETRY, NodeLock
from gpu_plugin.state.recorder import Known, Recorder
from gpu_plugin.telemetry.listener.listener import Listener
from gpu_plugin.telemetry.logs import configure, know
from gpu_plugin.uninstall.state_files import FILES

if TYPE_CHECKING:
    from gpu_plugin.telemetry.listener.checks import Facts
    from gpu_plugin.telemetry.listener.status_page import Source

log = logging.getLogger(__name__)

UNCHANGEABLE = (
    "socket_dir",
    "registration_socket",
    "state_dir",
    "simulate",
    "driver_root",
    "dev_root",
    "driver_root_ctr_path",
    "device_discovery_strategy",
    "event_loop",
    "cdi_dir",
    "http_address",
)
"""Settings that a running process cannot change, besides where they come from."""


class NoDriverError(Exception):
    """There is nothing to serve and the operator wants to hear of it at once: what to do, then why, a line each."""


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
        self._pods = FaultingPods(self._holding_pods, lambda: self.store.current, self._health_seen)
        self._health = HealthWatch(self.settings, hardware.host.boot_id(), self._recorder.changed, self._pods.heard)
        self._health.reports.subscribe(self._events.health)
        self._operations = Operations(self._health, lambda: self._now.monitor, self._recorder.written)
        self._inventory = Inventory(self.store, self._health.ledger.health)
        self._offering = Offering(
            self._inventory, lambda: self.settings, self._recorder.changed, self._registrations.heard
        )
        self._attribution = PodAttribution(lambda: Path(self.settings.effective_pod_resources_socket))
        self._counts = KubeletCounts()
        self._call_times = CallTimes(lambda: self.settings.nvml_timeout)
        self._cluster = ClusterReporting(
            settings=lambda: self.settings,
            health=self._health,
            store=self.store,
            holders=self._attribution.newest,
            trouble=lambda: self._now.driver_trouble,
            node=configuration.node,
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
        self._view = NodeView(
            now=self._now,
            configuration=configuration,
            store=self.store,
            inventory=self._inventory,
            health=self._health,
            operations=self._operations,
            registrations=self._registrations,
            recorder=self._recorder,
            events=self._events.store,
            cluster=self._cluster,
            labels=self._labels,
            holding_pods=self._holding_pods,
            attribution=self._attribution,
            counts=self._counts,
            call_times=self._call_times,
        )

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
        wire.warm()
        self._inventory.found(self._health.gpus)
        self._now.monitor = self._make_monitor(remembered)
        for name, run in (
            ("the control socket", self._control),
            ("the directory watch", self._watch),
            ("the lock of the directory", partial(self._keep_the_node, self._look)),
            ("the watch on the state directory", self._watch_state),
            ("the lock of the state directory", partial(self._keep_the_node, self._state_look)),
            ("the watch on other plugins", self._watch_plugins),
            ("the state directory", self._recorder.run),
            ("the event store", self._events.store.run),
            ("the configuration watch", self.configuration.watch),
            ("the configuration", self._configure),
            ("the health reports", self._tell_health),
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
        await self._find_gpus(self._now.monitor)
        await forever("the GPU monitor", self._now.monitor.run)

    async def _have_the_node(self) -> None:
        """Waits until no other daemon has this node; until then nothing is read, written or served."""
        async with AsyncExitStack() as meanwhile:
            while why := self._lock.take():
                if why != self._now.waits_for:
                    log.warning("waiting: %s", why)
                if self._lock.has_state and not self._now.waits_for:  # else the other one answers there
                    _make_way(self.settings)
                    refusals = control.serve_refusals(
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

        Ends this daemon where a directory was made anew and another one has it by now: a restart waits its turn. Looks whenever
        `bell` rings.
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
        await Endpoints(
            self.store, registration, directory, self._look, registered, self._registrations, self._counts
        ).run()

    async def _watch_state(self) -> None:
        await watch(Path(self.settings.state_dir), self._state_look, "a restart forgets what happens")

    async def _watch(self) -> None:
        await watch(Path(self.settings.socket_dir), self._look)

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
        verbs = {n: events.order(n, verb) if n in ORDERS else events.resolved(verb) for n, verb in verbs.items()}
        verbs |= {"status": self._view.status, "topology": self._view.topology, "events": events.answer}
        while True:
            _make_way(self.settings)
            try:
                async with control.serve(Path(self.settings.state_dir), verbs) as door:
                    while door.stands:
                        await self._commands_look.wait(LONGEST_RETRY)
                log.warning("the control socket was removed, renamed or replaced: it is made again")
            except ConfigError as error:
                log.warning("commands cannot reach this daemon: %s", error)
                await anyio.sleep(LONGEST_RETRY)

    def _then_look(self, verb: control.Verb) -> control.Verb:
        """The verb, after which the GPUs are looked at: whatever it did to them need not wait for their turn."""

        async def acted(request: Mapping[str, object]) -> Mapping[str, object]:
            reply = await verb(request)
            if self._now.monitor is not None:
                self._now.monitor.look_now()
            return reply

        return acted

    def _make_monitor(self, remembered: Sequence[Gpu]) -> Monitor:
        return Monitor(
            self._call_times.timed(self.hardware.driver),
            self.hardware.host,
            self.settings.health_poll_interval,
            self.settings.nvml_timeout,
            remembered,
            self._health.observe,
            self._found,
            retention=self.settings.vanished_gpu_retention,
            judging=self._health.ledger.policy.judging,
            released=self._operations.begin(),
            booted=self._booted,
            met=self._health.watch,
            boot_id=self._health.ledger.boot_id,
        )

    async def _find_gpus(self, monitor: Monitor) -> None:
        """Opens the driver, again and again if need be, until there are GPUs to serve."""
        backoff, said = Backoff(FIRST_RETRY, LONGEST_RETRY, ON_NODE), ""
        while True:
            try:
                node = await monitor.open()
            except (NvmlError, TimeoutError) as error:
                trouble = f"the NVIDIA driver cannot be used: {error}"
            except ConfigError:
                raise
            except Exception as error:
                log.exception("looking for GPUs failed unexpectedly")
                trouble = f"the NVIDIA driver cannot be used: {error!r}"
            else:
                if node.gpus:
                    self._now.driver = ""
                    return
                trouble = "the NVIDIA driver finds no GPU on this node"
            if trouble != said:
                self._events.daemon(trouble)
            self._now.driver = trouble
            if self.settings.fail_on_init_error:
                raise NoDriverError(
                    "no GPU can be served: see whether the driver is installed and loaded (does nvidia-smi work on the node?), "
                    "and in a container whether its root is mounted at --driver-root-ctr-path; gpu-plugin doctor says more. "
                    "On nodes without a GPU, do not run this plugin, or run it with --fail-on-init-error=false\n"
                    + trouble,
                )
            level = logging.DEBUG if trouble == said else logging.WARNING  # the same is worth a line once
            pause = backoff.failed(anyio.current_time(), random.random())  # noqa: S311 - spreads retries, keeps no secret
            log.log(level, "%s; looking again in %.2g s, then at growing intervals", trouble, pause)
            said = trouble
            await anyio.sleep(pause)

    # The hardware

    def _found(self, node: Node) -> None:
        """Takes in what the monitor found, and offers what it is good for. What cannot be offered changes nothing there.

        Raises:
            ConfigError: at the first time, where the settings ask for what the node does not have.
        """
        first = not self._now.node.gpus
        know(node.gpus)
        if first and node.gpus:
            _tell_hardware(node, self.hardware.library())
        for old, new in _named(self._now.node, node):
            self._health.rename(old, new)
        found: Offer | None
        self._now.unoffered = ""
        try:
            found = offer(node, self.settings, self.hardware.dev_root, self._inventory.offer.placement)
            self._inventory.check(found)
        except ConfigError as error:
            if first and not self.settings.config_file_srcdir:
                raise
            log.error("%s; what was served before is still served, except what is gone", error)  # noqa: TRY400
            self._now.unoffered = str(error)
            found = None if first else without_gone(self._inventory.offer, node)
        if self._now.node.links and node.links != self._now.node.links:
            _tell_links(self._now.node, node)
        self._now.node = node
        self._health.watch(node.gpus)
        self._inventory.found(node.gpus)
        self._operations.found()
        self._cluster.changed()
        if found is not None:
            self._offering.take(found)
        self._specs.follow(self._now.node, None if found is None else found.access)
        self._labels.follow(self._now.node)

    def _booted(self, boot_id: str) -> None:
        self._memory.booted(boot_id)
        self._operations.booted()
        self._health.booted(boot_id)

    async def _keep_specs(self) -> None:
        try:
            await self._specs.run()
        finally:
            if self._told_to_stop and self.settings.cdi_remove_on_exit:
                await self._specs.remove()

    # Health

    async def _tell_health(self) -> None:
        await self._health.tell(self._recorder.written, self._inventory.health_changed)

    def _health_seen(self, uuid: str, seen: Observation) -> None:
        self._health.observe(uuid, seen)

    async def _holding_pods(self) -> Pods | None:
        held = await self._attribution.newest()
        return None if held is None else pods(held)

    # What is shown

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

    # Memory

    def _known(self) -> Known:
        inventory = self._inventory
        return Known(
            self._health.ledger.revision, self._health.evidence(), self._now.node, inventory.listed, inventory.foreign
        )

    # Configuration

    async def _configure(self) -> None:
        def was_read() -> None:
            self._events.configuration(self.configuration.status())
            self._cluster.changed()

        await self.configuration.run(self._take_settings, was_read)

    def _take_settings(self, new: Settings) -> None:
        """Has newer settings obeyed. Raises ConfigError, with nothing changed, where the node cannot do what they ask."""
        placement = self._inventory.offer.placement
        found = offer(self._now.node, new, self.hardware.dev_root, placement) if self._now.node.gpus else None
        if found is not None:
            self._inventory.check(found)
            self._now.unoffered = ""
        if new.device_list_strategy_reason != self.settings.device_list_strategy_reason:
            tell(new)
        self._health.take(new)
        configure(new.log_format, new.log_level)
        if self._now.monitor is not None:
            judging = self._health.ledger.policy.judging
            self._now.monitor.retune(
                new.health_poll_interval, new.nvml_timeout, new.vanished_gpu_retention, judging=judging
            )
        if found is not None:
            self._offering.take(found)
        self._specs.follow(self._now.node, None if found is None else found.access)
        self._labels.follow(self._now.node)


def _make_way(settings: Settings) -> None:
    """Puts aside what stands in the control socket's place and is none."""
    set_aside(Path(settings.state_dir) / control.SOCKET, stat.S_ISSOCK)


def _named(before: Node, after: Node) -> list[tuple[str, str]]:
    """Placeholders of `before` with the uuids that the GPUs of those indices have now."""
    present = {gpu.uuid for gpu in after.gpus}
    by_index = {gpu.index: gpu.uuid for gpu in after.gpus}
    gone = [gpu for gpu in before.gpus if is_placeholder(gpu.uuid) and gpu.uuid not in present]
    return [(gpu.uuid, by_index[gpu.index]) for gpu in gone if gpu.index in by_index]


def _tell_hardware(node: Node, library: str) -> None:
    """One line that says what is served: driver, library, and how many GPUs of which model."""
    models = Counter(gpu.model or "of an unknown model" for gpu in node.gpus)
    told = ", ".join(f"{count} x {model}" for model, count in models.items())
    version = node.driver_version or "of an unknown version"
    fields = {"driver": node.driver_version, "library": library, "model": ", ".join(models)}
    log.info("driver %s, library %s, GPUs: %s", version, library or "not known", told, extra=fields)


def _tell_links(before: Node, after: Node) -> None:
    from gpu_plugin.placement.views.matrix import changed_links  # noqa: PLC0415 - hardly any daemon ever has need of it

    if changed := changed_links(before, after):
        log.info("links between GPUs have changed: %s", changed)


def _awaiting(why: str, *, tried: bool = False) -> "Facts":
    """What probes are answered by until there is a daemon."""
    from gpu_plugin.telemetry.listener.checks import Facts  # noqa: PLC0415 - only who has a listener pays for it

    return Facts(awaited=why, tried=tried)


async def serve(settings: Settings, resolve: Resolve) -> int:
    """Runs the daemon with these settings until a signal ends it. Returns the exit status.

    Where the node's label chooses the configuration, it begins once there is a good one; probes are answered meanwhile where
    flags or environment say on which address.
    """
    refused: ConfigError | None = None
    status = 0
    async with anyio.create_task_group() as around:
        try:
            status = await _serve(settings, resolve, Listener(around))
        except ConfigError as error:  # which a task group would wrap
            refused = error
        around.cancel_scope.cancel()
    if refused is not None:
        raise refused
    return status


async def _serve(settings: Settings, resolve: Resolve, listener: Listener) -> int:
    require_directory(Path(settings.state_dir))
    require_apart(Path(settings.state_dir), Path(settings.socket_dir))
    wait = Wait()
    listener.begin(settings.http_address, lambda: _awaiting(wait.why, tried=wait.tried))
    async with AsyncExitStack() as waiting:
        if settings.config_file_srcdir:
            why = "nothing is served yet, since there is no configuration"
            _make_way(settings)
            asked, started = settings, time.time()

            async def status(_: Mapping[str, object]) -> Mapping[str, object]:
                return without_configuration(asked, wait, started)

            refusals = control.serve_refusals(
                Path(settings.state_dir), lambda: f"{why}: {wait.why}", {"status": status}
            )
            await waiting.enter_async_context(refusals)
        begun = await begin_with(settings, resolve, wait)
    if begun is None:
        log.info("stopped")
        return 0
    settings, source = begun
    require_apart(Path(settings.state_dir), Path(settings.socket_dir))
    configure(settings.log_format, settings.log_level)
    looking = "the node's files are looked at for --device-list-strategy auto"
    listener.begin(settings.http_address, lambda: _awaiting(looking))
    strategy = ListStrategy()
    settings = await strategy.settle(settings)
    tell_settings(settings, source.current())
    tell(settings)
    configuration = Configuration(settings, source, strategy.settling(resolve), UNCHANGEABLE)
    return await Daemon(configuration, hardware_for(settings), listener).run()


def run(settings: Settings, resolve: Resolve) -> int:
    """`serve` on an event loop of its own. Raises ConfigError where the loop that is asked for is not installed."""
    if settings.event_loop == "uvloop" and importlib.util.find_spec("uvloop") is None:
        raise ConfigError("--event-loop: uvloop is not installed; install gpu-plugin[uvloop], or use asyncio")
    os.umask(0o022)
    status = anyio.run(serve, settings, resolve, backend_options={"use_uvloop": settings.event_loop == "uvloop"})
    gc.freeze()  # at its end the interpreter would search every object for cycles: 0.1 s of a node's shutdown
    return status
