"""The settings in force. New settings are read on a thread and applied completely or not at all."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import anyio
import msgspec

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import OPTIONS, Settings, SettingsStore
from gpu_plugin.config.words import shortened
from gpu_plugin.config.written import differing, written
from gpu_plugin.daemon.config_source import ConfigSource
from gpu_plugin.daemon.list_strategy import ListStrategy
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.signals import Signals
from gpu_plugin.runtime.threads import SlowCall, begin

if TYPE_CHECKING:
    from gpu_plugin.cluster.node_metadata import NodeMetadata
    from gpu_plugin.status import model

log = logging.getLogger(__name__)

# Reads the settings from flags, environment and the file at this path (None: no file). Blocks. Raises ConfigError.
Resolve = Callable[[Path | None], Settings]

PATIENCE = 30.0  # seconds that the read of a configuration may take: a dead network file system blocks only its thread
RETRY = 5.0  # seconds between two attempts to write the name of the file in force to the state directory
CHOSEN_WITHIN = 10.0  # seconds after which the first choice by the node's label counts as failed; the wait continues
LONGEST_IN_FULL = 256 * 1024  # bytes of the settings in a reply of the control socket
LONGEST_LINE = 2000  # characters of the log line: a list of thousands of GPUs is only in the debug log

# Settings that select the source of the configuration. A running process cannot change them.
SOURCES = ("config_file_srcdir", "node_name", "node_label", "kubeconfig", "default_config", "fallback_strategies")


class SettingsUser(Protocol):
    """A part that new settings are applied to before they are in force."""

    def apply_settings(self, new: Settings) -> None:
        """Apply all settings, or raise ConfigError and change nothing."""


class Configuration:
    """The settings in force, their source, and the result of the last attempt to change them."""

    def __init__(
        self,
        settings: Settings,
        source: ConfigSource,
        resolve: Resolve,
        unchangeable: Sequence[str],
        strategy: ListStrategy | None = None,
    ) -> None:
        """Begin with `settings`. `resolve` reads newer settings.

        `unchangeable` has the names of settings that only a restart changes. `strategy` replaces the device list strategy `auto`
        of newer settings.
        """
        self.store = SettingsStore(settings)
        self._source = source
        self._resolve = resolve
        self._strategy = strategy
        self._unchangeable = (*unchangeable, *SOURCES)
        self._since = time.time()
        self._refused = ""
        self._faults: tuple[str, ...] = ()
        self._reloads = {"applied": 0, "unchanged": 0, "refused": 0}
        self._file_in_force = source.selected()
        self._saved = True
        self._to_save = Pulse()
        # While a write hangs, no other write begins: a disk that does not answer blocks only one thread.
        self._saving: SlowCall[bool] = SlowCall("chosen-configuration")

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
        self._source.changed.set()

    def check_stored_choice(self) -> None:
        """Write the name of the file in force again if its file changed or is missing. Call on the event loop's thread."""
        self._to_save.ring()

    @property
    def storage_trouble(self) -> str:
        """Why the name of the file in force is not stored for a restart without the node's label; empty if it is stored."""
        if self._saved:
            return ""
        return "the name of the config file in force cannot be written: it would be lost at a restart"

    async def watch(self) -> None:
        """Watch the source, and store the name of the file in force for a restart. Never returns."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._source.run)
            tasks.start_soon(self._keep_choice)

    async def _keep_choice(self) -> None:
        """Write the name of the file in force: the next process uses that file while it does not know the node's label."""
        while True:
            file = self._file_in_force
            try:
                self._saved = await self._saving.fresh(partial(self._source.keep, file), PATIENCE)
            except TimeoutError:
                self._saved = False
                log.warning("configuration: the name of the file in force could not be written within %g s", PATIENCE)
            if file == self._file_in_force:
                await self._to_save.wait(None if self._saved else RETRY)

    async def update(self, user: SettingsUser) -> None:
        """Wait for a request, read the configuration, apply the settings to `user`, and put them in force.

        On an error, which is logged once, the former settings stay in force.
        """
        await self._source.changed.wait()
        self._source.changed.clear()
        path = self._source.selected()
        effect = "nothing is changed"
        try:
            new = await self._read(path)
            changed = new != self.settings
            if changed:
                effect = "the new settings may be in effect in part until the next change"
                user.apply_settings(new)
        except anyio.get_cancelled_exc_class():
            self._source.changed.set()  # for the next daemon of this process
            raise
        except Exception as error:  # noqa: BLE001 - the former settings stay in force
            self._refuse(error, effect)
        else:
            self._put_in_force(new, path, changed=changed)

    async def _read(self, path: Path | None) -> Settings:
        """Return the settings with the file at this path. Raises ConfigError if they are invalid or need a restart."""
        new = await _resolved(self._resolve, path)
        if self._strategy is not None:
            new = await self._strategy.settled(new)
        kept = [name for name in self._unchangeable if getattr(new, name) != getattr(self.settings, name)]
        if kept:
            raise ConfigError(f"{path or 'the configuration'}: {_for_a_restart(kept, self.settings, new)}")
        return new

    def _refuse(self, error: Exception, effect: str) -> None:
        """Count and log an error. `effect` is the effect of an unexpected error; a ConfigError changes nothing."""
        self._reloads["refused"] += 1
        faults: tuple[str, ...] = (str(error),)
        unexpected: Exception | None = error
        if isinstance(error, ConfigError):
            faults, unexpected, effect = error.each(), None, "nothing is changed"
        if faults != self._faults:
            for fault in faults:
                log.error("configuration: %s: %s", effect, fault, exc_info=unexpected)
        self._refused, self._faults = str(error), faults

    def _put_in_force(self, new: Settings, path: Path | None, *, changed: bool) -> None:
        recovered, self._refused, self._faults = bool(self._refused), "", ()
        old, self._file_in_force = self.settings, path
        self._to_save.ring()
        self._reloads["applied" if changed else "unchanged"] += 1
        if changed:
            self.store.current = new
            self._since = time.time()
            log.info("configuration: applied")
            log_settings(new, path)
        elif new.remarks != old.remarks:
            self.store.current = new
            log_remarks(new)
        else:
            log.log(logging.INFO if recovered else logging.DEBUG, "configuration: valid, and it changes nothing")

    def in_full(self) -> Mapping[str, object]:
        """Return all settings in force in the form of a config file, or only their size if they are too long for a reply."""
        content = written(self.settings)
        size = len(json.dumps(content))
        return content if size <= LONGEST_IN_FULL else {"left_out_bytes": size}

    def status(self) -> "model.Configuration":
        """Return the settings in force, and the reasons why others are not."""
        from gpu_plugin.status import model  # noqa: PLC0415 - pods wait for the daemon's start

        wanted = self._source.wanted()
        return model.Configuration(
            file=str(self._file_in_force or ""),
            since=self._since,
            wanted=str(wanted or "") if wanted != self._file_in_force else "",
            refused=self._refused or self._source.complaint,
            faults=tuple(self._faults or filter(None, [self._source.complaint])),
            unheard=self._source.watch_trouble,
            without_effect=tuple(map(str, self.settings.without_effect)),
            reloads=dict(self._reloads),
        )


def _for_a_restart(names: Sequence[str], old: Settings, new: Settings) -> str:
    """Return an error message that lists the settings `names`, their keys in the file, and their old and new values."""
    made_of = {"socket_dir": "device_plugin_dir", "registration_socket": "kubelet_socket"}
    options = {option.name: option for option in OPTIONS}
    flags, changes = [], []
    for name in names:
        option = options[made_of.get(name, name)]
        flags.append(f"--{option.flags[0]}")
        changes.append(f"{option.file or flags[-1]} from {getattr(old, name)!r} to {getattr(new, name)!r}")
    return (
        f"{', '.join(flags)} cannot change while the process runs, so no part of the new configuration is in force "
        f"({', '.join(changes)}): restart the process, or undo this change to apply all other changes now"
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
    if not settings.config_file_srcdir:
        return settings, source
    log.info("waiting for the label %s of node %s to choose the configuration", settings.node_label, settings.node_name)
    wait = wait or Wait()
    wait.source = source
    signals.on_reload(source.look_again)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source.run)
        await _wait_for_choice(settings, source, wait)
        settings = await _first(resolve, source, wait)
        tasks.cancel_scope.cancel()
    return settings, source


async def _wait_for_choice(settings: Settings, source: ConfigSource, wait: Wait) -> None:
    with anyio.move_on_after(CHOSEN_WITHIN) as limit:
        await source.wait_selected()
    if limit.cancelled_caught:
        wait.tried = True
        if not (source.complaint or source.unknown):
            wait.failed = (f"{settings.config_file_srcdir} could not be read within {CHOSEN_WITHIN:g} s",)
        log.warning("configuration: nothing is served until there is a configuration: %s", wait.why)
        await source.wait_selected()
        wait.failed = ()


async def _first(resolve: Resolve, source: ConfigSource, wait: Wait) -> Settings:
    """Return the settings of the chosen file, once it is valid."""
    while True:
        source.changed.clear()
        try:
            return await _resolved(resolve, source.selected())
        except ConfigError as error:
            for fault in error.each():
                log.error("configuration: nothing is served until there is a valid configuration: %s", fault)  # noqa: TRY400
            wait.tried, wait.failed = True, error.each()
        await source.changed.wait()


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
