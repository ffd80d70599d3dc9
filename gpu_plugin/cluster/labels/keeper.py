"""Keeps the Node labelled the way the settings want it: by a file for Node Feature Discovery, by the Kubernetes API, or not.

    Node, Settings, host ──labels_of──▶ labels ──┬─▶ features.d/gfd ──▶ NFD's worker ──▶ Node
                                                └─▶ NodeApi.apply_labels ─────────────▶ Node

What was written in one way is taken back once another is wanted, or none. Which labels the API server was given, and which files
were written, is remembered in the state directory: so a restarted daemon takes them back, too, or leaves them as they are.
"""

import logging
import random
import shlex
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
from gpu_plugin.cluster.labels.features_file import AwayError, FeaturesFile, WrittenFiles, same
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings, SettingsStore
from gpu_plugin.containers.host_view import HostView
from gpu_plugin.devices.node import Node
from gpu_plugin.runtime.backoff import IN_CLUSTER, START_SPREAD, Backoff
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.slow_call import SlowCall
from gpu_plugin.runtime.threads import Workers
from gpu_plugin.state.directory import StateDirectory

if TYPE_CHECKING:
    from gpu_plugin.cluster.node_api import NodeApi

_T = TypeVar("_T")

log = logging.getLogger(__name__)

LABELS_FILE = "labels.json"
"""Its name in the state directory: what the API server was given last."""

SETTLE = 1.0
"""Seconds after news of the node or the settings: a start, or a GPU that is repartitioned, brings several."""

CHECK = 60.0
"""Seconds between two looks at the file: somebody may have removed it, or recreated the directory."""

RENEW = 3600.0
"""Seconds after which the API server is given the labels again: somebody may have removed them, or recreated the Node."""

# Seconds until the API server is asked again after it was asked in vain: the first time, and at most.
FIRST_PAUSE = 10.0
LONGEST_PAUSE = 600.0

PATIENCE = 5.0
"""Seconds that the disk of the file of labels may take."""

MEMORY_PATIENCE = 5.0
"""Seconds that the state directory may take until it is said that it does not answer."""

LABELS_WAIT = 0.5
"""Seconds that new labels wait until the state directory remembers that they are written."""

SYSFS = Path("/sys")
"""Where the host says what machine it is, and of which class its PCI devices are."""

_REFUSED = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN, HTTPStatus.UNPROCESSABLE_ENTITY})
"""What says of another Node that it is none of ours to change: a right that is missing, or an admission policy."""


class Applied(msgspec.Struct, frozen=True):
    """The labels that the Node of this name was given by the API; none where they were taken back, or never given."""

    node: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def removal(self) -> str:
        """The command by which people remove them."""
        keys = " ".join(shlex.quote(f"{key}-") for key in sorted(self.labels))
        return f"kubectl label node {shlex.quote(self.node or 'NODE')} {keys}"


def node_api(node_name: str, kubeconfig: str) -> "NodeApi":
    """The Kubernetes API. Raises ConfigError where the client is not installed."""
    from gpu_plugin.cluster.node_api import NodeApi  # noqa: PLC0415 - only who labels by the API pays for it

    require_client("--node-labels=api", ", or use --node-labels=file")
    return NodeApi(node_name, kubeconfig)


class NodeLabels:
    """One Node's labels. `trouble` is why the Node is not labelled as the settings want it; empty where it is."""

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
        """Takes the settings in force, where the node is seen, what outlives the process, and Unix time in seconds."""
        self.trouble = ""
        self._settings = settings
        self._host = host
        self._state = state
        self._api = lru_cache(1)(api)  # the same for as long as it is about the same Node: it remembers what it asked
        self._clock = clock
        self._dice = dice
        self._node = Node()
        self._news = True
        self._bell = Pulse()
        self._threads = Workers("labels")
        self._directories: set[str] = set()
        self._files = WrittenFiles(state)
        self._recalled = False
        self._applied: Applied | None = None
        self._kept_applied: Applied | None = None
        self._memory_threads = Workers("labels-memory")
        self._memory: SlowCall[bool] = SlowCall(self._memory_threads.begin)
        self._renew_at = float("-inf")
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, IN_CLUSTER)
        self._in_vain: tuple[str, str] | None = None
        """The Node that the API server was asked about in vain, and why."""
        self._spread = True

    def follow(self, node: Node) -> None:
        """Has the labels be those of this node, under the settings that are in force once they are made."""
        self._node = node
        self._news = True
        self._bell.ring()

    async def run(self) -> None:
        """Keeps the Node labelled. Never returns."""
        self._directories.add(self._settings.current.features_dir)
        self._read_again()
        try:
            while True:
                self._news = False
                pause = await self._keep()
                if not self._news:
                    await self._bell.wait(pause)
                if self._news:
                    await anyio.sleep(SETTLE)
        finally:
            self._threads.close()
            self._memory_threads.close()

    def _read_again(self) -> None:
        """Reads again what is remembered: since the last `run`, another daemon may have labelled the node."""
        self._files.read_again()
        self._recalled = False
        self._renew_at = float("-inf")
        if self._applied == self._kept_applied:
            self._applied = self._kept_applied = None

    async def _keep(self) -> float | None:
        """Does what is to be done now. Returns how many seconds later to look again; None: once there is news.

        What cannot be done in one way keeps nothing from being done in another.
        """
        settings, troubles, pauses = self._settings.current, [], []
        steps = (
            self._recall,
            self._remove_files,
            self._take_back,
            self._write_file,
            self._apply_if_due,
            self._remember,
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
                assert self._in_vain is not None
                troubles.append(f"node {self._in_vain[0]} cannot be labelled as it should be: {error}")
                pause = self._backoff.not_before - anyio.current_time()
            if pause is not None:
                pauses.append(max(0.0, pause))
        self._say("; ".join(dict.fromkeys(troubles)))
        return min(pauses, default=None)

    async def _recall(self, _: Settings) -> float | None:
        """Has the state directory say what earlier processes wrote and gave."""
        if self._applied is None:
            await self._kept(MEMORY_PATIENCE)
        return None

    async def _remember(self, _: Settings) -> float | None:
        """Has the state directory remember what was written and given: tried again until it does."""
        return None if await self._kept(MEMORY_PATIENCE) else CHECK

    async def _kept(self, patience: float) -> bool:
        """Whether the state directory remembers all that a restart must know. Raises _DiskError after `patience` seconds."""
        try:
            return await self._memory.fresh(self._keep_memory, patience)
        except TimeoutError as error:
            raise _DiskError(f"{self._state.path}: what a restart must know of the labels: {error}") from None

    def _keep_memory(self) -> bool:
        """Reads what is remembered, the first time, and writes what is not yet. Blocks."""
        if self._kept_applied is None:
            self._kept_applied = self._state.read(LABELS_FILE, Applied) or Applied()
            self._applied = self._kept_applied
        applied = self._applied or Applied()
        if applied != self._kept_applied and self._state.write(LABELS_FILE, applied):
            self._kept_applied = applied
        return self._files.keep() and applied == self._kept_applied

    async def _remove_files(self, settings: Settings) -> float | None:
        if not self._files.loaded:
            return None
        wanted = settings.features_dir if settings.node_labels == "file" else None
        if not self._recalled:
            self._directories |= self._files.directories()
            self._recalled = True
        for directory in self._directories - {wanted}:
            file, removed = FeaturesFile(Path(directory), self._files), False
            try:
                removed = await self._on_disk(file.path.parent, file.remove)
            except AwayError as error:
                log.warning(
                    "labels: %s: the file of labels that was written there stays: %s: mount it and start the plugin again, or "
                    "remove the file on the node",
                    file.path,
                    error.strerror,
                )
            except _DiskError:
                if self._files.remembers(file.path):  # else it is nothing to us, as far as we know
                    raise
            self._directories.discard(directory)
            if removed:
                log.info("%s: the file of labels is removed", directory)
        return None

    async def _take_back(self, settings: Settings) -> float | None:
        """Has the API server remove the labels that it was given, where they are not wanted there any more."""
        given = self._applied
        if given is None:
            return None
        renamed = settings.node_labels == "api" and settings.node_name not in {"", given.node}
        if not given.labels or (settings.node_labels == "api" and not renamed):
            return None
        try:
            await self._apply(settings, given.node, {})
        except UnreachableError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                log.info("node %s is gone, and the labels that it was given with it", given.node)
            elif renamed and error.code in _REFUSED:
                log.warning(
                    "node %s: the labels that it was given stay there, since the plugin is on node %s now: %s; run: %s",
                    given.node,
                    settings.node_name,
                    error,
                    given.removal,
                )
            else:
                raise
            await self._given(Applied())
        else:
            log.info("node %s: the labels are taken back", given.node)
        return None

    async def _write_file(self, settings: Settings) -> float | None:
        if settings.node_labels != "file" or not self._node.gpus:
            return None
        labels = await self._on_disk(SYSFS, partial(_labels, self._node, settings, self._host))
        self._directories.add(settings.features_dir)
        file = FeaturesFile(Path(settings.features_dir), self._files)
        wanted = await self._on_disk(file.path.parent, partial(self._changed, file, labels))
        if wanted is not None:
            with suppress(_DiskError):  # said when it is tried again: the Node does not wait for it
                await self._kept(LABELS_WAIT)
            await self._on_disk(file.path.parent, partial(file.write, wanted))
            log.info("%s/gfd: %d labels written", settings.features_dir, len(wanted))
        return CHECK

    def _changed(self, file: FeaturesFile, labels: Mapping[str, str]) -> Mapping[str, str] | None:
        """What is to be written; None where the file says the same, whoever wrote it. Blocks."""
        from gpu_plugin.cluster.labels.values import stamped  # noqa: PLC0415 - only who labels pays for it

        if not file.path.parent.is_dir():
            raise FileNotFoundError(
                None, "no such directory: mount there where Node Feature Discovery reads files of features"
            )
        there = file.read()
        wanted = stamped(labels, there, self._clock())
        if same(there, labels):
            file.claim(wanted)
            return None
        file.announce(wanted)
        return wanted

    async def _apply_if_due(self, settings: Settings) -> float | None:
        """Gives the API server the labels, where it is wanted and they have changed, or it is long ago."""
        if settings.node_labels != "api" or not self._node.gpus or self._applied is None:
            return None
        from gpu_plugin.cluster.labels.values import stamped  # noqa: PLC0415 - only who labels pays for it

        if not settings.node_name:
            raise ConfigError("--node-labels=api needs the Node's name: set --node-name")
        if self._applied.labels and self._applied.node != settings.node_name:
            return None  # those of the former Node are taken back first
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
        """Gives the API server these labels once a pause is over, and remembers so. Raises ConfigError and UnreachableError."""
        if self._in_vain is not None and not self._backoff.due(anyio.current_time()):
            raise UnreachableError("pause", self._in_vain[1])  # without a code: nobody answered anything now
        try:
            await self._api(node_name, settings.kubeconfig).apply_labels(labels)
        except UnreachableError as error:
            self._backoff.failed(anyio.current_time(), self._dice())
            self._in_vain = node_name, str(error)
            raise
        await self._given(Applied(node_name, {**labels}) if labels else Applied())

    async def _given(self, applied: Applied) -> None:
        """The API server has these labels of ours: remembered at once, as far as the state directory does not hang."""
        self._backoff.succeeded()
        self._in_vain = None
        self._applied = applied
        with suppress(_DiskError):
            await self._kept(LABELS_WAIT)

    async def _on_disk(self, where: Path, call: "Callable[[], _T]") -> "_T":
        """What a call brings. Raises _DiskError, which says where, and AwayError."""
        try:
            return await self._threads.run(call, PATIENCE)
        except AwayError:
            raise
        except OSError as error:  # TimeoutError is one
            raise _DiskError(f"{where}: {error.strerror or error}") from error

    def _say(self, trouble: str) -> None:
        if trouble and trouble != self.trouble:
            log.warning("labels: %s", trouble)
        elif self.trouble and not trouble:
            log.info("labels: the Node is labelled as it should be again")
        self.trouble = trouble


class _DiskError(Exception):
    """A file or directory cannot be read or written, or does not answer in time; the text says which and why."""


def _labels(node: Node, settings: Settings, host: HostView) -> dict[str, str]:
    """The labels of a node and of the host as it is now. Blocks: files of /sys."""
    from gpu_plugin.cluster.labels.values import HostFacts, labels_of, vgpu_host  # noqa: PLC0415 - only who labels pays

    bus_ids = [gpu.pci_bus_id for gpu in node.gpus if gpu.pci_bus_id]
    classes = {bus_id: kind for bus_id in bus_ids if (kind := host.pci_class(bus_id)) is not None}
    hypervisors = (vgpu_host(host.pci_config(bus_id)) for bus_id in bus_ids)
    return labels_of(node, settings, HostFacts(host.machine(), classes, next(filter(None, hypervisors), None)))
