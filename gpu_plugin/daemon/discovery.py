"""Find the GPUs, and make the offer of devices from the hardware and the settings in force."""

import logging
from collections import Counter
from collections.abc import Sequence

import anyio

from gpu_plugin.cluster.labels.keeper import NodeLabels
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings
from gpu_plugin.containers.cdi_files.watch import CdiWatch
from gpu_plugin.daemon.cluster_reporting import ClusterReporting
from gpu_plugin.daemon.configuration import Configuration
from gpu_plugin.daemon.event_log import EventLog
from gpu_plugin.daemon.hardware import Hardware
from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.daemon.list_strategy import log_strategy
from gpu_plugin.daemon.now import Now
from gpu_plugin.daemon.offering import Offering
from gpu_plugin.daemon.operations import Operations
from gpu_plugin.devices.absent import missing_gpus, named
from gpu_plugin.devices.device import is_placeholder
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.kubelet.inventory import Inventory
from gpu_plugin.kubelet.offer import Offer, offer, without_gone
from gpu_plugin.nvml.call_times import CallTimes
from gpu_plugin.nvml.monitor import Monitor
from gpu_plugin.nvml.opening_remedies import opening_remedy
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.runtime.backoff import Backoff
from gpu_plugin.runtime.log_lines import LogOnChange
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.supervision import FIRST_RETRY, LONGEST_RETRY
from gpu_plugin.state.memory import Memory
from gpu_plugin.telemetry.logs import configure, know

log = logging.getLogger(__name__)


class NoDriverError(Exception):
    """There is no GPU to serve, and the settings ask for an error then. Lines: the advice, then the reason."""


class Discovery:
    """Finds the GPUs, and passes changes of the hardware and the settings to all parts.

    If the changed hardware cannot be offered, the daemon still serves the former devices, except devices that are gone.
    """

    def __init__(
        self,
        *,
        now: Now,
        configuration: Configuration,
        hardware: Hardware,
        health: HealthWatch,
        operations: Operations,
        inventory: Inventory,
        offering: Offering,
        cluster: ClusterReporting,
        specs: CdiWatch,
        labels: NodeLabels,
        events: EventLog,
        memory: Memory,
        unsaved: Pulse,
        call_times: CallTimes,
    ) -> None:
        """Store the parts that follow the hardware. `unsaved` rings when a GPU is missing or no longer missing."""
        self._now = now
        self._configuration = configuration
        self._hardware = hardware
        self._health = health
        self._operations = operations
        self._inventory = inventory
        self._offering = offering
        self._cluster = cluster
        self._specs = specs
        self._labels = labels
        self._events = events
        self._memory = memory
        self._unsaved = unsaved
        self._call_times = call_times

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._configuration.settings

    def monitor(self, remembered: Sequence[Gpu], before: Sequence[Gpu] = ()) -> Monitor:
        """Return the monitor of the hardware.

        `remembered` has the GPUs that an earlier process of this boot knew, and `before` the GPUs of an earlier boot.
        """
        return Monitor(
            self._call_times.timed(self._hardware.driver),
            self._hardware.host,
            self.settings.health_poll_interval,
            self.settings.nvml_timeout,
            remembered,
            self._health.observe,
            self._found,
            retention=self.settings.vanished_gpu_retention,
            judging=self._health.ledger.policy.judging,
            released=self._operations.begin(),
            booted=self._booted,
            met=self._health.watch,
            boot_id=self._health.ledger.boot_id,
            before=before,
        )

    async def find(self, monitor: Monitor) -> None:
        """Open the driver, with repeated attempts, until there are GPUs to serve.

        Raises:
            NoDriverError: there is no GPU to serve, and the settings ask for an error then.
            ConfigError: the node cannot do what the settings ask.
        """
        backoff = Backoff(FIRST_RETRY, LONGEST_RETRY)
        logged = LogOnChange(log, "%s; looking again in %.2g s, then at growing intervals")
        while True:
            try:
                node = await monitor.open()
            except NvmlError as error:
                trouble = f"the NVIDIA driver cannot be used: {error}: {opening_remedy(error.code)}"
            except TimeoutError as error:
                trouble = f"the NVIDIA driver cannot be used: {error}"
            except ConfigError:
                raise
            except Exception as error:
                log.exception("looking for GPUs failed unexpectedly")
                trouble = f"the NVIDIA driver cannot be used: {error!r}"
            else:
                if node.gpus:
                    self._now.driver = self._now.no_gpu = ""
                    return
                trouble = "the NVIDIA driver finds no GPU on this node"
            self._now.driver, self._now.no_gpu = trouble, monitor.no_gpu
            if self.settings.fail_on_init_error:
                raise NoDriverError(
                    "no GPU can be served; gpu-plugin doctor says more. On nodes without a GPU, do not run this plugin, or run "
                    "it with --fail-on-init-error=false\n" + trouble,
                )
            if self._now.no_gpu:
                log.debug("%s", trouble)
                trouble = f"{self._now.no_gpu}, so nothing is served"
            pause = backoff.failed(anyio.current_time())
            if logged.update(trouble, pause, level=logging.INFO if self._now.no_gpu else logging.WARNING):
                self._events.daemon(trouble)
            await anyio.sleep(pause)

    def _found(self, node: Node) -> None:
        """Pass the hardware that the monitor found to all parts, and offer its devices.

        If the settings do not fit the hardware, keep the former offer without the devices that are gone.

        Raises:
            ConfigError: the settings do not fit the first hardware, and no node label chooses the configuration.
        """
        first = not self._now.node.gpus
        know(node.gpus)
        if first and node.gpus:
            _log_hardware(node, self._hardware.library())
        for old, new in _named(self._now.node, node):
            self._health.ledger.rename(old, new)
        found: Offer | None
        self._now.unoffered = ""
        try:
            found = offer(node, self.settings, self._hardware.dev_root, self._inventory.offer.placement)
        except ConfigError as error:
            if first and not self.settings.config_file_srcdir:
                raise
            log.error("%s; the former devices are still served, except devices that are gone", error)  # noqa: TRY400
            self._now.unoffered = str(error)
            found = None if first else without_gone(self._inventory.offer, node)
        if self._now.node.links and node.links != self._now.node.links:
            from gpu_plugin.placement.views.matrix import changed_links  # noqa: PLC0415 - rarely needed

            if changed := changed_links(self._now.node, node):
                log.info("links between GPUs have changed: %s", changed)
        self._report_missing(node)
        self._now.node = node
        self._health.watch(node.gpus, node.driver_version)
        self._inventory.found(node.gpus)
        self._operations.found()
        self._cluster.changed()
        if found is not None:
            self._offering.publish(found)
        self._specs.follow(self._now.node, self.settings, None if found is None else found.access)
        self._labels.follow(self._now.node)

    def _report_missing(self, node: Node) -> None:
        """Log which GPUs are missing now and were not before, and which GPUs are no longer missing."""
        if node.absent != self._now.node.absent:
            self._unsaved.ring()
        before, now = (missing_gpus(each.absent, self.settings) for each in (self._now.node, node))
        for gpu in now:
            if gpu not in before:
                words = f"{named(gpu)} is missing: {gpu.unreadable}"
                log.warning("%s", words, extra={"uuid": gpu.uuid})
                self._events.daemon(words)
        for gpu in before:
            if gpu.uuid in {each.uuid for each in node.gpus}:
                log.info("%s is there again", named(gpu), extra={"uuid": gpu.uuid})

    def _booted(self, boot_id: str) -> None:
        self._memory.booted(boot_id)
        self._operations.booted()
        self._health.booted(boot_id)

    def apply_settings(self, new: Settings) -> None:
        """Apply newer settings. Raises ConfigError, and changes nothing, if the node cannot do what the settings ask."""
        placement = self._inventory.offer.placement
        found = offer(self._now.node, new, self._hardware.dev_root, placement) if self._now.node.gpus else None
        if found is not None:
            self._now.unoffered = ""
        if new.device_list_strategy_reason != self.settings.device_list_strategy_reason:
            log_strategy(new)
        self._health.apply_settings(new)
        configure(new.log_format, new.log_level)
        if self._now.monitor is not None:
            judging = self._health.ledger.policy.judging
            self._now.monitor.retune(
                new.health_poll_interval, new.nvml_timeout, new.vanished_gpu_retention, judging=judging
            )
        if found is not None:
            self._offering.publish(found)
        self._specs.follow(self._now.node, new, None if found is None else found.access)
        self._labels.follow(self._now.node)


def _named(before: Node, after: Node) -> list[tuple[str, str]]:
    """Return the placeholder uuids of `before`, each with the uuid that the GPU of the same index has now."""
    present = {gpu.uuid for gpu in after.gpus}
    by_index = {gpu.index: gpu.uuid for gpu in after.gpus}
    gone = [gpu for gpu in before.gpus if is_placeholder(gpu.uuid) and gpu.uuid not in present]
    return [(gpu.uuid, by_index[gpu.index]) for gpu in gone if gpu.index in by_index]


def _log_hardware(node: Node, library: str) -> None:
    """Log one line about the hardware: driver, library, and the number of GPUs of each model."""
    models = Counter(gpu.model or "of an unknown model" for gpu in node.gpus)
    counts = ", ".join(f"{count} x {model}" for model, count in models.items())
    version = node.driver_version or "of an unknown version"
    fields = {"driver": node.driver_version, "library": library, "model": ", ".join(models)}
    log.info("driver %s, library %s, GPUs: %s", version, library or "not known", counts, extra=fields)
