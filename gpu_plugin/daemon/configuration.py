"""The settings in force: read again on a thread, applied whole or not at all, and what became of the last attempt."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import OPTIONS, Settings, SettingsStore
from gpu_plugin.config.words import shortened
from gpu_plugin.config.written import differing, written
from gpu_plugin.daemon.config_source import ConfigSource
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.signals import Signals
from gpu_plugin.runtime.slow_call import SlowCall
from gpu_plugin.runtime.threads import Workers, begin

if TYPE_CHECKING:
    from gpu_plugin.cluster.node_metadata import NodeMetadata

log = logging.getLogger(__name__)

Resolve = Callable[[Path | None], Settings]
"""Settings from flags, environment and the file at this path (None: no file). Blocks; raises ConfigError."""

PATIENCE = 30.0
"""Seconds that reading a configuration may take: a dead network file system holds no more than its thread."""

RETRY = 5.0
"""Seconds until it is tried again to write down which file is in force."""

SOURCES = ("config_file_srcdir", "node_name", "node_label", "kubeconfig", "default_config", "fallback_strategies")
"""Settings that say where the configuration comes from, which a running process cannot change."""

CHOSEN_WITHIN = 10.0
"""Seconds for a file to be chosen by the node's label before the first attempt counts as failed. The wait goes on."""

LONGEST_IN_FULL = 256 * 1024
"""Bytes of the settings in an answer of the control socket."""

LONGEST_LINE = 2000
"""Characters of the log line about the settings: a list of thousands of GPUs is left to the debugging."""

_FLAGS = {option.name: option.flags[0] for option in OPTIONS if option.flags} | {
    "socket_dir": "device-plugin-dir",
    "registration_socket": "kubelet-socket",
}


_KEYS = {option.name: option.file for option in OPTIONS} | {
    "socket_dir": "flags.devicePluginDir",
    "registration_socket": "",
}


class Configuration:
    """Which settings are in force, where they come from, and whether newer ones were refused."""

    def __init__(
        self,
        settings: Settings,
        source: ConfigSource,
        resolve: Resolve,
        unchangeable: Sequence[str],
        settled: Callable[[Settings], Awaitable[Settings]] | None = None,
    ) -> None:
        """Takes the settings of the start, how to resolve newer settings, and the names of settings that a restart takes.

        `settled` replaces what newer settings leave to the node.
        """
        self.store = SettingsStore(settings)
        self._source = source
        self._resolve = resolve
        self._settled = settled
        self._unchangeable = (*unchangeable, *SOURCES)
        self._asked = False
        self._bell = Pulse()
        self._since = time.time()
        self._refused = ""
        self._faults: tuple[str, ...] = ()
        self._reloads = {"applied": 0, "unchanged": 0, "refused": 0}
        self._file = source.current()
        self._kept = True
        # While one write hangs no other begins: a disk that does not answer holds one thread.
        self._keeping: SlowCall[bool] = SlowCall(partial(begin, name="chosen-configuration"))
        self._look = False

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self.store.current

    @property
    def node(self) -> "NodeMetadata":
        """The labels and annotations of the Node, which whoever follows them shares one watch for."""
        return self._source.node

    def ask(self) -> None:
        """Has the configuration read again; what is asked for while it is being read is one more time."""
        self._asked = True
        self._bell.ring()

    def look(self) -> None:
        """Has it written down again which file is in force, where that is gone. From the event loop's thread."""
        self._look = True
        self._bell.ring()

    @property
    def unkept(self) -> str:
        """Why a restart would not know which file is in force while the node's label is not known; empty where it would."""
        return "" if self._kept else "which config file is in force cannot be written down: a restart would not know it"

    async def watch(self) -> None:
        """Asks whenever another file is in force, or the same holds something else. Never returns."""
        await self._source.run(self.ask)

    async def run(self, take: Callable[[Settings], None], was_read: Callable[[], None] | None = None) -> None:
        """Reads the configuration whenever it is asked to, and hands it to `take`. Never returns.

        `take` applies settings whole, or raises ConfigError and has changed nothing. What cannot be read or taken is said
        once, and the settings of before stay in force. `was_read` is called after each attempt, whatever came of it.
        """
        threads = Workers("configuration")
        try:
            await self._keep()
            while True:
                if self._look:
                    self._look = False
                    await self._keep()
                elif self._asked:
                    self._asked = False
                    try:
                        await self._read(threads, take)
                    except anyio.get_cancelled_exc_class():
                        self._asked = True  # for the next daemon of this process
                        raise
                    if was_read is not None:
                        was_read()
                elif self._kept:
                    await self._bell.wait()
                else:
                    await self._bell.wait(RETRY)
                    self._look = True
        finally:
            threads.close()

    async def _read(self, threads: Workers, take: Callable[[Settings], None]) -> None:
        path = self._source.current()
        try:
            new = await _resolved(threads, self._resolve, path)
            if self._settled is not None:
                new = await self._settled(new)
            kept = [name for name in self._unchangeable if getattr(new, name) != getattr(self.settings, name)]
            if kept:
                raise ConfigError(f"{path or 'the configuration'}: {_for_a_restart(kept, self.settings, new)}")
            changed = new != self.settings
            if changed:
                take(new)
        except Exception as error:
            self._reloads["refused"] += 1
            ours = isinstance(error, ConfigError)
            faults = error.each() if isinstance(error, ConfigError) else (str(error),)
            if faults != self._faults:
                for fault in faults:
                    log.error("configuration: nothing is changed: %s", fault, exc_info=not ours)  # noqa: TRY400
            self._refused, self._faults = str(error), faults
            return
        mended, self._refused, self._faults = bool(self._refused), "", ()
        self._file = path
        if changed:
            self.store.current = new
            self._since = time.time()
        await self._keep()
        self._reloads["applied" if changed else "unchanged"] += 1
        if changed:
            log.info("configuration: applied")
            tell_settings(new, path)
        elif new.remarks != self.settings.remarks:
            self.store.current = new
            tell_remarks(new)
        else:
            log.log(logging.INFO if mended else logging.DEBUG, "configuration: valid, and it changes nothing")

    async def _keep(self) -> None:
        """Has the choice of the file in force outlive the process: it is taken again while the node's label is not known."""
        try:
            self._kept = await self._keeping.fresh(partial(self._source.keep, self._file), PATIENCE)
        except TimeoutError:
            self._kept = False
            log.warning("configuration: which file is in force could not be written down within %g s", PATIENCE)

    def in_full(self) -> Mapping[str, object]:
        """Every setting in force as a config file that asks for them; too much for an answer is left out, with how much it is."""
        content = written(self.settings)
        size = len(json.dumps(content))
        return content if size <= LONGEST_IN_FULL else {"left_out_bytes": size}

    def status(self) -> Mapping[str, object]:
        """The settings in force, and the reasons why others are not.

        `file` is the file of the settings in force, "" for none, `since` its time (Unix time in seconds). `wanted` is the file
        that was requested last, "" if its settings are in force. `refused` is the reason why the requested settings are not in
        force, `unheard` the reason why a change of the node's label would be missed; both are "" if nothing is wrong. `faults`
        has a sentence for each error in the refused settings. `without_effect` has flags and variables that change nothing.
        `reloads` counts outcomes.
        """
        wanted = self._source.wanted()
        return {
            "file": str(self._file or ""),
            "since": self._since,
            "wanted": str(wanted or "") if wanted != self._file else "",
            "refused": self._refused or self._source.complaint,
            "faults": list(self._faults or filter(None, [self._source.complaint])),
            "unheard": self._source.unheard,
            "without_effect": list(map(str, self.settings.without_effect)),
            "reloads": dict(self._reloads),
        }


def _for_a_restart(names: Sequence[str], old: Settings, new: Settings) -> str:
    """What of newer settings takes a restart, each with the key of the file that it comes from and both values."""
    flags = ", ".join(f"--{_FLAGS.get(name, name)}" for name in names)
    changes = ", ".join(
        f"{_KEYS.get(name) or f'--{_FLAGS.get(name, name)}'} from {getattr(old, name)!r} to {getattr(new, name)!r}"
        for name in names
    )
    return (
        f"{flags} cannot change while the process runs, so nothing of this is in force ({changes}): restart it, or take that "
        "change back to have all others taken now"
    )


class Wait(msgspec.Struct):
    """The wait for the first configuration, for commands and probes.

    `tried` is set after the first attempt. `failed` has a sentence for each reason why the last attempt failed.
    """

    tried: bool = False
    failed: tuple[str, ...] = ()
    source: ConfigSource | None = None

    @property
    def why(self) -> str:
        """What is wrong with it, or waited for. Never empty."""
        return "; ".join(self.reasons)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What is wrong with the configuration, or waited for, a sentence each. Never empty."""
        source = self.source
        chosen_by = "" if source is None else source.complaint or source.unknown
        return tuple(filter(None, (*self.failed, chosen_by))) or ("it is being read",)


async def begin_with(
    settings: Settings, resolve: Resolve, signals: Signals, wait: Wait | None = None
) -> tuple[Settings, ConfigSource]:
    """The settings to begin with and where newer ones come from: as given, or of the file that the node's label names.

    There it waits until there are good ones: serving by another configuration meanwhile would hand out devices that the
    right one does not have. A SIGHUP meanwhile has everything read again. `wait` is told meanwhile how that stands.
    """
    source = ConfigSource(settings)
    wait = wait or Wait()
    if not settings.config_file_srcdir:
        return settings, source
    log.info("waiting for the label %s of node %s to choose the configuration", settings.node_label, settings.node_name)
    wait.source = source
    asked, threads = asyncio.Event(), Workers("configuration")
    asked.set()
    found: list[Settings] = []

    async def read() -> None:
        with anyio.move_on_after(CHOSEN_WITHIN) as patience:
            await source.settled()
        if patience.cancelled_caught:
            wait.tried = True
            if not (source.complaint or source.unknown):
                wait.failed = (f"{settings.config_file_srcdir} has not been read within {CHOSEN_WITHIN:g} s",)
            log.warning("configuration: nothing is served until there is one: %s", wait.why)
            await source.settled()
            wait.failed = ()
        while not found:
            await asked.wait()
            asked.clear()
            try:
                found.append(await _resolved(threads, resolve, source.current()))
            except ConfigError as error:
                for fault in error.each():
                    log.error("configuration: nothing is served until there is a good one: %s", fault)  # noqa: TRY400
                wait.tried, wait.failed = True, error.each()
        tasks.cancel_scope.cancel()

    def look_again() -> None:
        source.look_again()
        asked.set()

    signals.on_reload(look_again)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(source.run, asked.set)
            tasks.start_soon(read)
    finally:
        threads.close()
    return found[0], source


async def _resolved(threads: Workers, resolve: Resolve, path: Path | None) -> Settings:
    try:
        return await threads.run(partial(resolve, path), PATIENCE)
    except TimeoutError:
        raise ConfigError(f"{path}: could not be read within {PATIENCE:g} s") from None


def tell_settings(settings: Settings, file: Path | None) -> None:
    """Says the file, what of the settings is not the default, and what of the file deserves a word."""
    asked = "; ".join(differing(settings)) or "nothing but defaults"
    log.info("configuration: %s: %s", file or "no file", shortened(asked, LONGEST_LINE))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("configuration: in full: %s", json.dumps(written(settings)))
    tell_remarks(settings)


def tell_remarks(settings: Settings) -> None:
    """Logs the remarks on the file, and which flags and variables have no effect."""
    for remark in settings.remarks:
        log.info("configuration: %s", remark)
    for fault in settings.without_effect:
        log.warning("configuration: %s", fault)
