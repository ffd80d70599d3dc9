"""Runs `gpu-plugin mps`: finds the node's GPUs, plans its resources, and supervises the daemons that they need."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import anyio.abc

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings
from gpu_plugin.containers.host_view import HostView
from gpu_plugin.daemon.configuration import Configuration, Resolve, begin_with, log_remarks
from gpu_plugin.devices.node import Node
from gpu_plugin.devices.plan import plan
from gpu_plugin.mps import directories
from gpu_plugin.mps.compute_modes import ComputeModes
from gpu_plugin.mps.errors import MpsError
from gpu_plugin.mps.plan import mps_resources
from gpu_plugin.mps.supervisor import Supervisor, Tempo
from gpu_plugin.nvml.driver_calls import DriverCalls
from gpu_plugin.nvml.finding import PROBE_PATIENCE, Finder
from gpu_plugin.nvml.opening_remedies import opening_remedy
from gpu_plugin.nvml.port import Driver, NvmlError
from gpu_plugin.nvml.session import DriverSession
from gpu_plugin.runtime.backoff import Backoff
from gpu_plugin.runtime.log_lines import LogOnChange
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.signals import Signals
from gpu_plugin.runtime.supervision import FIRST_RETRY, LONGEST_RETRY, forever
from gpu_plugin.state.directory import StateDirectory

log = logging.getLogger(__name__)

SHM = Path("/dev/shm")  # noqa: S108 - the kernel's name for it
"""The directory in which MPS servers and their clients share memory, each in its own container."""

# Settings that a running process cannot change.
UNCHANGEABLE = ("state_dir", "simulate", "driver_root", "driver_root_ctr_path")


class NothingToServeError(Exception):
    """There is no driver or no GPU, and the operator wants to fail at once. Lines: the problem, then what to do."""


class MpsService:
    """One node's `gpu-plugin mps`, from start to clean exit."""

    def __init__(
        self,
        configuration: Configuration,
        driver: Driver,
        host: HostView,
        control: Callable[[], Sequence[str]],
        tempo: Tempo | None = None,
    ) -> None:
        """Store the configuration to follow, and the hardware.

        `control` returns the control program with its constant arguments; it raises MpsError while there is no program.
        """
        self.settings = configuration.settings
        self._configuration = configuration
        self._driver = driver
        self._host = host
        self._control = control
        self._tempo = tempo
        self._supervisor: Supervisor | None = None
        self._root = ""
        self._supervising = anyio.CancelScope()
        self._left = anyio.Event()
        self._look = Pulse()
        self._calls = DriverCalls()
        self._session = DriverSession(driver, self._calls)
        self._finder = Finder(driver, host, self._calls)
        self._trouble = LogOnChange(log, "%s; looking again in %.2g s, then at growing intervals")
        self._parts: anyio.abc.TaskGroup

    async def run(self, signals: Signals) -> int:
        """Run until a signal. Return the exit status."""
        status = 0
        try:
            async with anyio.create_task_group() as self._parts:
                signals.on_stop(self._parts.cancel_scope.cancel)
                signals.on_reload(self._configuration.request_read)
                self._parts.start_soon(forever, "the configuration watch", self._configuration.watch)
                self._parts.start_soon(forever, "the configuration", self._configure)
                self._parts.start_soon(self._serve)
        except* (NothingToServeError, ConfigError, MpsError) as group:
            for error in group.exceptions:
                for line in str(error).splitlines():
                    log.error("%s", line)  # noqa: TRY400 - the sentence is for people; a trace would hide it
            status = 2 if group.subgroup(ConfigError) else 1
        finally:
            self._calls.close()
        log.info("stopped")
        return status if signals.stopped_by or status else 1

    async def _configure(self) -> None:
        while True:
            await self._configuration.update(self)

    def apply_settings(self, new: Settings) -> None:
        """Plan the MPS daemons again with these settings."""
        self.settings = new
        self._look.ring()

    async def _serve(self) -> None:
        """Find the GPUs and apply the plan; repeat after each reload, and while no GPU can be read."""
        backoff = Backoff(FIRST_RETRY, LONGEST_RETRY)
        while True:
            settings, trouble = self.settings, ""
            try:
                node = await self._find_gpus()
                await self._leave_root(settings)
                again = self._plan(node, settings)
            except _NoGpusError as error:
                trouble, again = str(error), True
            except ConfigError as error:
                if self._supervisor is None:
                    raise
                log.error("%s; the present MPS daemons continue to run", error)  # noqa: TRY400
                again = False
            except Exception:
                if self._supervisor is None:
                    raise
                log.exception("planning the MPS daemons failed; the present MPS daemons continue to run")
                again = True
            if self.settings is not settings:
                continue  # the configuration was reloaded in between
            if again:
                pause = backoff.failed(anyio.current_time())
                if trouble:
                    self._report_trouble(trouble, pause)
                await self._look.wait(pause)
            else:
                await self._look.wait()
                backoff.succeeded()

    def _report_trouble(self, trouble: str, pause: float) -> None:
        """Log why there is nothing to serve. Raises NothingToServeError if the operator wants to fail at once."""
        if self.settings.fail_on_init_error and self._supervisor is None:
            raise NothingToServeError(
                f"no MPS daemon can be run: {trouble}\n"
                "gpu-plugin doctor says more. On nodes without a GPU, do not run gpu-plugin mps, or run it with "
                "--fail-on-init-error=false"
            )
        self._trouble.update(trouble, pause)

    async def _find_gpus(self) -> Node:
        """Return the node's GPUs as the driver describes them now. Raises _NoGpusError if there is no usable GPU."""
        try:
            version, count, _ = await self._session.open(self.settings.nvml_timeout)
        except NvmlError as error:
            raise _NoGpusError(f"the NVIDIA driver cannot be used: {error}: {opening_remedy(error.code)}") from None
        except TimeoutError as error:
            raise _NoGpusError(f"the NVIDIA driver cannot be used: {error}") from None
        found = tuple(watched.gpu for watched in await self._finder.by_index(count, PROBE_PATIENCE))
        if all(gpu.unreadable for gpu in found):
            # NVML counts GPUs when it is opened: after a close, the next attempt finds GPUs that were added since.
            if await self._session.close(self.settings.nvml_timeout):
                self._finder.reset()
            raise _NoGpusError(
                f"the NVIDIA driver cannot read GPU {found[0].index}: {found[0].unreadable}"
                if found
                else "the NVIDIA driver finds no GPU on this node"
            )
        self._trouble.update("")
        return Node(found, driver_version=version)

    async def _supervise(self, supervisor: Supervisor, scope: anyio.CancelScope, over: anyio.Event) -> None:
        try:
            with scope:
                await supervisor.run()
        finally:
            over.set()

    async def _leave_root(self, settings: Settings) -> None:
        """Stop the daemons if the MPS root has changed, and restore the compute modes of their GPUs."""
        if self._supervisor is not None and self._root != settings.mps_root:
            log.info("leaving the MPS root %s for %s", self._root, settings.mps_root or "none")
            self._supervising.cancel()
            await self._left.wait()
            self._supervisor = None

    def _plan(self, node: Node, settings: Settings) -> bool:
        """Apply the settings' plan for this node. Return whether another attempt could serve more resources.

        Raises ConfigError if the node cannot do what the settings request.
        """
        resources = mps_resources(plan(node, settings).resources, node)
        if resources and not settings.mps_root:
            raise ConfigError(f"{resources[0].name} is shared by MPS: set --mps-root, the directory of its daemon")
        if not resources:
            log.info("no resource of this node is shared by MPS: nothing to do until the configuration changes")
        if self._supervisor is None and settings.mps_root:
            root = directories.root_here(settings.mps_root)
            if root == directories.MOUNT:
                log.info("the MPS root %s is mounted at %s here", settings.mps_root, root)
            memory, boot_id = StateDirectory(root), self._host.boot_id()
            modes = ComputeModes(self._driver, self._calls, memory, boot_id, settings.nvml_timeout)
            shm = None if settings.simulate else SHM  # the simulated control program starts no servers
            self._supervisor = Supervisor(root, self._control, modes, self._tempo, shm)
            self._root, self._supervising, self._left = settings.mps_root, anyio.CancelScope(), anyio.Event()
            self._parts.start_soon(self._supervise, self._supervisor, self._supervising, self._left)
        if self._supervisor is not None:
            self._supervisor.apply(resources)
        return any(all(gpu.unreadable for gpu in resource.gpus) for resource in resources)


class _NoGpusError(Exception):
    """No GPU is available now; the text is the reason."""


def run(
    settings: Settings,
    resolve: Resolve,
    driver: Driver,
    host: HostView,
    control: Callable[[], Sequence[str]],
) -> int:
    """Run an `MpsService` on an event loop of its own until a signal. Return the exit status."""

    async def serve() -> int:
        signals = Signals()
        with anyio.CancelScope() as starting:
            signals.on_stop(starting.cancel)
            begun = await begin_with(settings, resolve, signals)
        if signals.stopped_by:
            return 0
        log_remarks(begun[0])
        return await MpsService(Configuration(*begun, resolve, UNCHANGEABLE), driver, host, control).run(signals)

    os.umask(0o022)
    return anyio.run(serve)
