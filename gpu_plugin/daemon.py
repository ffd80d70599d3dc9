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
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import anyio
import anyio.abc

from gpu_plugin import __version__, control
from gpu_plugin.access.container import Access
from gpu_plugin.access.plan import plan_access
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
from gpu_plugin.nvml.watched import PLACEHOLDER
from gpu_plugin.placement.scores import scores
from gpu_plugin.pulse import Pulse
from gpu_plugin.snapshot import ResourceView, SnapshotStore
from gpu_plugin.state import StateDirectory
from gpu_plugin.telemetry.logs import configure
from gpu_plugin.threads import DaemonThreads

log = logging.getLogger(__name__)

FIRST_RETRY = 1.0
LONGEST_RETRY = 30.0
"""Seconds between two attempts to find a driver, or to begin a failed part again."""


REPEAT_LOG = 60.0
"""Seconds between two lines that say the same."""

DISK_PATIENCE = 10.0
DISK_RETRY = 5.0
LAST_WRITE = 0.2
"""Seconds for a write of what must outlive the process, until a failed one is tried again, and for the one at the exit."""

UNCHANGEABLE = (
    "socket_dir",
    "registration_socket",
    "state_dir",
    "simulate",
    "driver_root",
    "dev_root",
    "driver_root_ctr_path",
    "event_loop",
)
"""Settings that a running process cannot change."""


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
        self._began = time.time() - time.monotonic()
        self._application_xids: dict[tuple[str, int], tuple[float, int]] = {}
        self._told_to_stop = False
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
        if status == 0 and not self._told_to_stop:
            log.error("ended without being told to")
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
        if any(name.startswith("cdi-") for name in self.settings.device_list_strategy):
            log.warning(
                "CDI devices are named and their specs not written by this version: they must come from elsewhere"
            )
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
                    self._told_to_stop = True
                    self._parts.cancel_scope.cancel()
                    return

    async def _watch(self) -> None:
        await watch(Path(self.settings.socket_dir), self._look)

    async def _control(self) -> None:
        """Answers commands; another daemon on the same state directory is waited out."""
        verbs = {name: self._then_look(verb) for name, verb in self.hardware.verbs.items()}
        while True:
            try:
                async with control.serve(Path(self.settings.state_dir), verbs):
                    await anyio.sleep_forever()
            except ConfigError as error:
                log.warning("commands cannot reach this daemon: %s", error)
                await anyio.sleep(LONGEST_RETRY)

    def _then_look(self, verb: control.Verb) -> control.Verb:
        """The verb, after which the GPUs are looked at: whatever it did to them need not wait for their turn."""

        async def acted(request: Mapping[str, object]) -> Mapping[str, object]:
            reply = await verb(request)
            if self._monitor is not None:
                self._monitor.look_now()
            return reply

        return acted

    async def _find_gpus(self) -> Monitor:
        """Opens the driver, again and again if need be, until there are GPUs to serve."""
        pause, said = FIRST_RETRY, ""
        monitor = Monitor(
            self.hardware.driver,
            self.hardware.host,
            self.settings.health_poll_interval,
            self.settings.nvml_timeout,
            self._memory.gpus(),
            self._observe,
            self._found,
        )
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
                    return monitor
                trouble = "the NVIDIA driver finds no GPU on this node"
            if self.settings.fail_on_init_error:
                raise NoDriverError(
                    f"{trouble}. Is the driver installed and loaded (does nvidia-smi work here)? "
                    "On nodes without a GPU, do not run this plugin, or run it with --fail-on-init-error=false",
                )
            level = logging.DEBUG if trouble == said else logging.WARNING  # the same is worth a line once
            log.log(level, "%s; looking again in %g s, and ever more slowly", trouble, pause)
            said = trouble
            await anyio.sleep(pause * (0.9 + 0.2 * random.random()))  # noqa: S311 - spreads retries, keeps no secret
            pause = min(pause * 2, LONGEST_RETRY)

    # The hardware

    def _found(self, node: Node) -> None:
        """Plans resources for what the monitor found and publishes them. What cannot be planned changes nothing.

        Raises:
            ConfigError: at the first time, where the settings ask for what the node does not have.
        """
        try:
            access = plan_access(self.settings, node, self.hardware.dev_root)
        except ConfigError as error:
            if not self._node.gpus:
                raise
            log.error("%s; what was served before is served on", error)  # noqa: TRY400
            return
        self._publish(node, self.settings, access)

    def _publish(self, node: Node, settings: Settings, access: Access) -> None:
        planned = plan(node, settings)
        pair_scores = scores(node)
        views = {resource.name: ResourceView.of(resource, access, pair_scores) for resource in planned}
        for old, new in _named(self._node, node):
            self._ledger.rename(old, new)
        self._node = node
        for gpu in node.gpus:
            self._ledger.watch(gpu.uuid, limits(gpu, settings))
        self._ledger.replay(self._past)
        known = {gpu.uuid for gpu in node.gpus}
        self._past = tuple(entry for entry in self._past if entry.uuid not in known)  # for GPUs still to be named
        held = {device.gpu: device.reason for resource in planned for device in resource.devices}
        for uuid, reason in held.items():
            if reason and reason != self._held.get(uuid):
                log.warning("GPU %s is not handed out: %s", uuid, reason)
        self._held = held
        reasons = {uuid: self._ledger.reason(uuid) or reason for uuid, reason in held.items()}
        self.store.publish({name: view.with_reasons(reasons) for name, view in views.items()})
        for name, view in self.store.current.resources.items():
            listed = view.resource.devices
            healthy = sum(device.healthy for device in listed)
            log.info("%s: %d devices, %d healthy, driver %s", name, len(listed), healthy, node.driver_version)
            if name not in self._endpoints:
                self._serve(name)
        self._unsaved.ring()

    def _serve(self, resource: str) -> None:
        registration = Path(self.settings.registration_socket) if self.settings.registration_socket else None
        endpoint = ResourceEndpoint(resource, self.store, registration, Path(self.settings.socket_dir), self._look)
        self._endpoints[resource] = endpoint
        self._parts.start_soon(self._part, resource, endpoint.run)

    # Health

    def _observe(self, uuid: str, seen: Observation) -> bool:
        """Takes in one observation: says what it changed, and publishes the new health.

        Returns whether another observation soon would settle something.
        """
        revision = self._ledger.revision
        changes = self._ledger.observe(uuid, seen, self._now())
        if isinstance(seen, XidEvent) and self._ledger.application_xid(seen):
            self._count_application_xid(uuid, seen.xid)
        for change in changes:
            tell(change)
        if self._ledger.revision != revision:
            resources = self.store.current.resources
            reasons = {uuid: self._ledger.reason(uuid) or self._held[uuid]} if uuid in self._held else {}
            self.store.publish({name: view.with_reasons(reasons) for name, view in resources.items()})
            self._unsaved.ring()
        return self._ledger.suspicious(uuid)

    def _now(self) -> float:
        """Unix time in seconds as of the start, and steady from there on: a clock that is set heals no GPU."""
        return self._began + time.monotonic()

    def _count_application_xid(self, uuid: str, xid: int) -> None:
        """Says it once a minute for each GPU and Xid, with how many there were: a failing pod raises them by the hundred."""
        now = time.monotonic()
        said, since = self._application_xids.get((uuid, xid), (float("-inf"), 0))
        if now - said < REPEAT_LOG:
            self._application_xids[uuid, xid] = said, since + 1
            return
        self._application_xids[uuid, xid] = now, 0
        more = f" ({since} more since this was last said)" if since else ""
        log.info("GPU %s: %s is an application's own error; the GPU stays as it is%s", uuid, describe(xid), more)

    # Memory

    async def _save(self) -> None:
        """Writes down what changed, on a thread that nobody waits for; the newest alone where changes come fast."""
        threads = DaemonThreads("state-files")
        try:
            while True:
                revision, node = self._ledger.revision, self._node
                saved = await self._write(threads, DISK_PATIENCE) if node.gpus else True
                if saved and (revision, node) == (self._ledger.revision, self._node):
                    await self._unsaved.wait()
                elif not saved:
                    await self._unsaved.wait(DISK_RETRY)
        finally:
            with anyio.CancelScope(shield=True):  # what was learnt last is worth a moment of the exit, and no more
                if self._node.gpus:
                    await self._write(threads, LAST_WRITE)
            threads.close()

    async def _write(self, threads: DaemonThreads, patience: float) -> bool:
        evidence, node = (*self._ledger.evidence(), *self._past), self._node
        job = await threads.submit(lambda: self._memory.write(evidence, node), patience)
        return job.done.done() and job.done.exception() is None and job.done.result()

    # Configuration

    def _apply_reload(self) -> None:
        """Resolves the settings anew, applies what can change in a running process, and registers every resource again.

        All of it or nothing: a reload that cannot be done whole leaves everything as it was.
        """
        try:
            new = self._reload()
            kept = [name for name in UNCHANGEABLE if getattr(new, name) != getattr(self.settings, name)]
            if kept:
                raise ConfigError(f"{', '.join(kept)} cannot change while the daemon runs; restart it for that")
            access = plan_access(new, self._node, self.hardware.dev_root) if self._node.gpus else None
        except ConfigError as error:
            log.error("SIGHUP: nothing is changed: %s", error)  # noqa: TRY400
            return
        except Exception:
            log.exception("SIGHUP: nothing is changed: the configuration cannot be taken")
            return
        self.settings = new
        self._ledger.policy = policy(new)
        configure(new.log_format, new.log_level)
        if self._monitor is not None:
            self._monitor.poll, self._monitor.timeout = new.health_poll_interval, new.nvml_timeout
        if access is not None:
            self._publish(self._node, new, access)
        log.info("SIGHUP: configuration reloaded")
        for endpoint in self._endpoints.values():
            endpoint.register_again()


def _named(before: Node, after: Node) -> list[tuple[str, str]]:
    """Placeholders of `before` with the uuids that the GPUs of those indices have now."""
    present = {gpu.uuid for gpu in after.gpus}
    by_index = {gpu.index: gpu.uuid for gpu in after.gpus}
    gone = [gpu for gpu in before.gpus if gpu.uuid.startswith(PLACEHOLDER) and gpu.uuid not in present]
    return [(gpu.uuid, by_index[gpu.index]) for gpu in gone if gpu.index in by_index]


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
