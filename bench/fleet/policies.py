"""The policies: which GPUs of a node are Healthy for the kubelet. The simulation accounts only the result of `offered`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Facts, Observation, XidEvent
from gpu_plugin.health.policy import HealthPolicy, XidPolicy
from gpu_plugin.health.xid_table import XID_TABLE

NVIDIA_SKIPS = frozenset({13, 31, 43, 45, 68, 109})
"""Xids that NVIDIA's plugin v0.20.0 counts as an application's (internal/rm/health.go). Any other Xid makes the GPU Unhealthy."""

GOOGLE_HEEDS = frozenset({48})
"""Xids that make a GPU Unhealthy in Google's plugin (container-engine-accelerators) without XID_CONFIG."""

GOOGLE_CONFIGURED = frozenset({48, 63, 64, 79, 119, 120, 123, 140})
"""Xids that the same plugin calls critical (`monitorCriticalXid` in its health_check, for a condition of the node), all set by
XID_CONFIG. Google's documentation has no list of its own."""

TWIN_SECONDS, TWIN_AT_PEACE = 900.0, 20.0
"""Seconds for which the verdicts after a restart are compared with a process that was not restarted, and the same if the GPU had
no fault other than applications' errors."""


WORSE_SECONDS = 2 * 3600.0
"""Further seconds for which a verdict may be worse, since the proof that closes a latch restarts, and takes an hour at most."""


@dataclass(slots=True)
class Restarts:
    """The effects of restarts of the plugin on verdicts.

    A verdict counts as changed if it is better than in a process that was not restarted, at any look, or worse at the end of the
    comparison.

    Attributes:
        gpus: the number of restarts, counted for each GPU.
        standing: the number of restarts of GPUs with a fault that was DEGRADED or worse.
        longer: the number of verdicts that were worse for some looks and the same in the end, since the proof restarted.
        changed: the number of changed verdicts, by description.
    """

    gpus: int = 0
    standing: int = 0
    longer: int = 0
    changed: dict[str, int] = field(default_factory=dict)

    def change(self, what: str) -> None:
        """Count a changed verdict."""
        self.changed[what] = self.changed.get(what, 0) + 1

    @property
    def total(self) -> int:
        """The number of changed verdicts."""
        return sum(self.changed.values())


class Policy(Protocol):
    """The plugin of one node. GPUs are positions, `now` is in seconds. `looks`: whether the plugin checks GPUs by itself."""

    looks: bool
    restarts: Restarts

    def watch(self, gpu: int, facts: Facts) -> None:
        """Begin to watch a GPU."""

    def see(self, gpu: int, seen: Observation, now: float) -> None:
        """Process an observation."""

    def lost(self, gpu: int) -> None:
        """The wait for the driver's events reports that a GPU is lost."""

    def restart(self, unreachable: frozenset[int], now: float, *, killed: bool) -> None:
        """Restart the plugin, which ends or is `killed`. The driver cannot describe the `unreachable` GPUs."""

    def restart_one(self, gpu: int, now: float, *, killed: bool) -> None:
        """Restart the plugin for only one GPU, to find effects of restarts."""

    def reboot(self, unreachable: frozenset[int], absent: frozenset[int], now: float) -> None:
        """Reboot the node. The driver cannot describe the `unreachable` GPUs, and does not find the `absent` GPUs."""

    def replace(self, gpu: int, facts: Facts) -> None:
        """Put another GPU, with another uuid, in this place."""

    def vouch(self, gpu: int) -> None:
        """Process an operator's statement that a GPU is fit, if the plugin supports it."""

    def offered(self, gpu: int) -> bool:
        """Whether the kubelet may give the GPU to pods."""
        ...

    def why(self, gpu: int) -> str:
        """Return the reason why the GPU is not offered, for the report."""
        ...

    def open(self, gpu: int) -> bool:
        """Whether more looks may change the verdict."""
        ...

    def curious(self, gpu: int) -> bool:
        """Whether the plugin wants the next look within a second."""
        ...


@dataclass(slots=True)
class Marking:
    """The policy of NVIDIA's and Google's plugins: an Xid that counts makes its GPU Unhealthy until the process ends.

    `heeds` are the Xids that count; None for all except `skips`. `all_at_loss`: an error of the wait for events, which a lost GPU
    causes, makes every GPU of the node Unhealthy, and a process that starts with a GPU that the driver cannot describe offers no
    GPU. No policy offers a missing GPU after a boot.
    """

    skips: frozenset[int] = frozenset()
    heeds: frozenset[int] | None = None
    all_at_loss: bool = False
    gpus: int = 8
    looks: bool = False
    restarts: Restarts = field(default_factory=Restarts)
    marked: dict[int, str] = field(default_factory=dict)

    def watch(self, gpu: int, facts: Facts) -> None:
        """Do nothing: the policy watches all GPUs from the start."""

    def see(self, gpu: int, seen: Observation, now: float) -> None:
        """Mark the GPU for an Xid that counts."""
        del now
        if isinstance(seen, XidEvent) and (
            seen.xid in self.heeds if self.heeds is not None else seen.xid not in self.skips
        ):
            self.marked.setdefault(gpu, f"xid {seen.xid}")

    def lost(self, gpu: int) -> None:
        """Mark all GPUs under `all_at_loss`."""
        del gpu
        if self.all_at_loss:
            for each in range(self.gpus):
                self.marked.setdefault(each, "lost neighbour")

    def restart_one(self, gpu: int, now: float, *, killed: bool) -> None:
        """Do nothing: a restart always concerns all GPUs."""

    def restart(self, unreachable: frozenset[int], now: float, *, killed: bool) -> None:
        """Remove all marks."""
        del now, killed
        before = set(self.marked)
        self.restarts.standing += len(before)
        self._begin(unreachable, frozenset())
        self.restarts.gpus += self.gpus
        for _ in before ^ set(self.marked):
            self.restarts.change("marks")

    def reboot(self, unreachable: frozenset[int], absent: frozenset[int], now: float) -> None:
        """Remove all marks, and mark the absent GPUs."""
        del now
        self._begin(unreachable, absent)

    def replace(self, gpu: int, facts: Facts) -> None:
        """Remove the mark of the former GPU."""
        del facts
        self.marked.pop(gpu, None)

    def vouch(self, gpu: int) -> None:
        """Do nothing: the plugin does not support it."""

    def offered(self, gpu: int) -> bool:
        """Whether the GPU has no mark."""
        return gpu not in self.marked

    def why(self, gpu: int) -> str:
        """Return the mark."""
        return self.marked.get(gpu, "")

    def open(self, gpu: int) -> bool:
        """Return False, since the plugin does not look at GPUs."""
        del gpu
        return False

    def curious(self, gpu: int) -> bool:
        """Return False, since the plugin does not look at GPUs."""
        del gpu
        return False

    def _begin(self, unreachable: frozenset[int], absent: frozenset[int]) -> None:
        self.marked = dict.fromkeys(absent, "absent")
        if unreachable and self.all_at_loss:
            self.marked = dict.fromkeys(range(self.gpus), "lost neighbour")


def nvidia(gpus: int) -> Marking:
    """Return the policy of NVIDIA's plugin v0.20.0 with default settings."""
    return Marking(skips=NVIDIA_SKIPS, all_at_loss=True, gpus=gpus)


def google(gpus: int, heeds: frozenset[int] = GOOGLE_HEEDS) -> Marking:
    """Return the policy of Google's plugin. The default of `heeds` is the plugin's default."""
    return Marking(heeds=heeds, gpus=gpus)


@dataclass(slots=True)
class _Watched:
    """A GPU under our policy.

    `ledger` is its ledger, `twin` the ledger of the process that was not restarted, during a comparison, and `written` the
    evidence on disk.
    """

    uuid: str
    ledger: HealthLedger
    facts: Facts
    twin: HealthLedger | None = None
    until: float = 0.0
    worse: bool = False
    revision: int = 0
    written: tuple[Evidence, ...] = ()


class Ours:
    """This project's ledger with the shipped table and default settings. A restart replays the written evidence."""

    looks = True

    def __init__(self, settings: HealthPolicy | None = None) -> None:
        self.restarts = Restarts()
        self._policy = settings or default_policy()
        self._boot = 1
        self._gpus: dict[int, _Watched] = {}
        self._replaced = 0

    def watch(self, gpu: int, facts: Facts) -> None:
        """Make a ledger for the GPU. Each GPU has its own ledger, since observations of one GPU do not affect another."""
        if gpu not in self._gpus:
            uuid = f"GPU-{gpu}-{self._replaced}"
            self._gpus[gpu] = _Watched(uuid, self._ledger(uuid, facts), facts)

    def see(self, gpu: int, seen: Observation, now: float) -> None:
        """Process an observation, also without a restart of the process."""
        known = self._gpus[gpu]
        known.ledger.observe(known.uuid, seen, now)
        if known.ledger.revision != known.revision:
            known.revision, known.written = known.ledger.revision, known.ledger.evidence()
        if known.twin is not None:
            known.twin.observe(known.uuid, seen, now)
            self._compare(known, now)

    def lost(self, gpu: int) -> None:
        """Do nothing: the next look finds it."""

    def restart(self, unreachable: frozenset[int], now: float, *, killed: bool) -> None:
        """Replay each GPU's evidence in a new process; if the process was `killed`, the evidence of the last change."""
        del unreachable
        for gpu in self._gpus:
            self.restart_one(gpu, now, killed=killed)

    def restart_one(self, gpu: int, now: float, *, killed: bool) -> None:
        """Replay the evidence of one GPU, whose ledger is independent of other GPUs."""
        known = self._gpus[gpu]
        stood = known.ledger.verdict(known.uuid) > Verdict.APP
        self.restarts.gpus += 1
        self.restarts.standing += stood
        lasting = stood or known.ledger.suspicious(known.uuid)
        evidence = known.written if killed else known.ledger.evidence()
        known.twin, known.worse = known.ledger, False
        known.until = now + (TWIN_SECONDS if lasting else TWIN_AT_PEACE)
        known.ledger = self._ledger(known.uuid, known.facts)
        known.ledger.replay(evidence)
        known.revision, known.written = known.ledger.revision, known.ledger.evidence()
        before, after = _judged(known.twin, known.uuid), _judged(known.ledger, known.uuid)
        if after < before:
            self._changed(known, before, after)

    def reboot(self, unreachable: frozenset[int], absent: frozenset[int], now: float) -> None:
        """Discard the evidence of the former boot."""
        del unreachable, absent, now
        self._boot += 1
        for known in self._gpus.values():
            known.twin = None
            known.ledger = self._ledger(known.uuid, known.facts)
            known.revision, known.written = 0, ()

    def replace(self, gpu: int, facts: Facts) -> None:
        """Make a new ledger for the new GPU."""
        self._replaced += 1
        self._gpus.pop(gpu, None)
        self.watch(gpu, facts)

    def vouch(self, gpu: int) -> None:
        """Override the GPU's faults: discard past events, and lower faults that can still be read."""
        known = self._gpus[gpu]
        known.ledger.override(known.uuid)
        known.revision, known.written = known.ledger.revision, known.ledger.evidence()
        known.twin = None

    def offered(self, gpu: int) -> bool:
        """Whether no fault is FATAL."""
        known = self._gpus.get(gpu)
        return known is None or known.ledger.verdict(known.uuid) is not Verdict.FATAL

    def why(self, gpu: int) -> str:
        """Return the FATAL signals with their Xids."""
        known = self._gpus[gpu]
        fatal = {
            f"{key.signal} {key.part}".strip()
            for key, _, verdict in known.ledger.standing(known.uuid)
            if verdict is Verdict.FATAL
        }
        return ", ".join(sorted(fatal - {"first-look"})) or "first-look"

    def open(self, gpu: int) -> bool:
        """Whether the GPU has a fault other than an application's error, or two processes are still compared."""
        known = self._gpus.get(gpu)
        if known is None:
            return False
        return known.twin is not None or known.ledger.verdict(known.uuid) > Verdict.APP

    def curious(self, gpu: int) -> bool:
        """Whether the ledger is gathering evidence."""
        known = self._gpus.get(gpu)
        return known is not None and known.ledger.suspicious(known.uuid)

    def _ledger(self, uuid: str, facts: Facts) -> HealthLedger:
        ledger = HealthLedger(self._policy, f"boot-{self._boot}")
        ledger.watch(uuid, facts)
        return ledger

    def _compare(self, known: _Watched, now: float) -> None:
        assert known.twin is not None
        before, after = _judged(known.twin, known.uuid), _judged(known.ledger, known.uuid)
        known.worse = known.worse or after > before
        if after < before or (after > before and now >= known.until + WORSE_SECONDS):
            self._changed(known, before, after)
        elif now >= known.until and after is before:
            self.restarts.longer += known.worse
            known.twin = None

    def _changed(self, known: _Watched, before: Verdict, after: Verdict) -> None:
        stood, stands = _standing(known.twin, known.uuid), _standing(known.ledger, known.uuid)
        differ = sorted(name for name in {*stood, *stands} if stood.get(name) is not stands.get(name))
        self.restarts.change(f"{before.name} to {after.name}: {', '.join(differ)}")
        known.twin = None


def default_policy() -> HealthPolicy:
    """Return the policy with the shipped table and all defaults."""
    return HealthPolicy(XidPolicy(XID_TABLE))


def _judged(ledger: HealthLedger, uuid: str) -> Verdict:
    """Return the verdict without the signal `first-look`, which every process begins with; OK if it is APP or better."""
    found = max(
        (verdict for key, _, verdict in ledger.standing(uuid) if key.signal != "first-look"), default=Verdict.OK
    )
    return found if found > Verdict.APP else Verdict.OK


def _standing(ledger: HealthLedger | None, uuid: str) -> dict[str, Verdict]:
    """Return the verdict of each signal, by its name and its Xid."""
    if ledger is None:
        return {}
    return {
        f"{key.signal} {key.part}".strip(): verdict
        for key, _, verdict in ledger.standing(uuid)
        if key.signal != "first-look"
    }


POLICIES: Mapping[str, str] = {
    "ours": "this project",
    "nvidia": "NVIDIA v0.20.0",
    "google": "Google, Xid 48",
    "google-8": "Google, eight Xids",
}
"""The policies by name, with their names in the report."""


def policy_for(name: str, gpus: int, settings: HealthPolicy) -> Policy:
    """Return a policy for one node."""
    if name == "ours":
        return Ours(settings)
    if name == "nvidia":
        return nvidia(gpus)
    return google(gpus, GOOGLE_HEEDS if name == "google" else GOOGLE_CONFIGURED)
