"""The process that runs a daemon: from the settings to its exit status."""

import gc
import importlib.util
import logging
import os
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings
from gpu_plugin.control.server import serve_refusals
from gpu_plugin.daemon.daemon import Daemon, make_way
from gpu_plugin.daemon.hardware import hardware_for
from gpu_plugin.daemon.node_view import without_configuration
from gpu_plugin.inventory.offer import require_functions
from gpu_plugin.sources.configuration import Configuration, Resolve, Wait, begin_with, tell_settings
from gpu_plugin.sources.list_strategy import ListStrategy, tell
from gpu_plugin.state.directory import require_apart, require_directory
from gpu_plugin.telemetry.listener.listener import Listener
from gpu_plugin.telemetry.logs import configure

if TYPE_CHECKING:
    from gpu_plugin.telemetry.listener.checks import Facts

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


def _awaiting(why: str, *, tried: bool = False) -> "Facts":
    """The facts for probes until there is a daemon."""
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
            make_way(settings)
            asked, started = settings, time.time()

            async def status(_: Mapping[str, object]) -> Mapping[str, object]:
                return without_configuration(asked, wait, started)

            refusals = serve_refusals(Path(settings.state_dir), lambda: f"{why}: {wait.why}", {"status": status})
            await waiting.enter_async_context(refusals)
        begun = await begin_with(settings, _checked(resolve), wait)
    if begun is None:
        log.info("stopped")
        return 0
    settings, source = begun
    require_apart(Path(settings.state_dir), Path(settings.socket_dir))
    configure(settings.log_format, settings.log_level)
    looking = "the node's files are looked at for --device-list-strategy auto"
    listener.begin(settings.http_address, lambda: _awaiting(looking))
    strategy = ListStrategy()
    settings = await strategy.settled(settings)
    require_functions(settings)
    tell_settings(settings, source.current())
    tell(settings)
    configuration = Configuration(settings, source, _checked(resolve), UNCHANGEABLE, strategy.settled)
    return await Daemon(configuration, hardware_for(settings), listener).run()


def _checked(resolve: Resolve) -> Resolve:
    """`resolve`, refusing settings that choose what nothing is done for."""

    def checked(path: Path | None) -> Settings:
        settings = resolve(path)
        require_functions(settings)
        return settings

    return checked


def run(settings: Settings, resolve: Resolve) -> int:
    """`serve` on an event loop of its own. Raises ConfigError where the loop that is asked for is not installed."""
    if settings.event_loop == "uvloop" and importlib.util.find_spec("uvloop") is None:
        raise ConfigError("--event-loop: uvloop is not installed; install gpu-plugin[uvloop], or use asyncio")
    os.umask(0o022)
    status = anyio.run(serve, settings, resolve, backend_options={"use_uvloop": settings.event_loop == "uvloop"})
    gc.freeze()  # at its end the interpreter would search every object for cycles: 0.1 s of a node's shutdown
    return status
