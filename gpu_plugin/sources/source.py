"""Which config file is in force, and when it is another or holds something else."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import anyio

from gpu_plugin.cluster.node_label import require_client, watch_label
from gpu_plugin.config.label import NO_FILE, Choice, choose
from gpu_plugin.config.settings import Settings
from gpu_plugin.sources.directories import ANY, Place, route
from gpu_plugin.sources.files import ABSENT, Lookout, Sight, fingerprint, watch_file

log = logging.getLogger(__name__)

LABEL_PATIENCE = 10.0
"""Seconds at the start for the node's label to be told, before one goes on as if it had none."""


class ConfigSource:
    """Where the configuration comes from: no file, one file, or the one in a directory that the node's label names."""

    def __init__(self, settings: Settings, known: str | None = None) -> None:
        """`known` is the `fingerprint` of the one file from before it was read; without it, `run` calls at once.

        Raises:
            ConfigError: a directory is given, and the Kubernetes client that its files are chosen with is not installed.
        """
        self._settings = settings
        self._known = known
        self._settled = anyio.Event()
        self._file = Path(settings.config_file) if settings.config_file else None
        self._label: str | None = None
        self._label_told = anyio.Event()
        self._untold = "the Kubernetes API has not told it yet"
        self._choice = Choice(NO_FILE)
        self._good: Choice | None = None
        self._said_of: str | None = None
        self._complaint = ""
        self._content: str | None = None
        if settings.config_file_srcdir:
            self._file = None
            require_client()
        else:
            self._settled.set()

    def current(self) -> Path | None:
        """The config file in force, which need not exist; None for none: flags and environment alone."""
        return self._file

    @property
    def complaint(self) -> str:
        """What is wrong with the node's label, while it names no file that is there; empty otherwise."""
        return self._complaint

    @property
    def unknown(self) -> str:
        """What is waited for, and why, while the node's label is to choose the file and is not known; empty otherwise."""
        if not self._settings.config_file_srcdir or self._label_told.is_set():
            return ""
        label = f"the label {self._settings.node_label} of node {self._settings.node_name}"
        return f"waiting for {label}: {self._untold}"

    async def settled(self) -> None:
        """Returns once it is known which file is in force.

        Where a label chooses it, that is `LABEL_PATIENCE` s after `run` began at the latest, or once the directory can be read.
        """
        await self._settled.wait()

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
        lookout = Lookout(self._look, lambda seen: self._take(*seen, changed))

        def told(value: str | None) -> None:
            self._label = value
            self._label_told.set()
            lookout.stir()

        def troubled(why: str) -> None:
            self._untold = why

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch_label, settings.node_name, settings.node_label, settings.kubeconfig, told, troubled)
            with anyio.move_on_after(LABEL_PATIENCE):
                await self._label_told.wait()
            if not self._label_told.is_set():
                log.warning(
                    "the Kubernetes API did not tell the label %s of node %s within %g s; the configuration is chosen as "
                    "if there were none until it does",
                    settings.node_label,
                    settings.node_name,
                    LABEL_PATIENCE,
                )
            await lookout.run()

    def _look(self) -> Sight[tuple[str, Choice, str]]:
        """The label's value, what it chooses, and that file's content. Blocks."""
        settings, label = self._settings, self._label or ""
        directory = Path(settings.config_file_srcdir)
        places = route(directory) | {Place(os.path.realpath(directory), ANY)}
        choice = choose(label, _configs(directory), settings.default_config, settings.fallback_strategies, self._good)
        content = ""
        if choice.file != NO_FILE:
            places |= route(directory / choice.file)
            content = fingerprint(directory / choice.file)
        return Sight((label, choice, content), places)

    def _take(self, label: str, choice: Choice, content: str, changed: Callable[[], None]) -> None:
        self._say(label, choice)
        self._complaint = choice.complaint
        if not choice.complaint:
            self._good = choice
        if choice.file == self._choice.file and (content == self._content or (choice.complaint and content == ABSENT)):
            return
        self._choice, self._content = choice, content
        self._file = Path(self._settings.config_file_srcdir) / choice.file if choice.file != NO_FILE else None
        self._settled.set()
        changed()

    def _say(self, label: str, choice: Choice) -> None:
        if choice.complaint:
            if self._said_of != label:
                log.error("%s: %s", self._settings.config_file_srcdir, choice.complaint)
            self._said_of = label
        elif choice.file != self._choice.file or self._said_of is not None or self._content is None:
            self._said_of = None
            by = f"label {self._settings.node_label}={label}" if label else f"no label {self._settings.node_label}"
            log.info("the configuration of this node is %s (%s)", choice.file or "flags and environment alone", by)


def _configs(directory: Path) -> frozenset[str]:
    """The names of the files in `directory`. What a ConfigMap's volume keeps hidden there is none."""
    try:
        with os.scandir(directory) as entries:
            return frozenset(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_file())
    except OSError:
        return frozenset()
