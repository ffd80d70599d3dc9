"""Select the config file in force, and report when another file is in force or the file's content changes."""

import asyncio
import logging
import os
import threading
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec
from msgspec.structs import replace

from gpu_plugin.cluster.connection import require_client
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.label import NO_FILE, Choice, choose
from gpu_plugin.config.settings import Settings
from gpu_plugin.daemon.watched_file import ABSENT, FileWatcher, fingerprint
from gpu_plugin.runtime.inotify import ANY, Place, route
from gpu_plugin.runtime.regular_file import UnfitFileError, require_file
from gpu_plugin.state.directory import Identity, StateDirectory, identity

if TYPE_CHECKING:
    from gpu_plugin.cluster.node_metadata import NodeMetadata

log = logging.getLogger(__name__)

MAX_KUBECONFIG = 4 * 1024 * 1024  # bytes: hundreds of clusters, each with its certificates
LABEL_PATIENCE = 5.0  # seconds for the API server to return the label or an error, before the last choice is used

# The file with the last choice, in the state directory of flags and environment: a config file may set another directory.
CHOICE_FILE = "chosen-configuration.json"


class ChosenFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of CHOICE_FILE: the node, its label's name, the directory, and the chosen file; "" is the choice of no file."""

    node: str
    label: str
    directory: str
    file: str


class LastChoice:
    """Stores the last choice in force, since the API server may be unreachable at the next start.

    `read` and `write` block as long as the disk does, and never raise.
    """

    def __init__(self, settings: Settings) -> None:
        self._choice = ChosenFile(
            node=settings.node_name, label=settings.node_label, directory=settings.config_file_srcdir, file=NO_FILE
        )
        self._state = StateDirectory(Path(settings.state_dir))
        self._path = self._state.path / CHOICE_FILE
        self._found: Identity | None = None
        self.kept: str | None = None  # the stored file name

    def read(self) -> str | None:
        """Return the stored file name if it was chosen by the same label of the same node from the same directory, else None."""
        known = self._state.read(CHOICE_FILE, ChosenFile)
        self._found = identity(self._path)
        self.kept = known.file if known is not None and known == replace(self._choice, file=known.file) else None
        return self.kept

    @property
    def is_current(self) -> bool:
        """False if the stored file changed since the last read or write, or was removed, or its directory was renamed."""
        return identity(self._path) == self._found

    def write(self, file: str) -> None:
        """Store this choice for the next process, and set `kept` to it, or to None if it could not be written.

        After a failure the former choice is removed, too. With the former choice the next process would serve a configuration
        that the operator no longer wants; without a choice it serves nothing until it knows the label.
        """
        self.kept = file if self._state.write(CHOICE_FILE, replace(self._choice, file=file)) else None
        if self.kept is None:
            with suppress(OSError):
                self._path.unlink()
        self._found = identity(self._path)


class _Seen(msgspec.Struct, frozen=True):
    """The result of a read of the directory."""

    label: str  # of the node; empty without a label, or while the label is not known
    label_unknown: str  # why the label is not known
    choice: Choice
    content: str = ""  # the `fingerprint` of the chosen file


class ConfigSource:
    """The source of the configuration: no file, one file, or the file of a directory that the node's label selects.

    `changed` is set whenever another file is selected, the file's content changes, or a read is requested. The reader of the
    configuration clears it. The settings of a selected file may be refused; then the former file is in force.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError if a label selects the file, and the Kubernetes client is missing or --kubeconfig is invalid."""
        self.changed = asyncio.Event()
        self.complaint = ""  # why the label selects no file: it is not known, or its file does not exist
        self._settings = settings
        self._is_selected = anyio.Event()
        self._selected = Path(settings.config_file) if settings.config_file else None
        self._label: str | None = None
        self._label_known = anyio.Event()
        self._answered = anyio.Event()
        self._trouble = "the Kubernetes API has not answered yet"
        self._choice = Choice(NO_FILE)
        self._last_choice = LastChoice(settings)
        self._last: str | None = None  # name of the file in force, or of the last file in force
        self._last_is_read = False
        self._reading_last = threading.Lock()
        self._last_logged: tuple[str, str | None] | None = None
        self._requested = ""
        self._content: str | None = None  # the `fingerprint` of the selected file
        self._watcher = FileWatcher(self._read, self._apply)
        if settings.config_file_srcdir:
            self._selected = None
            require_client()
            _require_kubeconfig(settings.kubeconfig)
        else:
            self._is_selected.set()

    @cached_property
    def node(self) -> "NodeMetadata":
        """The Node's labels and annotations. Other parts use it, too."""
        from gpu_plugin.cluster.node_metadata import NodeMetadata  # noqa: PLC0415 - only for processes that use the API

        return NodeMetadata(self._settings.node_name, self._settings.kubeconfig)

    def selected(self) -> Path | None:
        """Return the selected config file, which need not exist; None if only flags and environment are selected."""
        return self._selected

    def wanted(self) -> Path | None:
        """Return the config file that was requested last. It need not exist, and another file may be selected."""
        return Path(self._settings.config_file_srcdir) / self._requested if self._requested else self._selected

    @property
    def unknown(self) -> str:
        """While the node's label selects the file and is not known, a text with the reason; empty otherwise."""
        if not self._settings.config_file_srcdir or self._label_known.is_set():
            return ""
        return f"waiting for {self._label_text()}: {self._trouble}"

    @property
    def watch_trouble(self) -> str:
        """Once the node's label is known, why changes of the label are not received now; empty if they are received."""
        if not self._label_known.is_set() or not self._trouble:
            return ""
        return f"changes of {self._label_text()} are not received: {self._trouble}"

    def look_again(self) -> None:
        """Read the directory and its files again, and set `changed`. Call on the event loop's thread only."""
        self._watcher.notify()
        self.changed.set()

    async def wait_selected(self) -> None:
        """Wait until a file is selected. Does not return while no file can be chosen."""
        await self._is_selected.wait()

    def _label_text(self) -> str:
        return f"the label {self._settings.node_label} of node {self._settings.node_name}"

    def keep(self, file: Path | None) -> bool:
        """Store for a restart that this file, chosen by the node's label, is in force. Blocks, and never raises.

        Returns True if the choice is stored. Repeated calls are cheap.
        """
        if not self._settings.config_file_srcdir:
            return True
        name = file.name if file is not None else NO_FILE
        self._read_last()
        self._last = name
        if name != self._last_choice.kept or not self._last_choice.is_current:
            self._last_choice.write(name)
        return name == self._last_choice.kept

    async def run(self) -> None:
        """Set `changed` whenever another file is selected or the file's content changes. Never returns."""
        if self._settings.config_file_srcdir:
            await self._follow_label()
        elif self._selected is not None:
            await FileWatcher(self._read_file, self._apply_content).run()
        else:
            await anyio.sleep_forever()

    async def _follow_label(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.node.run)
            tasks.start_soon(self._read_label)
            if not self._label_known.is_set():
                with anyio.move_on_after(LABEL_PATIENCE):
                    await self._answered.wait()
            await self._watcher.run()

    async def _read_label(self) -> None:
        node = self.node
        while True:
            if node.trouble is not None or node.labels is not None:
                self._trouble = node.trouble or ""
                self._answered.set()
            if node.labels is not None:
                value = node.labels.get(self._settings.node_label)
                if not self._label_known.is_set() or value != self._label:
                    self._label = value
                    self._label_known.set()
                    self._watcher.notify()
            await node.changed.wait()

    def _read(self) -> tuple[_Seen, frozenset[Place]]:
        """Read the directory and choose a file. Blocks.

        Returns what it found, and the places where changes may change it.
        """
        settings, label_unknown, label = self._settings, self.unknown, self._label or ""
        directory = Path(settings.config_file_srcdir)
        places = route(directory) | {Place(os.path.realpath(directory), ANY)}
        present, files_unknown = _configs(directory)
        choice = self._choose(label, present, label_unknown, files_unknown)
        if not choice.file:
            return _Seen(label, label_unknown, choice), places
        file = directory / choice.file
        return _Seen(label, label_unknown, choice, fingerprint(file)), places | route(file)

    def _choose(self, label: str, present: frozenset[str], label_unknown: str, files_unknown: str) -> Choice:
        """Return the choice. Read the last choice only if the result depends on it: the state directory may hang. Blocks."""
        settings = self._settings

        def chosen() -> Choice:
            default, fallbacks = settings.default_config, settings.fallback_strategies
            return choose(label, present, default, fallbacks, self._last, label_unknown, files_unknown)

        choice = chosen()
        if self._last_is_read or (choice.file and not choice.complaint):
            return choice
        if self._reading_last.acquire(blocking=False):
            try:
                self._read_last()
            finally:
                self._reading_last.release()
            return chosen()
        # Another call hangs in the state directory. This call does not wait for it, since each call would block a thread.
        unread = f"the last choice is not known: the state directory {settings.state_dir} does not answer"
        return Choice(None, "; ".join(filter(None, (choice.complaint, unread))), choice.asked)

    def _read_last(self) -> None:
        if not self._last_is_read:
            self._last = self._last_choice.read()
            self._last_is_read = True

    def _apply(self, seen: _Seen) -> None:
        self._log_choice(seen)
        choice = seen.choice
        self.complaint, self._requested = choice.complaint, choice.asked
        if choice.file is None:
            return
        gone = bool(choice.complaint) and seen.content == ABSENT
        if choice.file == self._choice.file and (seen.content == self._content or gone):
            return
        self._choice, self._content = choice, seen.content
        self._selected = Path(self._settings.config_file_srcdir) / choice.file if choice.file != NO_FILE else None
        self._is_selected.set()
        self.changed.set()

    def _read_file(self) -> tuple[str, frozenset[Place]]:
        file = Path(self._settings.config_file)
        return fingerprint(file), route(file)

    def _apply_content(self, content: str) -> None:
        if content != self._content:
            self._content = content
            self.changed.set()

    def _log_choice(self, seen: _Seen) -> None:
        choice = seen.choice
        if choice.complaint:
            logged = ("label_unknown" if seen.label_unknown else f"label {seen.label}", choice.file)
            if self._last_logged != logged:
                level = logging.WARNING if seen.label_unknown else logging.ERROR
                until = "; nothing is served until there is a valid configuration" if choice.file is None else ""
                log.log(level, "configuration: %s%s", choice.complaint, until)
            self._last_logged = logged
        elif choice.file != self._choice.file or self._last_logged is not None or self._content is None:
            self._last_logged = None
            label = self._settings.node_label
            by = f"label {label}={seen.label}" if seen.label else f"no label {label}"
            log.info("the configuration of this node is %s (%s)", choice.file or "flags and environment only", by)


def _require_kubeconfig(kubeconfig: str) -> None:
    """Raise ConfigError if the file cannot be a kubeconfig. A file that does not exist or is unreadable is no error yet."""
    if not kubeconfig:
        return
    try:
        require_file(Path(kubeconfig), MAX_KUBECONFIG)
    except UnfitFileError as error:
        raise ConfigError(f"--kubeconfig: {kubeconfig}: {error.strerror}") from None
    except OSError:
        return


def _configs(directory: Path) -> tuple[frozenset[str], str]:
    """Return the names of the files in `directory`, and the reason if they cannot be read, else "".

    Hidden files, such as the links in a ConfigMap's volume, are left out, and names that are not printable: a label cannot
    have such a value.
    """
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_file()]
    except OSError as error:
        return frozenset(), f"the directory {directory} of config files cannot be read: {error.strerror or error}"
    return frozenset(name for name in names if name.isprintable()), ""
