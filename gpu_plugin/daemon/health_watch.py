"""Pass observations of the node's GPUs to the ledger, and report each change of health."""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from gpu_plugin.config.settings import Settings
from gpu_plugin.daemon.reported_errors import Error, ReportedErrors
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.latch import LatchKey, Transition, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Observation, Sample, XidEvent, facts
from gpu_plugin.health.policy import policy
from gpu_plugin.health.signals import SIGNALS, SignalKind, orders
from gpu_plugin.health.xid_table import XID_TABLE
from gpu_plugin.kubelet.inventory import Inventory
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.state.recorder import Recorder
from gpu_plugin.status.readings import Readings
from gpu_plugin.telemetry.health_reports import HealthReports, RepeatedXids, tell, whose

log = logging.getLogger(__name__)

EVERY_GPU = "*"
"""The uuid of a stored order for all GPUs of the node, including GPUs that are not known yet."""

UNLISTED = "unlisted"
"""The class of an Xid that the policy's table does not have."""

WRITTEN_WITHIN = 0.5
"""Limit in seconds for the write of a change of health. After that the change is published to the kubelet unwritten."""


since_boot: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
"""Seconds since the boot of the node, including seconds of suspension. This clock cannot be set."""


class HealthWatch:
    """The ledger, with the input and output of the daemon. Everything runs on the event loop; only `publish` waits.

    Attributes:
        ledger: the open faults and orders of each GPU.
        reports: changes of health since the start. Other parts subscribe to them.
        readings: the newest readings of each GPU.
        gpus: the watched GPUs, as they were found last, or as an earlier process stored them if no GPU was found yet.
        past: evidence of an earlier process against GPUs that have not been found yet.
    """

    def __init__(
        self,
        settings: Settings,
        boot_id: str,
        unsaved: Pulse,
        errors: ReportedErrors,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = since_boot,
    ) -> None:
        """Create the ledger. `unsaved` rings when evidence changed, and `errors` receives possible errors of applications.

        `wall` returns Unix seconds. `clock` returns the seconds since the boot of the node and cannot be set.

        Raises:
            ConfigError: the package's table of Xids is missing.
        """
        self._zero = wall() - clock()
        self._clock = clock
        self.ledger = HealthLedger(policy(settings, XID_TABLE), boot_id, self._zero)
        self.reports = HealthReports()
        self.readings = Readings()
        self.gpus: tuple[Gpu, ...] = ()
        self.past: tuple[Evidence, ...] = ()
        self._unsaved = unsaved
        self._errors = errors
        self._repeated = RepeatedXids()
        self._logged_malformed: frozenset[str] = frozenset()
        self._changed_gpus: set[str] = set()
        self._health_changed = Pulse()

    def restore(self, past: tuple[Evidence, ...], gpus: tuple[Gpu, ...] = ()) -> None:
        """Restore the evidence that an earlier process stored, and the GPUs that it knew."""
        self.past = self._moved(past)
        _log_restored(past, gpus)
        self._log_malformed()
        self.watch(gpus)

    def adopt(self, evidence: tuple[Evidence, ...]) -> None:
        """Add evidence of another daemon of this node that ran at the same time."""
        if not evidence:
            return
        _log_restored(evidence, self.gpus)
        known = {gpu.uuid for gpu in self.gpus}
        moved = self._moved(evidence)
        self.past = (*self.past, *(entry for entry in moved if entry.uuid not in known))
        self.ledger.replay(moved)
        self.ledger.revision += 1
        for uuid in {entry.uuid for entry in moved}:
            self._changed(uuid)

    def apply_settings(self, settings: Settings) -> None:
        """Judge by other settings from now on, including open faults."""
        for change in self.ledger.judge_by(policy(settings, XID_TABLE)):
            self._report(change)
        self._log_malformed()
        for gpu in self.gpus:
            self._changed(gpu.uuid)

    def watch(self, gpus: Iterable[Gpu], driver_version: str = "") -> None:
        """Replace the watched GPUs and their facts. `driver_version` is the driver's version, empty if not known."""
        self.gpus = tuple(gpus)
        for gpu in self.gpus:
            mig_devices = {(mig.gpu_instance, mig.compute_instance): mig.uuid for mig in gpu.mig_devices}
            self.ledger.watch(gpu.uuid, facts(gpu, driver_version), mig_devices)
        self.ledger.replay(self.past)
        known = frozenset(gpu.uuid for gpu in self.gpus)
        self.readings.keep(known)
        self.past = tuple(entry for entry in self.past if entry.uuid not in known)  # of GPUs that may be found later

    def observe(self, uuid: str, seen: Observation) -> bool:
        """Judge an observation and report the changes. Return True if the GPU should be read again soon.

        The next reads could then open or close a fault.
        """
        if isinstance(seen, Sample):
            self.readings.saw(uuid, seen, self.now())
        revision = self.ledger.revision
        changes = self.ledger.observe(uuid, seen, self.now())
        self._report_all(uuid, changes, revision)
        if isinstance(seen, XidEvent):
            self._count(uuid, seen, changes)
        return self.ledger.suspicious(uuid)

    def override(self, uuid: str) -> None:
        """Apply an operator's statement that a GPU is fit."""
        revision = self.ledger.revision
        changes = self.ledger.override(uuid)
        if changes:
            log.warning("%s: overridden by an operator", whose(uuid, self.gpus), extra={"uuid": uuid})
        self._report_all(uuid, changes, revision)

    def booted(self, boot_id: str) -> None:
        """Apply a reboot of the node that this process survived. Past evidence is dropped unless it lasts over boots."""
        log.warning("the node was rebooted; open faults of GPUs end after good looks")
        for change in self.ledger.booted(boot_id):
            self._report(change)
        self.past = tuple(entry for entry in self.past if entry.lasts)
        for gpu in self.gpus:
            self._changed(gpu.uuid)

    def drop_past(self, uuid: str, signal: str = "") -> bool:
        """Drop the past evidence against a GPU that has not been found: all evidence, or only the evidence of `signal`.

        Return True if there was such evidence.
        """
        kept = tuple(entry for entry in self.past if entry.uuid != uuid or signal not in ("", entry.signal))
        dropped, self.past = kept != self.past, kept
        if dropped:
            self.ledger.revision += 1
            self._changed(uuid)
        return dropped

    def release_all(self) -> None:
        """Store that all GPUs are released, including GPUs that have not been found yet."""
        if not any(entry.uuid == EVERY_GPU for entry in self.past):
            latch, key = orders.release(self.now()), LatchKey(orders.MAINTENANCE)
            entry = Evidence.of(self.ledger.boot_id, EVERY_GPU, key, latch, self._zero)
            self.past = (*self.past, entry)
            self.ledger.revision += 1

    async def publish(self, recorder: Recorder, inventory: Inventory) -> None:
        """Publish each change of a GPU's health in the inventory, once the recorder has written it or WRITTEN_WITHIN has passed.

        Otherwise a restart after a kill of this process could revert a health that the kubelet already has. Never returns.
        """
        while True:
            if not self._changed_gpus:
                await self._health_changed.wait()
            uuids, self._changed_gpus = self._changed_gpus, set()
            await recorder.written(WRITTEN_WITHIN)
            for uuid in sorted(uuids):
                inventory.health_changed(uuid)

    def evidence(self) -> tuple[Evidence, ...]:
        """Return all evidence that must outlive a restart."""
        return (*self.ledger.evidence(), *self.past)

    def released(self) -> frozenset[str]:
        """Return the uuids of the GPUs that are released. EVERY_GPU is one of them if all GPUs are released."""
        entries = (entry for entry in self.evidence() if entry.signal == orders.MAINTENANCE and entry.known)
        return frozenset(entry.uuid for entry in entries if orders.released(entry.latch))

    def now(self) -> float:
        """Return the Unix time of the start plus the steady seconds since then: a change of the clock must not end a fault."""
        return self._zero + self._clock()

    def _moved(self, evidence: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
        """Convert the times of entries of this boot to the clock of this process."""
        return tuple(entry.moved(self._zero) if entry.boot_id == self.ledger.boot_id else entry for entry in evidence)

    def _changed(self, uuid: str) -> None:
        self._changed_gpus.add(uuid)
        self._unsaved.ring()
        self._health_changed.ring()

    def _report_all(self, uuid: str, changes: Iterable[Transition], revision: int) -> None:
        for change in changes:
            self._report(change)
        if self.ledger.revision != revision:
            self._changed(uuid)

    def _report(self, change: Transition) -> None:
        tell(change, self.gpus)
        self.reports.report(change)

    def _count(self, uuid: str, seen: XidEvent, changes: Iterable[Transition]) -> None:
        """Count an Xid. Log it if no change of a verdict logged it. Queue it for the pods that may have caused it."""
        judged = self.ledger.policy.xids.judge(seen.xid)
        self.reports.count_xid(uuid, seen.xid, judged.recovery.value if judged.codes else UNLISTED)
        if any(change.xid == seen.xid for change in changes):
            self._repeated.told(uuid, seen.xid)
        else:
            self._repeated.count(uuid, seen.xid, judged.name, judged.verdict, self.gpus)
        if judged.repeats:
            self._errors.add(Error(uuid, seen.xid, self._instances(uuid, seen)))

    def _instances(self, uuid: str, seen: XidEvent) -> frozenset[str]:
        """Return the MIG devices of an event; empty if it concerns the whole GPU or an unknown instance."""
        return frozenset(
            mig.uuid
            for gpu in self.gpus
            if gpu.uuid == uuid
            for mig in gpu.mig_devices
            if mig.gpu_instance == seen.gpu_instance and seen.compute_instance in (None, mig.compute_instance)
        )

    def _log_malformed(self) -> None:
        wrong = self.ledger.policy.malformed
        for complaint in wrong:
            if complaint not in self._logged_malformed:
                log.warning("%s", complaint)
        self._logged_malformed = frozenset(wrong)


def _log_restored(evidence: tuple[Evidence, ...], gpus: tuple[Gpu, ...]) -> None:
    for entry in evidence:
        latch = entry.latch
        if latch.verdict is not Verdict.OK:
            quiet = _ordered(entry) or latch.verdict is Verdict.APP
            level = logging.INFO if quiet else logging.WARNING
            words = latch.detail or entry.signal
            which = "every GPU" if entry.uuid == EVERY_GPU else whose(entry.uuid, gpus, entry.device)
            overridden = latch.overridden and latch.verdict is Verdict.FATAL
            verdict = f"{Verdict.DEGRADED.name}, overridden by an operator" if overridden else latch.verdict.name
            fields = {"uuid": entry.uuid, "signal": entry.signal, "verdict": latch.verdict.name}
            log.log(level, "%s has the stored verdict %s: %s", which, verdict, words, extra=fields)


def _ordered(entry: Evidence) -> bool:
    return entry.known and SIGNALS[entry.signal].kind is SignalKind.ORDER
