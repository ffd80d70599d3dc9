"""What is told to the kubelet of each GPU of one node, by three rules. A policy is asked for nothing but `offered`."""

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
"""Xids that NVIDIA's plugin v0.20.0 takes for an application's (internal/rm/health.go); any other is held against the GPU."""

GOOGLE_HEEDS = frozenset({48})
"""Xids that Google's plugin (container-engine-accelerators) heeds where XID_CONFIG names no more."""

GOOGLE_CONFIGURED = frozenset({48, 63, 64, 79, 119, 120, 123, 140})
"""Those that the same plugin calls critical (`monitorCriticalXid` in its health_check, for a condition of the node), all of them
heeded by XID_CONFIG: Google's documentation names no list of its own."""

TWIN_SECONDS, TWIN_AT_PEACE = 900.0, 20.0
"""For how long the verdicts after a restart are compared with those of a process that was not restarted, and where nothing
but applications' errors stood against the GPU."""


WORSE_SECONDS = 2 * 3600.0
"""For how much longer a verdict may be worse than it would have been: what closes a latch is gathered anew, an hour at most."""


@dataclass(slots=True)
class Restarts:
    """What restarts of the plugin did to verdicts: how many GPUs went through one, and how many verdicts it changed, by what.

    `standing` are those of them against which something stood, DEGRADED or worse. A verdict is changed where it is better than
    that of the process that was not restarted, at any look, or worse at the end of the comparison. `longer` are those where it
    was worse for some looks and the same in the end: what closes a latch was gathered anew.
    """

    gpus: int = 0
    standing: int = 0
    longer: int = 0
    changed: dict[str, int] = field(default_factory=dict)

    def change(self, what: str) -> None:
        """Counts one that changed."""
        self.changed[what] = self.changed.get(what, 0) + 1

    @property
    def total(self) -> int:
        """How many verdicts restarts changed."""
        return sum(self.changed.values())


class Policy(Protocol):
    """The plugin of one node, by the positions of its GPUs; `now` is in seconds. `looks`: it looks at GPUs by itself."""

    looks: bool
    restarts: Restarts

    def watch(self, gpu: int, facts: Facts) -> None:
        """Begins to watch a GPU."""

    def see(self, gpu: int, seen: Observation, now: float) -> None:
        """Takes in an observation."""

    def lost(self, gpu: int) -> None:
        """The wait for the driver's events says that a GPU is lost."""

    def restart(self, unreachable: frozenset[int], now: float, *, killed: bool) -> None:
        """The plugin ends or is `killed`, and begins again; the driver cannot describe these GPUs."""

    def restart_one(self, gpu: int, now: float, *, killed: bool) -> None:
        """A restart as far as one GPU knows of it, which changes nothing if restarts change nothing."""

    def reboot(self, unreachable: frozenset[int], absent: frozenset[int], now: float) -> None:
        """The node was booted anew; the driver cannot describe some GPUs, and has not found others at all."""

    def replace(self, gpu: int, facts: Facts) -> None:
        """Another GPU, with a name of its own, is in this place."""

    def vouch(self, gpu: int) -> None:
        """An operator's word that a GPU is fit, where the plugin knows of such a thing."""

    def offered(self, gpu: int) -> bool:
        """Whether the kubelet may hand it out."""
        ...

    def why(self, gpu: int) -> str:
        """What holds it back, for the report."""
        ...

    def open(self, gpu: int) -> bool:
        """Whether more looks may change anything."""
        ...

    def curious(self, gpu: int) -> bool:
        """Whether a look within a second is asked for."""
        ...


@dataclass(slots=True)
class Marking:
    """NVIDIA's and Google's: an Xid that counts marks its GPU Unhealthy until the process ends.

    `heeds` are the Xids that count, None for all but `skips`. `all_at_loss`: an error of the event wait, which a lost GPU
    brings for all, marks every GPU of the node, and a process that begins with a GPU that the driver cannot describe offers
    none. What is not found after a boot is not offered by anyone.
    """

    skips: frozenset[int] = frozenset()
    heeds: frozenset[int] | None = None
    all_at_loss: bool = False
    gpus: int = 8
    looks: bool = False
    restarts: Restarts = field(default_factory=Restarts)
    marked: dict[int, str] = field(default_factory=dict)

    def watch(self, gpu: int, facts: Facts) -> None:
        """It has all of them at once."""

    def see(self, gpu: int, seen: Observation, now: float) -> None:
        """Marks it for an Xid that counts."""
        del now
        if isinstance(seen, XidEvent) and (
            seen.xid in self.heeds if self.heeds is not None else seen.xid not in self.skips
        ):
            self.marked.setdefault(gpu, f"xid {seen.xid}")

    def lost(self, gpu: int) -> None:
        """Marks all, where it is of that kind."""
        del gpu
        if self.all_at_loss:
            for each in range(self.gpus):
                self.marked.setdefault(each, "lost neighbour")

    def restart_one(self, gpu: int, now: float, *, killed: bool) -> None:
        """It has no such thing: it forgets all GPUs at once."""

    def restart(self, unreachable: frozenset[int], now: float, *, killed: bool) -> None:
        """Forgets everything."""
        del now, killed
        before = set(self.marked)
        self.restarts.standing += len(before)
        self._begin(unreachable, frozenset())
        self.restarts.gpus += self.gpus
        for _ in before ^ set(self.marked):
            self.restarts.change("marks")

    def reboot(self, unreachable: frozenset[int], absent: frozenset[int], now: float) -> None:
        """Forgets everything, as after any boot."""
        del now
        self._begin(unreachable, absent)

    def replace(self, gpu: int, facts: Facts) -> None:
        """Another one has no mark."""
        del facts
        self.marked.pop(gpu, None)

    def vouch(self, gpu: int) -> None:
        """It knows of no such thing."""

    def offered(self, gpu: int) -> bool:
        """Whether it has no mark."""
        return gpu not in self.marked

    def why(self, gpu: int) -> str:
        """The mark."""
        return self.marked.get(gpu, "")

    def open(self, gpu: int) -> bool:
        """Never: it does not look."""
        del gpu
        return False

    def curious(self, gpu: int) -> bool:
        """Never."""
        del gpu
        return False

    def _begin(self, unreachable: frozenset[int], absent: frozenset[int]) -> None:
        self.marked = dict.fromkeys(absent, "absent")
        if unreachable and self.all_at_loss:
            self.marked = dict.fromkeys(range(self.gpus), "lost neighbour")


def nvidia(gpus: int) -> Marking:
    """NVIDIA's plugin v0.20.0 with default settings."""
    return Marking(skips=NVIDIA_SKIPS, all_at_loss=True, gpus=gpus)


def google(gpus: int, heeds: frozenset[int] = GOOGLE_HEEDS) -> Marking:
    """Google's plugin, by default with default settings."""
    return Marking(heeds=heeds, gpus=gpus)


@dataclass(slots=True)
class _Watched:
    """A GPU of ours: its ledger; the one of the process that was not restarted, as long as they are compared; what is on disk."""

    uuid: str
    ledger: HealthLedger
    facts: Facts
    twin: HealthLedger | None = None
    until: float = 0.0
    worse: bool = False
    revision: int = 0
    written: tuple[Evidence, ...] = ()


class Ours:
    """The ledger of this project with the shipped table and default settings; a restart replays what was written down."""

    looks = True

    def __init__(self, settings: HealthPolicy | None = None) -> None:
        self.restarts = Restarts()
        self._policy = settings or default_policy()
        self._boot = 1
        self._gpus: dict[int, _Watched] = {}
        self._replaced = 0

    def watch(self, gpu: int, facts: Facts) -> None:
        """Begins a ledger for it; GPUs are told apart by ledgers, as none's observations reach another."""
        if gpu not in self._gpus:
            uuid = f"GPU-{gpu}-{self._replaced}"
            self._gpus[gpu] = _Watched(uuid, self._ledger(uuid, facts), facts)

    def see(self, gpu: int, seen: Observation, now: float) -> None:
        """Takes in an observation, the process that was not restarted likewise."""
        known = self._gpus[gpu]
        known.ledger.observe(known.uuid, seen, now)
        if known.ledger.revision != known.revision:
            known.revision, known.written = known.ledger.revision, known.ledger.evidence()
        if known.twin is not None:
            known.twin.observe(known.uuid, seen, now)
            self._compare(known, now)

    def lost(self, gpu: int) -> None:
        """The next look says so."""

    def restart(self, unreachable: frozenset[int], now: float, *, killed: bool) -> None:
        """Each GPU's evidence is written down and read by another process; of one that was killed, as of the last news."""
        del unreachable
        for gpu in self._gpus:
            self.restart_one(gpu, now, killed=killed)

    def restart_one(self, gpu: int, now: float, *, killed: bool) -> None:
        """The same for one GPU alone, whose ledger is no other GPU's business."""
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
        """Nothing of another boot is believed."""
        del unreachable, absent, now
        self._boot += 1
        for known in self._gpus.values():
            known.twin = None
            known.ledger = self._ledger(known.uuid, known.facts)
            known.revision, known.written = 0, ()

    def replace(self, gpu: int, facts: Facts) -> None:
        """Another GPU is judged afresh."""
        self._replaced += 1
        self._gpus.pop(gpu, None)
        self.watch(gpu, facts)

    def vouch(self, gpu: int) -> None:
        """Forgets events, makes the least of what is still read."""
        known = self._gpus[gpu]
        known.ledger.override(known.uuid)
        known.revision, known.written = known.ledger.revision, known.ledger.evidence()
        known.twin = None

    def offered(self, gpu: int) -> bool:
        """Whether nothing FATAL stands."""
        known = self._gpus.get(gpu)
        return known is None or known.ledger.verdict(known.uuid) is not Verdict.FATAL

    def why(self, gpu: int) -> str:
        """The signals that are FATAL, with their Xids."""
        known = self._gpus[gpu]
        fatal = {
            f"{key.signal} {key.part}".strip()
            for key, _, verdict in known.ledger.standing(known.uuid)
            if verdict is Verdict.FATAL
        }
        return ", ".join(sorted(fatal - {"first-look"})) or "first-look"

    def open(self, gpu: int) -> bool:
        """Whether anything but an application's error stands against it, or a process is still compared with another."""
        known = self._gpus.get(gpu)
        if known is None:
            return False
        return known.twin is not None or known.ledger.verdict(known.uuid) > Verdict.APP

    def curious(self, gpu: int) -> bool:
        """Whether evidence is being gathered."""
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
    """The shipped table and every default."""
    return HealthPolicy(XidPolicy(XID_TABLE))


def _judged(ledger: HealthLedger, uuid: str) -> Verdict:
    """The verdict but for what every process begins with, to have seen a good look itself; OK where none is to be told."""
    found = max(
        (verdict for key, _, verdict in ledger.standing(uuid) if key.signal != "first-look"), default=Verdict.OK
    )
    return found if found > Verdict.APP else Verdict.OK


def _standing(ledger: HealthLedger | None, uuid: str) -> dict[str, Verdict]:
    """The verdict of each signal, named with its Xid."""
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
"""By name, what the report calls them."""


def policy_for(name: str, gpus: int, settings: HealthPolicy) -> Policy:
    """A policy for one node."""
    if name == "ours":
        return Ours(settings)
    if name == "nvidia":
        return nvidia(gpus)
    return google(gpus, GOOGLE_HEEDS if name == "google" else GOOGLE_CONFIGURED)
