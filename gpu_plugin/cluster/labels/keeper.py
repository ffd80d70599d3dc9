"""Keeps the Node's labels up to date, by a file for Node Feature Discovery or by the Kubernetes API, as the settings say.

    Node, Settings, host ──labels_of──▶ labels ──┬─▶ features.d/gfd ──▶ NFD's worker ──▶ Node
                                                └─▶ NodeApi.apply_labels ─────────────▶ Node

When the settings change to the other way or to no labels, the labels that were written the former way are removed. The state
directory has the labels that were sent to the API server and the list of files that were written, so that a restarted daemon can
remove or keep them, too.
"""

import logging
import random
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio
import msgspec

from gpu_plugin.cluster.connection import UnreachableError, require_client
from gpu_plugin.cluster.labels.features_file import FEATURES_FILE, AwayError, FeaturesFile, WrittenFiles, same
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings, SettingsStore
from gpu_plugin.containers.host_view import HostView
from gpu_plugin.devices.node import Node
from gpu_plugin.runtime.backoff import IN_CLUSTER, START_SPREAD, Backoff
from gpu_plugin.runtime.log_lines import LogOnChange
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.threads import SlowCall, begin
from gpu_plugin.state.directory import StateDirectory

if TYPE_CHECKING:
    from gpu_plugin.cluster.node_api import NodeApi

_T = TypeVar("_T")

log = logging.getLogger(__name__)

LABELS_FILE = "labels.json"  # has the labels that were last sent to the API server, in the state directory

# Seconds to wait after a change of the node or the settings. A start or a repartitioned GPU makes several changes.
SETTLE = 1.0
CHECK = 60.0  # seconds between two checks of the file: another program may remove it, or recreate the directory
RENEW = 3600.0  # seconds until the labels are sent to the API again: they may be removed, or the Node recreated

# Seconds until the next request after a failed request: the first time, and at most.
FIRST_PAUSE = 10.0
LONGEST_PAUSE = 600.0

PATIENCE = 5.0  # seconds to wait for the disk that has the file of labels
MEMORY_PATIENCE = 5.0  # seconds to wait for the state directory; then `trouble` says that it does not answer
LABELS_WAIT = 0.5  # seconds to wait for the record of new labels before the labels are written without it

SYSFS = Path("/sys")  # has the machine's product name and the classes of the PCI devices

# HTTP status codes that mean that we may not change another Node: a right is missing, or an admission policy refuses it.
_REFUSED = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN, HTTPStatus.UNPROCESSABLE_ENTITY})


class Applied(msgspec.Struct, frozen=True):
    """The labels that were sent to the API for the Node of this name; empty if they were removed or never sent."""

    node: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def removal(self) -> str:
        """The kubectl command that removes these labels."""
        keys = " ".join(shlex.quote(f"{key}-") for key in sorted(self.labels))
        return f"kubectl label node {shlex.quote(self.node or 'NODE')} {keys}"


def node_api(node_name: str, kubeconfig: str) -> "NodeApi":
    """Return the Kubernetes API. Raises ConfigError if the client is not installed."""
    from gpu_plugin.cluster.node_api import NodeApi  # noqa: PLC0415 - only labels by the API need it

    require_client("--node-labels=api", ", or use --node-labels=file")
    return NodeApi(node_name, kubeconfig)


class NodeLabels:
    """One Node's labels. `trouble` says why the Node does not have the wanted labels; it is empty if it has them."""

    def __init__(
        self,
        settings: SettingsStore,
        host: HostView,
        state: StateDirectory,
        *,
        api: "Callable[[str, str], NodeApi]" = node_api,
        clock: Callable[[], float] = time.time,
        dice: Callable[[], float] = random.random,
    ) -> None:
        """`api` opens the Kubernetes API of a Node name and a kubeconfig.

        `clock` returns Unix time in seconds, and `dice` a random number in [0, 1).
        """
        self._trouble = LogOnChange(log, "labels: %s", over="labels: the Node has the wanted labels again")
        self._settings = settings
        self._host = host
        self._state = state
        self._api = lru_cache(1)(api)  # one NodeApi for each Node name, since it stores the Node's uid
        self._clock = clock
        self._dice = dice
        self._node = Node()
        self._news = True
        self._bell = Pulse()
        self._directories: set[str] = set()
        self._has_directories = False  # whether `_directories` includes the directories of earlier processes
        self._files = WrittenFiles()  # of this process, and of earlier processes once they are read
        self._kept_files: WrittenFiles | None = None
        self._files_lock = threading.Lock()
        self._applied: Applied | None = None
        self._kept_applied: Applied | None = None
        self._memory: SlowCall[bool] = SlowCall("labels-memory")
        self._renew_at = float("-inf")
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, IN_CLUSTER)
        self._failure: tuple[str, str] | None = None  # the Node of the last failed request, and the reason
        self._spread = True

    def follow(self, node: Node) -> None:
        """Label the Node by this hardware, and by the settings that are in force when the labels are computed."""
        self._node = node
        self._news = True
        self._bell.ring()

    @property
    def trouble(self) -> str:
        """Why the Node may not have the wanted labels; empty if it has them."""
        return self._trouble.text

    async def run(self) -> None:
        """Keep the Node's labels up to date. Never returns."""
        self._directories.add(self._settings.current.features_dir)
        self._read_again()
        while True:
            self._news = False
            pause = await self._keep()
            if not self._news:
                await self._bell.wait(pause)
            if self._news:
                await anyio.sleep(SETTLE)

    def _read_again(self) -> None:
        """Read the state directory again at the next step: another daemon may have labelled the Node since the last `run`."""
        self._kept_files = None
        self._has_directories = False
        self._renew_at = float("-inf")
        if self._applied == self._kept_applied:
            self._applied = self._kept_applied = None

    async def _keep(self) -> float | None:
        """Run all steps. Returns the seconds until the next check; None to wait for a change.

        An error in one step does not prevent the other steps.
        """
        settings, troubles, pauses = self._settings.current, [], []
        steps = (
            self._load_state,
            self._remove_files,
            self._remove_applied,
            self._write_file,
            self._apply_if_due,
            self._save_state,
        )
        for step in steps:
            try:
                pause = await step(settings)
            except _DiskError as error:
                troubles.append(str(error))
                pause = CHECK
            except ConfigError as error:
                troubles.append(str(error))
                pause = None
            except UnreachableError as error:
                assert self._failure is not None
                troubles.append(f"the labels of node {self._failure[0]} cannot be written: {error}")
                pause = self._backoff.not_before - anyio.current_time()
            if pause is not None:
                pauses.append(max(0.0, pause))
        self._trouble.update("; ".join(dict.fromkeys(troubles)))
        return min(pauses, default=None)

    async def _load_state(self, _: Settings) -> float | None:
        """Read the labels and files of earlier processes from the state directory."""
        if self._applied is None:
            await self._sync_state(MEMORY_PATIENCE)
        return None

    async def _save_state(self, _: Settings) -> float | None:
        """Write the labels and files to the state directory. A failed write is repeated after CHECK seconds."""
        return None if await self._sync_state(MEMORY_PATIENCE) else CHECK

    async def _sync_state(self, patience: float) -> bool:
        """Return whether the state directory has the data for a restart. Raises _DiskError after `patience` seconds."""
        try:
            return await self._memory.fresh(self._read_and_write_state, patience)
        except TimeoutError as error:
            raise _DiskError(f"{self._state.path}: the record of the labels for a restart: {error}") from None

    def _read_and_write_state(self) -> bool:
        """Read the state directory at the first call, and write changes. Blocks."""
        if self._kept_applied is None:
            self._kept_applied = self._state.read(LABELS_FILE, Applied) or Applied()
            self._applied = self._kept_applied
        if self._kept_files is None:
            kept = self._state.read(FEATURES_FILE, WrittenFiles) or WrittenFiles()
            with self._files_lock:
                self._files = self._files.merged(kept)
                self._kept_files = kept
        applied, files = self._applied or Applied(), self._files
        if applied != self._kept_applied and self._state.write(LABELS_FILE, applied):
            self._kept_applied = applied
        if files != self._kept_files and self._state.write(FEATURES_FILE, files):
            self._kept_files = files
        return applied == self._kept_applied and files == self._kept_files

    def _update_files(self, path: Path, digests: tuple[str, ...] | None) -> None:
        with self._files_lock:
            self._files = self._files.updated(path, digests)

    async def _remove_files(self, settings: Settings) -> float | None:
        if self._kept_files is None:
            return None
        wanted = settings.features_dir if settings.node_labels == "file" else None
        if not self._has_directories:
            self._directories |= self._files.directories()
            self._has_directories = True
        for directory in self._directories - {wanted}:
            file, removed = FeaturesFile(Path(directory), self._files), False
            try:
                removed, digests = await self._on_disk(file.path.parent, file.remove)
                self._update_files(file.path, digests)
            except AwayError as error:
                log.warning(
                    "labels: %s: the file of labels cannot be removed: %s: mount the directory and start the plugin again, or "
                    "remove the file on the node",
                    file.path,
                    error.strerror,
                )
            except _DiskError:
                if directory in self._files.directories():  # else there is no file of ours to remove
                    raise
            self._directories.discard(directory)
            if removed:
                log.info("%s: the file of labels is removed", directory)
        return None

    async def _remove_applied(self, settings: Settings) -> float | None:
        """Remove the labels that were sent to the API server, if they are not wanted there any more."""
        applied = self._applied
        if applied is None:
            return None
        renamed = settings.node_labels == "api" and settings.node_name not in {"", applied.node}
        if not applied.labels or (settings.node_labels == "api" and not renamed):
            return None
        try:
            await self._apply(settings, applied.node, {})
        except UnreachableError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                log.info("node %s is gone, and so are its labels", applied.node)
            elif renamed and error.code in _REFUSED:
                log.warning(
                    "node %s: the plugin's labels cannot be removed, since the plugin is on node %s now: %s; run: %s",
                    applied.node,
                    settings.node_name,
                    error,
                    applied.removal,
                )
            else:
                raise
            await self._set_applied(Applied())
        else:
            log.info("node %s: the labels are removed", applied.node)
        return None

    async def _write_file(self, settings: Settings) -> float | None:
        if settings.node_labels != "file" or not self._node.gpus:
            return None
        labels = await self._on_disk(SYSFS, partial(_labels, self._node, settings, self._host))
        self._directories.add(settings.features_dir)
        file = FeaturesFile(Path(settings.features_dir), self._files)
        wanted, digests = await self._on_disk(file.path.parent, partial(self._changed, file, labels))
        if digests is not None:
            self._update_files(file.path, digests)
        if wanted is not None:
            with suppress(_DiskError):  # do not delay the labels; `_save_state` tries again and reports the error
                await self._sync_state(LABELS_WAIT)
            await self._on_disk(file.path.parent, partial(file.write, wanted))
            log.info("%s/gfd: %d labels written", settings.features_dir, len(wanted))
        return CHECK

    def _changed(
        self, file: FeaturesFile, labels: Mapping[str, str]
    ) -> tuple[Mapping[str, str] | None, tuple[str, ...] | None]:
        """Return the labels to write, and the file's digests from now on; None for each that stays. Blocks.

        A file that has the labels already is not written, also if another program wrote it.
        """
        from gpu_plugin.cluster.labels.values import stamped  # noqa: PLC0415 - only labels need it

        if not file.path.parent.is_dir():
            raise FileNotFoundError(
                None, "no such directory: mount the directory from which Node Feature Discovery reads files of features"
            )
        there = file.read()
        wanted = stamped(labels, there, self._clock())
        if not same(there, labels):
            return wanted, file.digests(wanted)
        return None, file.digests(wanted) if file.equals(wanted) else None

    async def _apply_if_due(self, settings: Settings) -> float | None:
        """Send the labels to the API server, if the settings say so, and they have changed or RENEW seconds are over."""
        if settings.node_labels != "api" or not self._node.gpus or self._applied is None:
            return None
        from gpu_plugin.cluster.labels.values import stamped  # noqa: PLC0415 - only labels need it

        if not settings.node_name:
            raise ConfigError("--node-labels=api needs the Node's name: set --node-name")
        if self._applied.labels and self._applied.node != settings.node_name:
            return None  # `_remove_applied` must remove the former Node's labels first
        labels = await self._on_disk(SYSFS, partial(_labels, self._node, settings, self._host))
        before = self._applied.labels
        wanted, now = stamped(labels, before, self._clock()), anyio.current_time()
        if wanted != before or now >= self._renew_at:
            if self._spread:
                self._spread = False
                await anyio.sleep(START_SPREAD * self._dice())
            await self._apply(settings, settings.node_name, wanted)
            self._renew_at = anyio.current_time() + RENEW * (0.9 + 0.2 * self._dice())
            if wanted != before:
                log.info("node %s: %d labels applied", settings.node_name, len(wanted))
        return self._renew_at - anyio.current_time()

    async def _apply(self, settings: Settings, node_name: str, labels: Mapping[str, str]) -> None:
        """Send these labels to the API server and record them. Raises ConfigError, and UnreachableError also during a pause."""
        if self._failure is not None and not self._backoff.due(anyio.current_time()):
            raise UnreachableError("pause", self._failure[1])  # without a code, since no request was sent
        try:
            await self._api(node_name, settings.kubeconfig).apply_labels(labels)
        except UnreachableError as error:
            self._backoff.failed(anyio.current_time(), self._dice())
            self._failure = node_name, str(error)
            raise
        await self._set_applied(Applied(node_name, {**labels}) if labels else Applied())

    async def _set_applied(self, applied: Applied) -> None:
        """Record the labels that the API server has of us. Waits at most LABELS_WAIT seconds for the state directory."""
        self._backoff.succeeded()
        self._failure = None
        self._applied = applied
        with suppress(_DiskError):
            await self._sync_state(LABELS_WAIT)

    async def _on_disk(self, where: Path, call: "Callable[[], _T]") -> "_T":
        """Run a blocking call on a thread and return its result. Raises _DiskError, which names `where`, and AwayError."""
        try:
            return await begin(call, "labels").result(PATIENCE)
        except AwayError:
            raise
        except OSError as error:  # includes TimeoutError
            raise _DiskError(f"{where}: {error.strerror or error}") from error


class _DiskError(Exception):
    """A file or directory cannot be read or written, or does not answer in time. The text has its path and the reason."""


def _labels(node: Node, settings: Settings, host: HostView) -> dict[str, str]:
    """Compute the labels of a node. Blocks: reads files of /sys."""
    from gpu_plugin.cluster.labels.values import HostFacts, labels_of, vgpu_host  # noqa: PLC0415 - only labels need it

    bus_ids = [gpu.pci_bus_id for gpu in node.gpus if gpu.pci_bus_id]
    classes = {bus_id: kind for bus_id in bus_ids if (kind := host.pci_class(bus_id)) is not None}
    hypervisors = (vgpu_host(host.pci_config(bus_id)) for bus_id in bus_ids)
    return labels_of(node, settings, HostFacts(host.machine(), classes, next(filter(None, hypervisors), None)))
