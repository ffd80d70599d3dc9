"""Which config file is in force, and when it is another or holds something else."""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec

from gpu_plugin.cluster.connection import require_client
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.label import NO_FILE, Choice, choose
from gpu_plugin.config.settings import Settings
from gpu_plugin.daemon.watched_file import ABSENT, FileWatcher, fingerprint, watch_file
from gpu_plugin.runtime.inotify import ANY, Place, route
from gpu_plugin.runtime.regular_file import UnfitFileError, require_file
from gpu_plugin.state.directory import Identity, StateDirectory, identity

if TYPE_CHECKING:
    from gpu_plugin.cluster.node_metadata import NodeMetadata

log = logging.getLogger(__name__)

MAX_KUBECONFIG = 4 * 1024 * 1024
"""Bytes of a kubeconfig: hundreds of clusters, each with its certificates."""

LABEL_PATIENCE = 5.0
"""Seconds at the start for the API server to tell the node's label or to fail, before the last choice is used."""

CHOICE_FILE = "chosen-configuration.json"
"""Where that is remembered, in the state directory of flags and environment: the config file itself may name another one."""


class ChosenFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds: by which label of which node, which file of which directory was chosen; "" for none at all."""

    node: str
    label: str
    directory: str
    file: str


class LastChoice:
    """Remembers the choice that was in force last: the API server may be away at the next start.

    Reading and writing block for as long as the disk does, and never raise.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._state = StateDirectory(Path(settings.state_dir))
        self._path = self._state.path / CHOICE_FILE
        self._found: Identity | None = None
        self.kept: str | None = None
        """The file that a restart would know of."""

    def read(self) -> str | None:
        """The file chosen last by the same label of the same node, from the same directory; None where none is known."""
        known = self._state.read(CHOICE_FILE, ChosenFile)
        self._found = identity(self._path)
        self.kept = known.file if known is not None and known == self._of(known.file) else None
        return self.kept

    @property
    def is_current(self) -> bool:
        """Whether what was read or written last is there still: it may have been removed, or its directory renamed."""
        return identity(self._path) == self._found

    def write(self, file: str) -> None:
        """Has this choice outlive the process; `kept` says whether that worked.

        Where it did not, nothing is left of the choice of before: without one nothing is served while the label is not known, by
        an old one what the operator no longer wants would be.
        """
        self.kept = file if self._state.write(CHOICE_FILE, self._of(file)) else None
        if self.kept is None:
            with suppress(OSError):
                self._path.unlink()
        self._found = identity(self._path)

    def _of(self, file: str) -> ChosenFile:
        settings = self._settings
        return ChosenFile(
            node=settings.node_name, label=settings.node_label, directory=settings.config_file_srcdir, file=file
        )


class ConfigSource:
    """Where the configuration comes from: no file, one file, or the one in a directory that the node's label names."""

    def __init__(self, settings: Settings, known: str | None = None) -> None:
        """`known` is the `fingerprint` of the one file from before it was read; without it, `run` calls at once.

        Raises:
            ConfigError: a directory is given, and the Kubernetes client that its files are chosen with is not installed, or what
                --kubeconfig names is no such file.
        """
        self._settings = settings
        self._known = known
        self._settled = anyio.Event()
        self._file = Path(settings.config_file) if settings.config_file else None
        self._label: str | None = None
        self._label_known = anyio.Event()
        self._trouble = "the Kubernetes API has not told it yet"
        self._choice = Choice(NO_FILE)
        self._memory = LastChoice(settings)
        self._last: str | None = None
        """The file in force, or the one that was in force last."""
        self._recalled = False
        self._recalling = threading.Lock()
        self._last_logged: tuple[str, str | None] | None = None
        self.complaint = ""
        """What is wrong with the node's label, while it names no file that is there or is not known; empty otherwise."""
        self._asked = ""
        self._content: str | None = None
        self._watcher: FileWatcher[tuple[str, str, Choice, str]] | None = None
        if settings.config_file_srcdir:
            self._file = None
            require_client()
            _require_kubeconfig(settings.kubeconfig)
        else:
            self._settled.set()

    @cached_property
    def node(self) -> "NodeMetadata":
        """The Node's labels and annotations, also for others than us."""
        from gpu_plugin.cluster.node_metadata import NodeMetadata  # noqa: PLC0415 - for those alone who talk to the API

        return NodeMetadata(self._settings.node_name, self._settings.kubeconfig)

    def current(self) -> Path | None:
        """The config file in force, which need not exist; None for none: flags and environment only."""
        return self._file

    def wanted(self) -> Path | None:
        """The config file that was asked for last, which need not exist and may be another than the one in force."""
        return Path(self._settings.config_file_srcdir) / self._asked if self._asked else self._file

    @property
    def unknown(self) -> str:
        """What is waited for, and why, while the node's label is to choose the file and is not known; empty otherwise."""
        if not self._settings.config_file_srcdir or self._label_known.is_set():
            return ""
        return f"waiting for {self._label_in_words()}: {self._trouble}"

    @property
    def unheard(self) -> str:
        """Why a change of the node's label would not be heard now, once it is known what it was; empty where it would."""
        if not self._label_known.is_set() or not self._trouble:
            return ""
        return f"changes of {self._label_in_words()} are not heard: {self._trouble}"

    def look_again(self) -> None:
        """Has everything looked at again. From the event loop's thread only."""
        if self._watcher is not None:
            self._watcher.notify()

    async def settled(self) -> None:
        """Returns once it is known which file is in force: as long as there is none to be chosen, it does not."""
        await self._settled.wait()

    def _label_in_words(self) -> str:
        return f"the label {self._settings.node_label} of node {self._settings.node_name}"

    def keep(self, file: Path | None) -> bool:
        """Remembers that the settings of this file, chosen by the node's label, are in force. Blocks, and never raises.

        Returns whether a restart knows that, too; it may be asked for again and again.
        """
        if not self._settings.config_file_srcdir:
            return True
        name = file.name if file is not None else NO_FILE
        self._recall()
        self._last = name
        if name != self._memory.kept or not self._memory.is_current:
            self._memory.write(name)
        return name == self._memory.kept

    async def run(self, changed: Callable[[], None]) -> None:
        """Calls `changed` whenever the file in force is another or its content is. Never returns."""
        if self._settings.config_file_srcdir:
            await self._run_by_label(changed)
        elif self._file is not None:
            await watch_file(self._file, changed, self._known)
        else:
            await anyio.sleep_forever()

    async def _run_by_label(self, changed: Callable[[], None]) -> None:
        settings = self._settings
        watcher = self._watcher = FileWatcher(self._look, lambda seen: self._take(*seen, changed))
        answered = anyio.Event()

        def label_read(value: str | None) -> None:
            self._label, self._trouble = value, ""
            self._label_known.set()
            answered.set()
            watcher.notify()

        def label_failed(why: str) -> None:
            self._trouble = why
            if why:
                answered.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.node.follow_label, settings.node_label, label_read, label_failed)
            if not self._label_known.is_set():
                with anyio.move_on_after(LABEL_PATIENCE):
                    await answered.wait()
            await watcher.run()

    def _look(self) -> tuple[tuple[str, str, Choice, str], frozenset[Place]]:
        """Why the label is not known, its value, the choice, and the fingerprint of that file; where that may change. Blocks."""
        settings, label_unknown, label = self._settings, self.unknown, self._label or ""
        directory = Path(settings.config_file_srcdir)
        places = route(directory) | {Place(os.path.realpath(directory), ANY)}
        present, files_unknown = _configs(directory)
        choice = self._choose(label, present, label_unknown, files_unknown)
        content = ""
        if choice.file:
            places |= route(directory / choice.file)
            content = fingerprint(directory / choice.file)
        return (label_unknown, label, choice, content), places

    def _choose(self, label: str, present: frozenset[str], label_unknown: str, files_unknown: str) -> Choice:
        """The choice. Reads the last one first if it has influence: the state directory need not answer otherwise. Blocks."""
        settings = self._settings

        def chosen() -> Choice:
            default, fallbacks = settings.default_config, settings.fallback_strategies
            return choose(label, present, default, fallbacks, self._last, label_unknown, files_unknown)

        choice = chosen()
        if self._recalled or (choice.file and not choice.complaint):
            return choice
        if self._recalling.acquire(blocking=False):
            try:
                self._recall()
            finally:
                self._recalling.release()
            return chosen()
        # Another look hangs in it. If each did, they would hold a thread each.
        unread = f"the last choice is not known: the state directory {settings.state_dir} does not answer"
        return Choice(None, "; ".join(filter(None, (choice.complaint, unread))), choice.asked)

    def _recall(self) -> None:
        if not self._recalled:
            self._last = self._memory.read()
            self._recalled = True

    def _take(self, label_unknown: str, label: str, choice: Choice, content: str, changed: Callable[[], None]) -> None:
        self._log_choice(label_unknown, label, choice)
        self.complaint, self._asked = choice.complaint, choice.asked
        if choice.file is None:
            return
        if choice.file == self._choice.file and (content == self._content or (choice.complaint and content == ABSENT)):
            return
        self._choice, self._content = choice, content
        self._file = Path(self._settings.config_file_srcdir) / choice.file if choice.file != NO_FILE else None
        self._settled.set()
        changed()

    def _log_choice(self, label_unknown: str, label: str, choice: Choice) -> None:
        if choice.complaint:
            logged = ("label_unknown" if label_unknown else f"label {label}", choice.file)
            if self._last_logged != logged:
                level = logging.WARNING if label_unknown else logging.ERROR
                until = "; nothing is served until there is one to be used" if choice.file is None else ""
                log.log(level, "configuration: %s%s", choice.complaint, until)
            self._last_logged = logged
        elif choice.file != self._choice.file or self._last_logged is not None or self._content is None:
            self._last_logged = None
            by = f"label {self._settings.node_label}={label}" if label else f"no label {self._settings.node_label}"
            log.info("the configuration of this node is %s (%s)", choice.file or "flags and environment only", by)


def _require_kubeconfig(kubeconfig: str) -> None:
    """Raises ConfigError for a file that can be no kubeconfig. One that does not exist or cannot be read yet is waited for."""
    if not kubeconfig:
        return
    try:
        require_file(Path(kubeconfig), MAX_KUBECONFIG)
    except UnfitFileError as error:
        raise ConfigError(f"--kubeconfig: {kubeconfig}: {error.strerror}") from None
    except OSError:
        return


def _configs(directory: Path) -> tuple[frozenset[str], str]:
    """The names of the files in `directory`, or why they cannot be known.

    What a ConfigMap's volume keeps hidden is none of them, nor is a name that is not printable, which no label can have.
    """
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_file()]
    except OSError as error:
        return frozenset(), f"the directory {directory} of config files cannot be read: {error.strerror or error}"
    return frozenset(name for name in names if name.isprintable()), ""
