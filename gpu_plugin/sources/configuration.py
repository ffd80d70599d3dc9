"""The settings in force: read anew on a thread, applied whole or not at all, and what became of the last attempt."""

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.options import OPTIONS
from gpu_plugin.config.settings import Settings
from gpu_plugin.pulse import Pulse
from gpu_plugin.sources.source import ConfigSource
from gpu_plugin.threads import DaemonThreads

log = logging.getLogger(__name__)

Resolve = Callable[[Path | None], Settings]
"""Settings from flags, environment and the file at this path (None: no file). Blocks; raises ConfigError."""

PATIENCE = 30.0
"""Seconds that reading a configuration may take: a dead network file system holds no more than its thread."""

SOURCES = ("config_file_srcdir", "node_name", "node_label", "kubeconfig", "default_config", "fallback_strategies")
"""Settings that say where the configuration comes from, which a running process cannot change."""

CHOSEN_WITHIN = 30.0
"""Seconds for a file to be chosen by the node's label before the first attempt counts as failed. The wait goes on."""


_FLAGS = {option.name: option.flags[0] for option in OPTIONS if option.flags} | {
    "socket_dir": "device-plugin-dir",
    "registration_socket": "kubelet-socket",
}


class Configuration:
    """Which settings are in force, where they come from, and whether newer ones were refused."""

    def __init__(self, settings: Settings, source: ConfigSource, resolve: Resolve, unchangeable: Sequence[str]) -> None:
        """Takes what to begin with, how to resolve newer settings, and the names of those that a restart takes."""
        self.settings = settings
        self._source = source
        self._resolve = resolve
        self._unchangeable = (*unchangeable, *SOURCES)
        self._asked = False
        self._bell = Pulse()
        self._since = time.time()
        self._refused = ""
        self._reloads = {"applied": 0, "unchanged": 0, "refused": 0}

    def ask(self) -> None:
        """Has the configuration read again; what is asked for while it is being read is one more time."""
        self._asked = True
        self._bell.ring()

    async def watch(self) -> None:
        """Asks whenever another file is in force, or the same holds something else. Never returns."""
        await self._source.run(self.ask)

    async def run(self, take: Callable[[Settings], None]) -> None:
        """Reads the configuration whenever it is asked to, and hands it to `take`. Never returns.

        `take` applies settings whole, or raises ConfigError and has changed nothing. What cannot be read or taken is said
        once, and the settings of before stay in force.
        """
        threads = DaemonThreads("configuration")
        try:
            while True:
                if self._asked:
                    self._asked = False
                    await self._read(threads, take)
                else:
                    await self._bell.wait()
        finally:
            threads.close()

    async def _read(self, threads: DaemonThreads, take: Callable[[Settings], None]) -> None:
        path = self._source.current()
        try:
            new = await _resolved(threads, self._resolve, path)
            kept = [name for name in self._unchangeable if getattr(new, name) != getattr(self.settings, name)]
            if kept:
                said = ", ".join(f"--{_FLAGS.get(name, name)}" for name in kept)
                raise ConfigError(
                    f"{path or 'the configuration'}: {said} cannot change while the process runs; restart it"
                )
            changed = new != self.settings
            if changed:
                take(new)
        except Exception as error:
            self._reloads["refused"] += 1
            if str(error) != self._refused:
                trace = not isinstance(error, ConfigError)
                log.error("configuration: nothing is changed: %s", error, exc_info=trace)  # noqa: TRY400
            self._refused = str(error)
            return
        mended, self._refused = bool(self._refused), ""
        if changed:
            self.settings = new
            self._since = time.time()
        self._reloads["applied" if changed else "unchanged"] += 1
        if changed:
            log.info("configuration: applied")
        else:
            log.log(logging.INFO if mended else logging.DEBUG, "configuration: good, and it asks for nothing new")

    def status(self) -> Mapping[str, object]:
        """For whoever asks: the file, since when its settings are in force (Unix time in seconds), the last refusal, counts."""
        file = self._source.current()
        return {
            "file": str(file) if file else "",
            "since": self._since,
            "refused": self._refused or self._source.complaint,
            "reloads": dict(self._reloads),
        }


@dataclass(slots=True)
class Wait:
    """The wait for a configuration to begin with, for whoever asks meanwhile.

    `tried` says whether the first attempt is over, `failed` why the last one came to nothing.
    """

    tried: bool = False
    failed: str = ""
    source: ConfigSource | None = None

    @property
    def why(self) -> str:
        """What is wrong with it, or waited for. Never empty."""
        source = self.source
        reasons = (self.failed, *(() if source is None else (source.complaint, source.unknown)))
        return "; ".join(filter(None, reasons)) or "it is being read"


async def begin_with(
    settings: Settings, resolve: Resolve, wait: Wait | None = None
) -> tuple[Settings, ConfigSource] | None:
    """The settings to begin with and where newer ones come from: as given, or of the file that the node's label names.

    There it waits until there are good ones: serving by another configuration meanwhile would hand out devices that the
    right one does not have. None where a signal to stop came first. `wait` is told meanwhile how that stands.
    """
    source = ConfigSource(settings)
    wait = wait or Wait()
    if not settings.config_file_srcdir:
        return settings, source
    log.info("waiting for the label %s of node %s to choose the configuration", settings.node_label, settings.node_name)
    wait.source = source
    bell, threads = Pulse(), DaemonThreads("configuration")
    changed = True
    found: list[Settings] = []

    def ask() -> None:
        nonlocal changed
        changed = True
        bell.ring()

    async def read() -> None:
        nonlocal changed
        with anyio.move_on_after(CHOSEN_WITHIN) as patience:
            await source.settled()
        if patience.cancelled_caught:
            wait.tried = True
            wait.failed = f"{settings.config_file_srcdir} has not been read within {CHOSEN_WITHIN:g} s"
            await source.settled()
        while not found:
            if not changed:
                await bell.wait()
                continue
            changed = False
            try:
                found.append(await _resolved(threads, resolve, source.current()))
            except ConfigError as error:
                log.error("configuration: nothing is served until there is a good one: %s", error)  # noqa: TRY400
                wait.tried, wait.failed = True, str(error)
        tasks.cancel_scope.cancel()

    async def stop() -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGQUIT) as signals:
            async for number in signals:
                log.info("%s: stopping", signal.Signals(number).name)
                tasks.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop)
            tasks.start_soon(source.run, ask)
            tasks.start_soon(read)
    finally:
        threads.close()
    return (found[0], source) if found else None


async def _resolved(threads: DaemonThreads, resolve: Resolve, path: Path | None) -> Settings:
    try:
        return await threads.run(partial(resolve, path), PATIENCE)
    except TimeoutError:
        raise ConfigError(f"{path}: could not be read within {PATIENCE:g} s") from None
