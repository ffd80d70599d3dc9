"""The daemon: builds the parts and lets them run together. The only module that knows all others.

    Monitor ──observations──▶ HealthLedger ──reasons──▶ SnapshotStore ──▶ ResourceEndpoint of each resource ──▶ kubelet
        └───────node───────▶ plan ─────────resources───────▲

One task group holds every part. A part that fails is begun again and takes no other with it.
"""

import gc
import importlib.util
import logging
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread

from gpu_plugin import __version__, control
from gpu_plugin.access.container import imex_node
from gpu_plugin.access.plan import missing_channels, plan_access
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings
from gpu_plugin.devices.node import Node
from gpu_plugin.devices.plan import plan
from gpu_plugin.hardware import Hardware, hardware_for
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.ledger import Evidence, HealthLedger, Transition
from gpu_plugin.health.observation import Observation, XidEvent
from gpu_plugin.health.policy import complaints, limits, policy
from gpu_plugin.health.xids import describe
from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.directory import watch
from gpu_plugin.kubelet.endpoint import ResourceEndpoint
from gpu_plugin.memory import Memory
from gpu_plugin.nvml.monitor import Monitor
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.placement.scores import scores
from gpu_plugin.pulse import Pulse
from gpu_plugin.snapshot import ResourceView, SnapshotStore
from gpu_plugin.state import StateDirectory

log = logging.getLogger(__name__)

FIRST_RETRY = 1.0
LONGEST_RETRY = 30.0
"""Seconds between two attempts to find a driver, or to begin a failed part again."""


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
        self._memory = Memory(StateDirectory(Path(settings.state_dir)), hardware.host.boot_id())
        self._past: tuple[Evidence, ...] = ()
        self._ledger = HealthLedger(policy(settings))
        self._node = Node()
        self._held: dict[str, str] = {}
        self._unsaved = Pulse()
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
        self._past = self._memory.evidence()
        for entry in self._past:
            log.warning("GPU %s is remembered as unfit: %s", entry.uuid, entry.detail)
        for complaint in complaints(self._ledger.policy):
            log.warning("%s", complaint)
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
                async with control.serve(Path(self.settings.state_dir), self.hardware.verbs):
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
                self._memory.gpus(),
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
        access = plan_access(self.settings, node, self.hardware.dev_root)
        for channel in missing_channels(self.settings, node):
            log.warning("IMEX channel %d is left out: %s does not exist on this node", channel, imex_node(channel))
        for gpu in node.gpus:
            self._ledger.watch(gpu.uuid, limits(gpu, self.settings))
        self._ledger.replay(self._past)
        known = {gpu.uuid for gpu in node.gpus}
        self._past = tuple(entry for entry in self._past if entry.uuid not in known)  # for GPUs still to be named
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
        revision = self._ledger.revision
        changes = self._ledger.observe(uuid, seen, time.time())
        if isinstance(seen, XidEvent) and self._ledger.application_xid(seen):
            log.info("GPU %s: %s is an application's own error; the GPU stays as it is", uuid, describe(seen.xid))
        for change in changes:
            tell(change)
        if self._ledger.revision != revision:
            resources = self.store.current.resources
            reasons = {uuid: self._ledger.reason(uuid) or self._held[uuid]} if uuid in self._held else {}
            self.store.publish({name: view.with_reasons(reasons) for name, view in resources.items()})
            self._unsaved.ring()

    def _reasons(self) -> dict[str, str]:
        """Why each GPU is not handed out: its health first, else what the plan holds against it."""
        return {uuid: self._ledger.reason(uuid) or held for uuid, held in self._held.items()}

    # Memory

    async def _save(self) -> None:
        """Writes down what changed, away from the event loop; the newest alone where changes come fast."""
        while True:
            if not self._node.gpus:  # what an earlier process wrote still stands
                await self._unsaved.wait()
                continue
            revision, node = self._ledger.revision, self._node
            evidence = (*self._ledger.evidence(), *self._past)
            await anyio.to_thread.run_sync(self._memory.write, evidence, node)
            if (revision, node) == (self._ledger.revision, self._node):
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


def tell(change: Transition) -> None:
    """One log line for a change of verdict."""
    if change.verdict is Verdict.OK:
        log.warning("GPU %s: %s is over: %s", change.uuid, change.signal, change.detail)
    else:
        log.error("GPU %s is not fit for use: %s", change.uuid, change.detail)


async def serve(settings: Settings, reload: Callable[[], Settings]) -> int:
    """Runs the daemon with these settings until a signal ends it. Returns the exit status."""
    return await Daemon(settings, hardware_for(settings), reload).run()


def run(settings: Settings, reload: Callable[[], Settings]) -> int:
    """`serve` on an event loop of its own. Raises ConfigError where the loop that is asked for is not installed."""
    if settings.event_loop == "uvloop" and importlib.util.find_spec("uvloop") is None:
        raise ConfigError("--event-loop: uvloop is not installed; install gpu-plugin[uvloop], or use asyncio")
    os.umask(0o022)
    status = anyio.run(serve, settings, reload, backend_options={"use_uvloop": settings.event_loop == "uvloop"})
    gc.freeze()  # at its end the interpreter would search every object for cycles: 0.1 s of a node's shutdown
    return status
