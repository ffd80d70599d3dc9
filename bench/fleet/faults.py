"""The kinds of incidents: their effects on the GPU and on the driver's reports, and their ends.

Xids and requested recoveries are from NVIDIA's catalogue of Xid errors
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html) and from its GPU memory error management
(https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/). Shares without a source are assumed, as in `rates`.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from bench.fleet.rates import RECOVERABLE
from gpu_plugin.devices.nvml_h import RecoveryAction
from gpu_plugin.health.observation import Fault


class Truth(IntEnum):
    """The true state of a GPU."""

    SOUND = 0
    WORKS = 1
    """The GPU has a fault, but pods run on it with correct results."""
    BROKEN = 2
    """Pods fail on the GPU, or compute wrong results."""


@dataclass(frozen=True, slots=True)
class Emission:
    """An Xid, raised `after` seconds with the probability `chance`, and reported up to `lines` times within `spread` seconds.

    `breaks`: the Xid is raised only if the incident breaks the GPU.
    """

    xid: int
    chance: float = 1.0
    after: float = 0.0
    lines: int = 1
    spread: float = 1.0
    breaks: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of incident.

    Attributes:
        name: its name.
        broken: the share of incidents that break the GPU.
        otherwise: the GPU's true state in the other incidents.
        begins: the Xids at the beginning. They are repeated with the probability `recurs`.
        pods: the Xids of each pod that runs on the GPU while it is broken.
        recurs: the probability that the incident recurs, each time.
        repeats: the mean seconds until it recurs.
        looks: the fault of each look, in a share of the incidents.
        unseen: this share. If `broken` is above 0, it is a share of the incidents that break the GPU.
        reading: the values of a sample that the incident changes.
        counts: the counters that increase at the beginning, at each recurrence, and with each pod on the GPU, by a random number
            between two limits (log-uniform).
        resets: the share of incidents that a reset of the GPU ends. Replacing the GPU ends all incidents.
        reboots: the share of incidents that a reboot of the node ends.
        lasts: the seconds (least, most) after which it ends by itself; None if it does not.
        action: the recovery that the driver requests while the GPU is broken, if the driver reports recovery actions.
        silent: whether the pods' failures are not noticed.
    """

    name: str
    broken: float = 1.0
    otherwise: Truth = Truth.WORKS
    begins: tuple[Emission, ...] = ()
    pods: tuple[Emission, ...] = ()
    recurs: float = 0.0
    repeats: float = 600.0
    looks: Fault = Fault.NONE
    unseen: float = 1.0
    reading: Mapping[str, object] = field(default_factory=dict)
    counts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    resets: float = 0.0
    reboots: float = 0.0
    lasts: tuple[float, float] | None = None
    action: RecoveryAction = RecoveryAction.NONE
    silent: bool = False


_RESET = RecoveryAction.GPU_RESET

CRC_PASSING, CRC_FAILING = (1.0, 300.0), (10.0, 3000.0)
"""CRC errors of a link with an error: of a link that recovers by itself, and of a failing link. No study has them, so they are
assumed. The ranges overlap, since a detected error causes a retransmission in both cases."""

KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        # 99 % of these leave the GPU in an error state that needs a reboot (delta-v1); NVML calls often hang
        Kind(
            "gsp-timeout",
            broken=0.99,
            begins=(Emission(119), Emission(119, 0.5, 8), Emission(119, 0.3, 100), Emission(120, 0.1, 1)),
            pods=(Emission(119, 0.5),),
            looks=Fault.HUNG,
            unseen=0.5,
            resets=0.3,
            reboots=0.95,
            action=_RESET,
        ),
        # page faults follow 82 to 88 % of them (delta-v1, delta), for 95 % within 5.8 s; the others are assumed to be harmless
        Kind(
            "pmu-spi",
            broken=0.85,
            begins=(Emission(122), Emission(31, 1.0, 0.05, lines=4, spread=5.8, breaks=True)),
            pods=(Emission(31, 0.85, lines=4, spread=5.8),),
            resets=0.5,
            reboots=0.9,
        ),
        # 95 % are reported for no longer than 1.2 s, 66 % recur (delta-v1); each failing link has its own line
        Kind(
            "nvlink-transient",
            broken=0.0,
            begins=(Emission(74, lines=4, spread=1.2),),
            recurs=0.66,
            counts={"nvlink_crc_errors": CRC_PASSING},
            lasts=(60, 3600),
        ),
        # pods with one GPU do not use the link: 30 % have several GPUs (delta-v1)
        Kind(
            "nvlink-down",
            begins=(Emission(74, lines=4, spread=1.2), Emission(45, 0.5, 1)),
            pods=(Emission(74, 0.3, lines=4, spread=1.2),),
            recurs=0.66,
            reading={"nvlinks": 3},
            counts={"nvlink_crc_errors": CRC_FAILING, "nvlink_failed_recoveries": (1.0, 1.0)},
            resets=0.8,
            reboots=0.9,
            action=_RESET,
        ),
        # the same, but the link is up again at every look
        Kind(
            "nvlink-flapping",
            begins=(Emission(74, lines=4, spread=1.2), Emission(45, 0.5, 1)),
            pods=(Emission(74, 0.3, lines=4, spread=1.2),),
            recurs=0.66,
            counts={"nvlink_crc_errors": CRC_FAILING, "nvlink_failed_recoveries": (1.0, 1.0)},
            resets=0.8,
            reboots=0.9,
            action=_RESET,
        ),
        # the process with the error is ended; a row is remapped at the next reset. 32 of 130 had an Xid 48 (delta-v1)
        Kind(
            "ecc-contained",
            broken=0.0,
            begins=(Emission(48, 0.25), Emission(63), Emission(94, after=0.1), Emission(45, 0.5, 1)),
            reading={"ecc_uncorrected": 1, "remap_pending": True},
            resets=1.0,
            reboots=1.0,
        ),
        Kind(
            "ecc-uncontained",
            begins=(Emission(48, 0.25), Emission(63, 0.5), Emission(95, after=0.1)),
            pods=(Emission(95, 0.8),),
            reading={"ecc_uncorrected": 2, "remap_pending": True},
            resets=0.9,
            reboots=0.95,
            action=_RESET,
        ),
        Kind(
            "remap-failure",
            begins=(Emission(64), Emission(94, after=0.1)),
            pods=(Emission(94, 0.3),),
            reading={"ecc_uncorrected": 1, "remap_failure": True},
            action=_RESET,
        ),
        Kind(
            "sram",
            begins=(Emission(48, 0.5), Emission(95)),
            pods=(Emission(95, 0.5),),
            reading={"ecc_uncorrected": 1},
            resets=0.9,
            reboots=0.9,
            action=_RESET,
        ),
        # one in ten has no Xid: only the kernel's log has a line
        Kind("off-the-bus", begins=(Emission(79, 0.9),), looks=Fault.LOST, reboots=RECOVERABLE),
        Kind(
            "engine-hang",
            begins=(Emission(109, 0.5), Emission(46, 0.3), Emission(62, 0.2), Emission(45, 0.8, 1)),
            pods=(Emission(109, 0.5), Emission(43, 0.5)),
            resets=0.8 * RECOVERABLE,
            reboots=RECOVERABLE,
            action=_RESET,
        ),
        # every pod fails on it as if by its own fault
        Kind(
            "wedged",
            pods=(Emission(31, 0.5), Emission(13, 0.3), Emission(43, 0.5)),
            resets=0.8 * RECOVERABLE,
            reboots=RECOVERABLE,
        ),
        Kind("unanswering", looks=Fault.ERROR, resets=0.8 * RECOVERABLE, reboots=RECOVERABLE),
        Kind("silent-corruption", silent=True),
        # hot while pods run on the GPU: near the shutdown threshold, or at the slowdown threshold, which limits the temperature
        Kind("overheating", broken=0.5, reading={"temperature": "hot"}),
        Kind(
            "pcie-lanes",
            broken=0.0,
            reading={"pcie_width": 8},
            recurs=0.9,
            repeats=3600.0,
            counts={"pcie_replays": (1.0, 1000.0)},
            reboots=0.5,
        ),
        # retransmissions of a noisy link succeed
        Kind(
            "pcie-noise",
            broken=0.0,
            recurs=0.9,
            repeats=600.0,
            counts={"pcie_replays": (1.0, 1000.0)},
            lasts=(600, 86400),
        ),
        # the GPU still answers, and one in ten still works; there is no Xid
        Kind(
            "pcie-fatal",
            broken=0.9,
            counts={"pcie_fatal_errors": (1.0, 3.0), "pcie_replays": (1.0, 1000.0)},
            resets=0.3 * RECOVERABLE,
            reboots=RECOVERABLE,
            action=_RESET,
        ),
        Kind("nvml-glitch", broken=0.0, otherwise=Truth.SOUND, looks=Fault.ERROR, lasts=(1, 30)),
        Kind("nvml-hang", broken=0.0, otherwise=Truth.SOUND, looks=Fault.HUNG, lasts=(10, 60)),
        Kind("fabric-down", reading={"fabric": 2}, reboots=1.0, resets=0.0),
        Kind("hot-room", broken=0.0, reading={"temperature": "hot"}, lasts=(3600, 4 * 3600)),
    )
}
"""The kinds of incidents by name. One in three glitches is a `nvml-hang`."""

APPLICATION_XIDS = ((31, 0.5), (13, 0.25), (43, 0.25))
"""The Xids of failing applications and their shares. Studies count only the first; the others are assumed."""

OTHER_XIDS = (8, 32, 44, 66, 68, 69, 39)
"""Other Xids of the catalogue that are an application's fault (RESTART_APP) or no fault (IGNORE)."""


@dataclass(slots=True)
class Incident:
    """One incident on one GPU. Its random values are drawn at its beginning, and are the same under every policy.

    The driver requests `action` from `action_at` (seconds of the virtual clock) on.
    """

    kind: Kind
    truth: Truth
    number: int
    looks: Fault
    ends: float
    mends: Mapping[str, bool]
    dice: random.Random
    action: RecoveryAction = RecoveryAction.NONE
    action_at: float = 0.0

    def counted(self) -> dict[str, int]:
        """Return the increase of each counter for this occurrence."""
        return {
            name: round(math.exp(self.dice.uniform(math.log(least), math.log(most))))
            for name, (least, most) in self.kind.counts.items()
        }

    def action_now(self, now: float) -> RecoveryAction:
        """Return the recovery action that the driver requests at this time."""
        return self.action if now >= self.action_at else RecoveryAction.NONE

    @classmethod
    def begun(cls, kind: Kind, now: float, number: int, dice: random.Random) -> "Incident":
        """Return an incident that begins `now`, in seconds."""
        truth = Truth.BROKEN if dice.random() < kind.broken else kind.otherwise
        answers = dice.random() >= kind.unseen or (kind.broken > 0 and truth is not Truth.BROKEN)
        looks = Fault.NONE if answers else kind.looks
        ends = now + dice.uniform(*kind.lasts) if kind.lasts else float("inf")
        luck = dice.random()
        mends = {"reset": luck < kind.resets, "reboot": luck < kind.reboots, "replace": True}
        return cls(kind, truth, number, looks, ends, mends, dice)
