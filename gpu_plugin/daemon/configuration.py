"""The settings in force. New settings are read on a thread and applied completely or not at all."""

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
from gpu_plugin.runtime.threads import SlowCall, begin

if TYPE_CHECKING:
    from gpu_plugin.cluster.node_metadata import NodeMetadata

log = logging.getLogger(__name__)

Resolve = Callable[[Path | None], Settings]
"""Reads the settings from flags, environment and the file at this path (None: no file). Blocks. Raises ConfigError."""

PATIENCE = 30.0
"""Seconds that the read of a configuration may take: a dead network file system blocks only its thread."""

RETRY = 5.0
"""Seconds between two attempts to write the name of the file in force to the state directory."""

SOURCES = ("config_file_srcdir", "node_name", "node_label", "kubeconfig", "default_config", "fallback_strategies")
"""Settings that select the source of the configuration. A running process cannot change them."""

CHOSEN_WITHIN = 10.0
"""Seconds until the first choice by the node's label counts as failed. The wait for the choice continues after that."""

LONGEST_IN_FULL = 256 * 1024
"""Limit in bytes for the settings in a reply of the control socket."""

LONGEST_LINE = 2000
"""Limit in characters for the log line about the settings: a list of thousands of GPUs is only in the debug log."""

_FLAGS = {option.name: option.flags[0] for option in OPTIONS if option.flags} | {
    "socket_dir": "device-plugin-dir",
    "registration_socket": "kubelet-socket",
}


_KEYS = {option.name: option.file for option in OPTIONS} | {
    "socket_dir": "flags.devicePluginDir",
    "registration_socket": "",
}


class Configuration:
    """The settings in force, their source, and the result of the last attempt to change them."""

    def __init__(
        self,
        settings: Settings,
        source: ConfigSource,
        resolve: Resolve,
        unchangeable: Sequence[str],
        settled: Callable[[Settings], Awaitable[Settings]] | None = None,
    ) -> None:
        """Begin with `settings`. `resolve` reads newer settings.

        `unchangeable` has the names of settings that only a restart changes. `settled` replaces values of newer settings that
        depend on the node (`auto`).
        """
        self.store = SettingsStore(settings)
        self._source = source
        self._resolve = resolve
        self._settled = settled
        self._unchangeable = (*unchangeable, *SOURCES)
        self._requested = False
        self._wakeup = Pulse()
        self._since = time.time()
        self._refused = ""
        self._faults: tuple[str, ...] = ()
        self._reloads = {"applied": 0, "unchanged": 0, "refused": 0}
        self._file = source.current()
        self._saved = True
        # While a write hangs, no other write begins: a disk that does not answer blocks only one thread.
        self._saving: SlowCall[bool] = SlowCall("chosen-configuration")
        self._rewrite = False

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self.store.current

    @property
    def node(self) -> "NodeMetadata":
        """The labels and annotations of the Node. All subscribers share one watch."""
        return self._source.node

    def request_read(self) -> None:
        """Request a new read of the configuration. Requests during a read lead to one more read."""
        self._requested = True
        self._wakeup.ring()

    def check_stored_choice(self) -> None:
        """Write the name of the file in force again if its file changed or is missing. Call on the event loop's thread."""
        self._rewrite = True
        self._wakeup.ring()

    @property
    def storage_trouble(self) -> str:
        """Why the name of the file in force is not stored for a restart without the node's label; empty if it is stored."""
        if self._saved:
            return ""
        return "the name of the config file in force cannot be written: it would be lost at a restart"

    async def watch(self) -> None:
        """Request a read whenever another file is in force or the file's content changes. Never returns."""
        await self._source.run(self.request_read)

    async def run(self, apply: Callable[[Settings], None], was_read: Callable[[], None] | None = None) -> None:
        """Read the configuration at each request and pass it to `apply`. Never returns.

        `apply` applies all settings, or raises ConfigError and changes nothing. An error is logged once, and the former settings
        stay in force. `was_read` is called after each attempt, also after a failure.
        """
        await self._save()
        while True:
            if self._rewrite:
                self._rewrite = False
                await self._save()
            elif self._requested:
                self._requested = False
                try:
                    await self._read(apply)
                except anyio.get_cancelled_exc_class():
                    self._requested = True  # for the next daemon of this process
                    raise
                if was_read is not None:
                    was_read()
            elif self._saved:
                await self._wakeup.wait()
            else:
                await self._wakeup.wait(RETRY)
                self._rewrite = True

    async def _read(self, apply: Callable[[Settings], None]) -> None:
        path = self._source.current()
        try:
            new = await _resolved(self._resolve, path)
            if self._settled is not None:
                new = await self._settled(new)
            kept = [name for name in self._unchangeable if getattr(new, name) != getattr(self.settings, name)]
            if kept:
                raise ConfigError(f"{path or 'the configuration'}: {_for_a_restart(kept, self.settings, new)}")
            changed = new != self.settings
            if changed:
                apply(new)
        except Exception as error:
            self._reloads["refused"] += 1
            ours = isinstance(error, ConfigError)
            faults = error.each() if isinstance(error, ConfigError) else (str(error),)
            if faults != self._faults:
                for fault in faults:
                    log.error("configuration: nothing is changed: %s", fault, exc_info=not ours)  # noqa: TRY400
            self._refused, self._faults = str(error), faults
            return
        recovered, self._refused, self._faults = bool(self._refused), "", ()
        self._file = path
        if changed:
            self.store.current = new
            self._since = time.time()
        await self._save()
        self._reloads["applied" if changed else "unchanged"] += 1
        if changed:
            log.info("configuration: applied")
            log_settings(new, path)
        elif new.remarks != self.settings.remarks:
            self.store.current = new
            log_remarks(new)
        else:
            log.log(logging.INFO if recovered else logging.DEBUG, "configuration: valid, and it changes nothing")

    async def _save(self) -> None:
        """Write the name of the file in force: the next process uses that file while it does not know the node's label."""
        try:
            self._saved = await self._saving.fresh(partial(self._source.keep, self._file), PATIENCE)
        except TimeoutError:
            self._saved = False
            log.warning("configuration: the name of the file in force could not be written within %g s", PATIENCE)

    def in_full(self) -> Mapping[str, object]:
        """Return all settings in force in the form of a config file, or only their size if they are too long for a reply."""
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
            "unheard": self._source.watch_trouble,
            "without_effect": list(map(str, self.settings.without_effect)),
            "reloads": dict(self._reloads),
        }


def _for_a_restart(names: Sequence[str], old: Settings, new: Settings) -> str:
    """Return an error message that lists the settings `names`, their keys in the file, and their old and new values."""
    flags = ", ".join(f"--{_FLAGS.get(name, name)}" for name in names)
    changes = ", ".join(
        f"{_KEYS.get(name) or f'--{_FLAGS.get(name, name)}'} from {getattr(old, name)!r} to {getattr(new, name)!r}"
        for name in names
    )
    return (
        f"{flags} cannot change while the process runs, so no part of the new configuration is in force ({changes}): restart "
        "the process, or undo this change to apply all other changes now"
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
        """The reasons in one text. Never empty."""
        return "; ".join(self.reasons)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why there is no configuration yet: errors, or the state of the wait, one sentence each. Never empty."""
        source = self.source
        chosen_by = "" if source is None else source.complaint or source.unknown
        return tuple(filter(None, (*self.failed, chosen_by))) or ("the configuration is being read",)


async def begin_with(
    settings: Settings, resolve: Resolve, signals: Signals, wait: Wait | None = None
) -> tuple[Settings, ConfigSource]:
    """Return the first settings and the source of newer settings.

    If the node's label selects the file, wait until the label is known and the file is valid: with another configuration the
    daemon could give pods devices that the right configuration does not have. During the wait, SIGHUP reads everything again,
    and `wait` has the state of the wait. Otherwise return `settings`.
    """
    source = ConfigSource(settings)
    wait = wait or Wait()
    if not settings.config_file_srcdir:
        return settings, source
    log.info("waiting for the label %s of node %s to choose the configuration", settings.node_label, settings.node_name)
    wait.source = source
    requested = asyncio.Event()
    requested.set()
    found: list[Settings] = []

    async def read() -> None:
        with anyio.move_on_after(CHOSEN_WITHIN) as limit:
            await source.settled()
        if limit.cancelled_caught:
            wait.tried = True
            if not (source.complaint or source.unknown):
                wait.failed = (f"{settings.config_file_srcdir} could not be read within {CHOSEN_WITHIN:g} s",)
            log.warning("configuration: nothing is served until there is a configuration: %s", wait.why)
            await source.settled()
            wait.failed = ()
        while not found:
            await requested.wait()
            requested.clear()
            try:
                found.append(await _resolved(resolve, source.current()))
            except ConfigError as error:
                for fault in error.each():
                    log.error("configuration: nothing is served until there is a valid configuration: %s", fault)  # noqa: TRY400
                wait.tried, wait.failed = True, error.each()
        tasks.cancel_scope.cancel()

    def look_again() -> None:
        source.look_again()
        requested.set()

    signals.on_reload(look_again)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source.run, requested.set)
        tasks.start_soon(read)
    return found[0], source


async def _resolved(resolve: Resolve, path: Path | None) -> Settings:
    try:
        return await begin(partial(resolve, path), "configuration").result(PATIENCE)
    except TimeoutError:
        raise ConfigError(f"{path}: could not be read within {PATIENCE:g} s") from None


def log_settings(settings: Settings, file: Path | None) -> None:
    """Log the file, the settings that differ from the defaults, and the remarks on the file."""
    changes = "; ".join(differing(settings)) or "only defaults"
    log.info("configuration: %s: %s", file or "no file", shortened(changes, LONGEST_LINE))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("configuration: in full: %s", json.dumps(written(settings)))
    log_remarks(settings)


def log_remarks(settings: Settings) -> None:
    """Log the remarks on the file, and the flags and variables that have no effect."""
    for remark in settings.remarks:
        log.info("configuration: %s", remark)
    for fault in settings.without_effect:
        log.warning("configuration: %s", fault)
