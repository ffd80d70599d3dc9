"""Run the daemon process, from the settings to the exit status."""

import gc
import importlib.util
import logging
import os
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings
from gpu_plugin.daemon.configuration import Configuration, Resolve, Wait, begin_with, log_settings
from gpu_plugin.daemon.daemon import Daemon
from gpu_plugin.daemon.hardware import Hardware, hardware_for
from gpu_plugin.daemon.list_strategy import ListStrategy, log_strategy
from gpu_plugin.daemon.opened_state import STATE_PATIENCE, Next, make_way
from gpu_plugin.kubelet.offer import require_functions
from gpu_plugin.runtime.control import opened
from gpu_plugin.runtime.control.server import serve_refusals
from gpu_plugin.runtime.signals import Signals
from gpu_plugin.runtime.threads import NoAnswerError, begin
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
"""Settings that a running process cannot change, in addition to `configuration.SOURCES`."""


def _awaiting(why: str, *, tried: bool = False) -> "Facts":
    """Return the facts for probes before the daemon starts."""
    from gpu_plugin.telemetry.listener.checks import Facts  # noqa: PLC0415 - only needed with a listener

    return Facts(awaited=why, tried=tried)


async def serve(settings: Settings, resolve: Resolve) -> int:
    """Run the daemon with these settings until a signal. Return the exit status.

    If the node's label chooses the configuration, the daemon starts when there is a valid configuration. During this wait,
    probes are answered if flags or environment set the HTTP address.
    """
    signals = Signals()
    refused: ConfigError | None = None
    status = 0
    async with anyio.create_task_group() as around:
        listener = Listener(around)
        try:
            with anyio.CancelScope() as starting:
                signals.on_stop(starting.cancel)
                configuration, hardware = await _configured(settings, resolve, listener, signals)
            if signals.stopped_by:
                log.info("stopped")
            else:
                outcome: Next | int = Next()
                while isinstance(outcome, Next):
                    outcome = await Daemon(configuration, hardware, listener, outcome).run(signals)
                status = outcome
        except ConfigError as error:  # a task group would wrap it
            refused = error
        around.cancel_scope.cancel()
    if refused is not None:
        raise refused
    return status


async def _configured(
    settings: Settings, resolve: Resolve, listener: Listener, signals: Signals
) -> tuple[Configuration, Hardware]:
    """Wait for a valid configuration. Return it and the hardware."""
    asked = settings.state_dir
    answers = await _state_directory_answers(settings)
    wait = Wait()
    listener.begin(settings.http_address, lambda: _awaiting(wait.why, tried=wait.tried))
    async with AsyncExitStack() as waiting:
        if settings.config_file_srcdir and answers:
            why = "nothing is served yet, since there is no configuration"
            begun_with, started = settings, time.time()

            async def status(_: Mapping[str, object]) -> Mapping[str, object]:
                from gpu_plugin.daemon.node_status import as_reply, without_configuration  # noqa: PLC0415 - on request

                return as_reply(without_configuration(begun_with, wait, started))

            refusals = serve_refusals(Path(settings.state_dir), lambda: f"{why}: {wait.why}", {"status": status})
            await waiting.enter_async_context(refusals)
        settings, source = await begin_with(settings, _checked(resolve), signals, wait)
    if answers or settings.state_dir != asked:  # else the call above has waited for it
        await _state_directory_answers(settings)
    configure(settings.log_format, settings.log_level)
    reading = "the node's files are being read for --device-list-strategy auto"
    listener.begin(settings.http_address, lambda: _awaiting(reading))
    strategy = ListStrategy()
    settings = await strategy.settled(settings)
    require_functions(settings)
    log_settings(settings, source.selected())
    log_strategy(settings)
    configuration = Configuration(settings, source, _checked(resolve), UNCHANGEABLE, strategy)
    return configuration, hardware_for(settings)


async def _state_directory_answers(settings: Settings) -> bool:
    """Return True if the state directory answers within STATE_PATIENCE. Raises ConfigError if the path is unsuitable."""

    def check() -> None:
        require_directory(Path(settings.state_dir))
        require_apart(Path(settings.state_dir), Path(settings.socket_dir))
        if settings.config_file_srcdir:  # commands are answered before the node's label is known
            make_way(Path(settings.state_dir))
            with suppress(OSError), opened(Path(settings.state_dir), make=True):
                pass

    try:
        await begin(check, "state").result(STATE_PATIENCE)
    except NoAnswerError:  # the daemon reports it
        return False
    return True


def _checked(resolve: Resolve) -> Resolve:
    """Return `resolve` with the check `require_functions`."""

    def checked(path: Path | None) -> Settings:
        settings = resolve(path)
        require_functions(settings)
        return settings

    return checked


def run(settings: Settings, resolve: Resolve) -> int:
    """Run `serve` on a new event loop. Raises ConfigError if the event loop of the settings is not installed."""
    if settings.event_loop == "uvloop" and importlib.util.find_spec("uvloop") is None:
        raise ConfigError("--event-loop: uvloop is not installed; install gpu-plugin[uvloop], or use asyncio")
    os.umask(0o022)
    status = anyio.run(serve, settings, resolve, backend_options={"use_uvloop": settings.event_loop == "uvloop"})
    gc.freeze()  # else the interpreter searches all objects for cycles at its end: 0.1 s of a node's shutdown
    return status
