"""The daemon: builds the parts and lets them run together. The only module that knows all others.

    Monitor ──observations──▶ HealthLedger ──reasons──▶ SnapshotStore ──▶ ResourceEndpoint of each resource ──▶ kubelet
        └───────node───────▶ plan ─────────resources───────▲

One task group holds every part. A part that fails is begun again and takes no other with it.
"""

import logging
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread

from gpu_plugin import __version__, control
from gpu_plugin.access.container import Access, cdi_classes, existing, imex_node
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.devices.plan import plan
from gpu_plugin.health.latch import Limits, Verdict
from gpu_plugin.health.ledger import Evidence, HealthLedger, Transition
from gpu_plugin.health.observation import Observation, XidEvent
from gpu_plugin.health.xids import XidPolicy, describe, parse_xid_list
from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.directory import watch
from gpu_plugin.kubelet.endpoint import ResourceEndpoint
from gpu_plugin.nvml.monitor import PLACEHOLDER, Monitor
from gpu_plugin.nvml.port import Driver, HostView, NvmlError
from gpu_plugin.placement.scores import scores
from gpu_plugin.pulse import Pulse
from gpu_plugin.snapshot import ResourceView, SnapshotStore
from gpu_plugin.state import StateDirectory

log = logging.getLogger(__name__)

FIRST_RETRY = 1.0
LONGEST_RETRY = 30.0
"""Seconds between two attempts to find a driver, or to begin a failed part again."""

HEALTH_FILE = "health.json"
GPUS_FILE = "gpus.json"


@dataclass(frozen=True, slots=True)
class HealthMemory:
    """What `HEALTH_FILE` holds."""

    boot_id: str
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True)
class KnownGpu:
    """A GPU as `GPUS_FILE` remembers it: enough to list it again when the driver cannot describe it."""

    uuid: str
    index: int
    minor: int | None = None
    pci_bus_id: str = ""
    model: str = ""
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What `GPUS_FILE` holds."""

    boot_id: str
    gpus: tuple[KnownGpu, ...] = ()


@dataclass(frozen=True, slots=True)
class Hardware:
    """The driver and host that this daemon serves, real or simulated.

    `dev_root` is where the host keeps the device nodes that containers are given; `verbs` what can be asked of it through
    the control socket.
    """

    driver: Driver
    host: HostView
    dev_root: str
    verbs: Mapping[str, control.Verb] = field(default_factory=dict)


class NoDriverError(Exception):
    """There is nothing to serve and the operator wants to hear of it at once; the text says what to do."""


class Daemon:
    """One node's plugin, from start to clean exit."""

    def __init__(self, settings: Settings, hardware: Hardware, reload: Callable[[], Settings]) -> None:
        """Takes resolved settings, what to serve, and how to resolve the settings anew (it raises ConfigError)."""
        self.settings = settings
        self.hardware = hardware
        self.store = SnapshotStore()
        self._reload = reload
        self._state = StateDirectory(Path(settings.state_dir))
        self._boot_id = hardware.host.boot_id()
        self._ledger = HealthLedger(policy(settings))
        self._memory: tuple[Evidence, ...] = ()
        self._node = Node()
        self._held: dict[str, str] = {}
        self._unsaved = Pulse()
        self._saved: dict[str, object] = {}
        self._look = Pulse()
        self._endpoints: dict[str, ResourceEndpoint] = {}
        self._monitor: Monitor | None = None

    async def run(self) -> int:
        """Runs until a signal ends it. Returns the exit status."""
        status = 0
        try:
            async with anyio.create_task_group() as parts:
                self._parts = parts
                parts.start_soon(self._signals)
                parts.start_soon(self._begin)
        except* (NoDriverError, ConfigError) as group:
            for error in group.exceptions:
                log.error("%s", error)  # noqa: TRY400 - the sentence is for people, a trace would bury it
            status = 1
        log.info("stopped")
        return status

    async def _begin(self) -> None:
        log.info("gpu-plugin %s starting", __version__)
        self._remember()
        wire.warm()
        self._parts.start_soon(self._part, "the control socket", self._control)
        self._parts.start_soon(self._part, "the directory watch", self._watch)
        self._parts.start_soon(self._part, "the state directory", self._save)
        monitor = await self._find_gpus()
        self._monitor = monitor
        await self._part("the GPU monitor", monitor.run)

    async def _part(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Runs an eternal part; one that ends or fails is begun again, ever more slowly."""
        pause = FIRST_RETRY
        while True:
            began = anyio.current_time()
            try:
                await run()
                log.error("%s ended, which it should not; beginning it again", name)
            except Exception:
                log.exception("%s failed; beginning it again", name)
            if anyio.current_time() - began > LONGEST_RETRY:
                pause = FIRST_RETRY
            await anyio.sleep(pause)
            pause = min(pause * 2, LONGEST_RETRY)

    async def _signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP) as signals:
            async for number in signals:
                if number == signal.SIGHUP:
                    self._apply_reload()
                else:
                    log.info("%s: stopping", signal.Signals(number).name)
                    self._parts.cancel_scope.cancel()
                    return

    async def _watch(self) -> None:
        await watch(Path(self.settings.socket_dir), self._look)

    async def _control(self) -> None:
        """Answers commands; another daemon on the same state directory is waited out."""
        while True:
            try:
                async with control.serve(self._state.path, self.hardware.verbs):
                    await anyio.sleep_forever()
            except ConfigError as error:
                log.warning("commands cannot reach this daemon: %s", error)
                await anyio.sleep(LONGEST_RETRY)

    async def _find_gpus(self) -> Monitor:
        """Opens the driver, again and again if need be, until there are GPUs to serve."""
        pause = FIRST_RETRY
        while True:
            monitor = Monitor(
                self.hardware.driver,
                self.hardware.host,
                self.settings.health_poll_interval,
                self.settings.nvml_timeout,
                self._remembered_gpus(),
                self._observe,
                self._found,
            )
            try:
                node = await monitor.open()
            except (NvmlError, TimeoutError) as error:
                trouble = f"the NVIDIA driver cannot be used: {error}"
            else:
                if node.gpus:
                    return monitor
                trouble = "the NVIDIA driver finds no GPU on this node"
            if self.settings.fail_on_init_error:
                raise NoDriverError(
                    f"{trouble}. Is the driver installed and loaded (does nvidia-smi work here)? "
                    "On nodes without a GPU, do not run this plugin, or run it with --fail-on-init-error=false",
                )
            log.warning("%s; looking again in %g s", trouble, pause)
            await anyio.sleep(pause * (0.9 + 0.2 * random.random()))  # noqa: S311 - spreads retries, keeps no secret
            pause = min(pause * 2, LONGEST_RETRY)

    # The hardware

    def _found(self, node: Node) -> None:
        """Plans resources for what the monitor found and publishes them."""
        self._node = node
        access = access_for(self.settings, node, self.hardware.dev_root)
        for gpu in node.gpus:
            self._ledger.watch(gpu.uuid, limits(gpu, self.settings))
        self._ledger.replay(self._memory)
        self._memory = ()
        planned = plan(node, self.settings, {})
        self._held = {device.gpu: device.reason for resource in planned for device in resource.devices}
        pair_scores = scores(node)
        views = {r.name: ResourceView.of(r, access, pair_scores).with_reasons(self._reasons()) for r in planned}
        self.store.publish(views)
        for resource in planned:
            healthy = sum(device.healthy for device in views[resource.name].resource.devices)
            log.info(
                "%s: %d devices, %d healthy, driver %s",
                resource.name,
                len(resource.devices),
                healthy,
                node.driver_version,
            )
            if resource.name not in self._endpoints:
                self._serve(resource.name)
        self._unsaved.ring()

    def _serve(self, resource: str) -> None:
        registration = Path(self.settings.registration_socket) if self.settings.registration_socket else None
        endpoint = ResourceEndpoint(resource, self.store, registration, Path(self.settings.socket_dir), self._look)
        self._endpoints[resource] = endpoint
        self._parts.start_soon(self._part, resource, endpoint.run)

    # Health

    def _observe(self, uuid: str, seen: Observation) -> None:
        """Takes in one observation: says what it changed, and publishes the new health."""
        changes = self._ledger.observe(uuid, seen, time.time())
        if isinstance(seen, XidEvent) and self._ledger.application_xid(seen):
            log.info("GPU %s: %s is an application's own error; the GPU stays as it is", uuid, describe(seen.xid))
        for change in changes:
            tell(change)
        if changes:
            resources = self.store.current.resources
            reasons = self._reasons()
            self.store.publish({name: view.with_reasons(reasons) for name, view in resources.items()})
            self._unsaved.ring()

    def _reasons(self) -> dict[str, str]:
        """Why each GPU is not handed out: its health first, else what the plan holds against it."""
        return {uuid: self._ledger.reason(uuid) or held for uuid, held in self._held.items()}

    # Memory

    def _remember(self) -> None:
        """Reads what an earlier process of this boot wrote. Another boot is judged afresh."""
        memory = self._state.read(HEALTH_FILE, HealthMemory)
        if memory is not None and memory.boot_id == self._boot_id:
            self._memory = memory.evidence
            for entry in memory.evidence:
                log.warning("GPU %s is remembered as unfit: %s", entry.uuid, entry.detail)

    def _remembered_gpus(self) -> tuple[Gpu, ...]:
        memory = self._state.read(GPUS_FILE, GpuMemory)
        if memory is None or memory.boot_id != self._boot_id:
            return ()
        return tuple(Gpu(g.uuid, g.index, g.minor, g.pci_bus_id, g.model, numa_node=g.numa_node) for g in memory.gpus)

    async def _save(self) -> None:
        """Writes down what changed, away from the event loop, the newest alone where changes come fast."""
        while True:
            wanted: dict[str, object] = {HEALTH_FILE: HealthMemory(self._boot_id, self._ledger.evidence())}
            known = tuple(
                KnownGpu(g.uuid, g.index, g.minor, g.pci_bus_id, g.model, g.numa_node)
                for g in self._node.gpus
                if not g.uuid.startswith(PLACEHOLDER)
            )
            if known:
                wanted[GPUS_FILE] = GpuMemory(self._boot_id, known)
            due = {
                name: content
                for name, content in wanted.items()
                if self._saved.get(name) != content and (known or name != HEALTH_FILE)
            }
            for name, content in due.items():
                if await anyio.to_thread.run_sync(self._state.write, name, content):
                    self._saved[name] = content
            if not due or any(name not in self._saved for name in due):
                await self._unsaved.wait()

    # Configuration

    def _apply_reload(self) -> None:
        """Resolves the settings anew, applies what can change in a running process, and registers every resource again."""
        try:
            new = self._reload()
        except ConfigError as error:
            log.error("SIGHUP: the configuration is not taken, the last good one stays: %s", error)  # noqa: TRY400
            return
        fixed = ("socket_dir", "registration_socket", "state_dir", "simulate", "driver_root_ctr_path")
        kept = [name for name in fixed if getattr(new, name) != getattr(self.settings, name)]
        if kept:
            log.error("SIGHUP: %s cannot change while the daemon runs; restart it for that", ", ".join(kept))
            return
        self.settings = new
        self._ledger.policy = policy(new)
        if self._monitor is not None:
            self._monitor.poll, self._monitor.timeout = new.health_poll_interval, new.nvml_timeout
        if self._node.gpus:
            self._found(self._node)
        log.info("SIGHUP: configuration reloaded")
        for endpoint in self._endpoints.values():
            endpoint.register_again()


def policy(settings: Settings) -> XidPolicy:
    """The Xid policy that the operator's variables ask for; what cannot be read of them is said and left out."""
    lists = []
    for name in ("disable_healthchecks", "enable_healthchecks"):
        read = parse_xid_list(getattr(settings, name))
        for item in read.malformed:
            log.warning("DP_%s: %r is neither an Xid, nor 'xids', nor 'all'; ignored", name.upper(), item)
        lists.append(read)
    return XidPolicy(*lists)


def limits(gpu: Gpu, settings: Settings) -> Limits:
    """A GPU's limits for the health rules."""
    return Limits(
        gpu.thresholds.shutdown,
        gpu.thresholds.slowdown,
        settings.temperature_recovery,
        policy(settings).watch_temperature,
    )


def access_for(settings: Settings, node: Node, dev_root: str) -> Access:
    """What Allocate needs of the settings and the node.

    Raises:
        ConfigError: an IMEX channel is required and the node has none.
    """
    wanted = {"gdrcopy": settings.gdrcopy_enabled, "gds": settings.gds_enabled, "mofed": settings.mofed_enabled}
    features = tuple(name for name, enabled in wanted.items() if enabled)
    channels = []
    for channel in settings.imex_channel_ids:
        if imex_node(channel) in node.device_nodes:
            channels.append(channel)
        elif settings.imex_required:
            raise ConfigError(
                f"IMEX channel {channel} is required and {imex_node(channel)} does not exist on this node: "
                "start nvidia-imex, or run with --imex-required=false",
            )
        else:
            log.warning("IMEX channel %d is left out: %s does not exist on this node", channel, imex_node(channel))
    return Access(
        strategies=settings.device_list_strategy,
        id_strategy=settings.device_id_strategy,
        pass_device_specs=settings.pass_device_specs,
        dev_root=dev_root,
        annotation_prefix=settings.cdi_annotation_prefix,
        features=features,
        cdi_classes=cdi_classes(features, node.device_nodes),
        imex_channels=tuple(channels),
        control_nodes=existing(node.device_nodes),
    )


def tell(change: Transition) -> None:
    """One log line for a change of verdict."""
    if change.verdict is Verdict.OK:
        log.warning("GPU %s: %s is over: %s", change.uuid, change.signal, change.detail)
    else:
        log.error("GPU %s is not fit for use: %s", change.uuid, change.detail)


def hardware_for(settings: Settings) -> Hardware:
    """The real driver, or the simulated node that the settings ask for. Raises ConfigError for one that cannot be."""
    if settings.simulate:
        return _simulated(settings)
    from gpu_plugin.nvml.driver import PynvmlDriver  # noqa: PLC0415
    from gpu_plugin.nvml.host import LinuxHost  # noqa: PLC0415

    roots = (settings.driver_root_ctr_path, settings.driver_root)
    return Hardware(PynvmlDriver(roots), LinuxHost(roots), settings.effective_dev_root)


def _simulated(settings: Settings) -> Hardware:
    from gpu_plugin.simulation import device_nodes, faults  # noqa: PLC0415
    from gpu_plugin.simulation.driver import SimulatedDriver  # noqa: PLC0415
    from gpu_plugin.simulation.hardware import SimulatedNode  # noqa: PLC0415
    from gpu_plugin.simulation.host import SimulatedHost  # noqa: PLC0415
    from gpu_plugin.simulation.profile import load  # noqa: PLC0415

    profile = load(settings.simulate)
    state = Path(settings.state_dir)
    node = SimulatedNode(profile, state)
    try:
        made = None if settings.dev_root else device_nodes.make(profile, state)
    except OSError as error:
        log.warning("no device nodes for the simulated node: %s", error)
        made = None

    dev_root = str(made) if made is not None else settings.effective_dev_root
    return Hardware(SimulatedDriver(node), SimulatedHost(node), dev_root, {"fault": faults.verb(node)})


async def serve(settings: Settings, reload: Callable[[], Settings]) -> int:
    """Runs the daemon with these settings until a signal ends it. Returns the exit status."""
    return await Daemon(settings, hardware_for(settings), reload).run()


def run(settings: Settings, reload: Callable[[], Settings]) -> int:
    """`serve` on an event loop of its own."""
    os.umask(0o022)
    return anyio.run(serve, settings, reload)
