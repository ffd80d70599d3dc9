"""What each incident does: to the truth, to what the driver says, and what ends it.

Xids and the recovery that the driver asks for are those of NVIDIA's catalogue of Xid errors
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html) and of its GPU memory error management
(https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/); shares without a source are assumed, as `rates` says of its own.
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
    """What a GPU really is."""

    SOUND = 0
    WORKS = 1
    """Something is wrong with it, but pods run on it and compute what they should."""
    BROKEN = 2
    """Pods fail on it, or compute nonsense."""


@dataclass(frozen=True, slots=True)
class Emission:
    """An Xid: `after` so many seconds of what causes it, with a `chance`, told up to `lines` times within `spread` seconds.

    `breaks`: it comes where the incident breaks the GPU, and not otherwise.
    """

    xid: int
    chance: float = 1.0
    after: float = 0.0
    lines: int = 1
    spread: float = 1.0
    breaks: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """An incident of this name.

    `broken` is the share of incidents that break the GPU; in the others it is as `otherwise`. `begins` are the Xids of the
    beginning, `pods` those of each pod that runs on it while it is broken; they come anew after `repeats` (mean seconds) with
    the chance `recurs`. `looks` is what a look at it brings instead of readings, in the share `unseen` of those; `reading`
    what of a sample is otherwise. `resets` and `reboots` are the shares that a reset of the GPU, and a reboot of the node,
    mends; replacing the part mends all. `lasts` are the seconds (least, most) after which it is over by itself.
    `counts` are the counters of a look that grow as it begins, each time it comes anew, and with each pod that meets it, each by
    a number between two, small ones and great ones alike (log-uniform). `action` is what the driver asks for while it is broken,
    where it can tell. `silent`: nobody notices that pods fail.
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
"""CRC errors of a link that meets an error: of one that mends itself, and of one that does not. No study says; assumed, and taken
to overlap, since an error that is found is sent again either way."""

KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        # 99 % of these leave the GPU in an error state that takes a reboot (delta-v1); NVML calls often hang
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
        # page faults follow 82 to 88 % of them (delta-v1, delta), for 95 % within 5.8 s; the others are taken to do no harm
        Kind(
            "pmu-spi",
            broken=0.85,
            begins=(Emission(122), Emission(31, 1.0, 0.05, lines=4, spread=5.8, breaks=True)),
            pods=(Emission(31, 0.85, lines=4, spread=5.8),),
            resets=0.5,
            reboots=0.9,
        ),
        # 95 % are told for no longer than 1.2 s, 66 % come again (delta-v1); each link at fault has a line of its own
        Kind(
            "nvlink-transient",
            broken=0.0,
            begins=(Emission(74, lines=4, spread=1.2),),
            recurs=0.66,
            counts={"nvlink_crc_errors": CRC_PASSING},
            lasts=(60, 3600),
        ),
        # pods of one GPU do not meet the link: 30 % have several (delta-v1)
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
        # the process that met it is ended; a row is remapped at the next reset. 32 of 130 came with an Xid 48 (delta-v1)
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
        # one in ten without an Xid: the kernel's log alone has a line
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
        # hot where pods run on it, cool where none does: near the shutdown, or at the slowdown, which holds it there
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
        # what a noisy link sends again arrives in the end
        Kind(
            "pcie-noise",
            broken=0.0,
            recurs=0.9,
            repeats=600.0,
            counts={"pcie_replays": (1.0, 1000.0)},
            lasts=(600, 86400),
        ),
        # the GPU answers still, and one in ten is at work: no Xid tells of it
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
"""By name. `nvml-hang` is one in three of the glitches."""

APPLICATION_XIDS = ((31, 0.5), (13, 0.25), (43, 0.25))
"""What a failing application raises, and in which share; the first is what studies count, the others are assumed."""

OTHER_XIDS = (8, 32, 44, 66, 68, 69, 39)
"""Others of the catalogue that are an application's (RESTART_APP) or nobody's fault (IGNORE)."""


@dataclass(slots=True)
class Incident:
    """One incident on one GPU. What chance decides of it is drawn as it begins, and is the same under every policy.

    The driver asks for `action` from `action_at` (seconds of the virtual clock) on.
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
        """By how much each counter grows this time."""
        return {
            name: round(math.exp(self.dice.uniform(math.log(least), math.log(most))))
            for name, (least, most) in self.kind.counts.items()
        }

    def action_now(self, now: float) -> RecoveryAction:
        """The recovery action that the driver asks for at this time."""
        return self.action if now >= self.action_at else RecoveryAction.NONE

    @classmethod
    def begun(cls, kind: Kind, now: float, number: int, dice: random.Random) -> "Incident":
        """One that begins `now`, in seconds."""
        truth = Truth.BROKEN if dice.random() < kind.broken else kind.otherwise
        answers = dice.random() >= kind.unseen or (kind.broken > 0 and truth is not Truth.BROKEN)
        looks = Fault.NONE if answers else kind.looks
        ends = now + dice.uniform(*kind.lasts) if kind.lasts else float("inf")
        luck = dice.random()
        mends = {"reset": luck < kind.resets, "reboot": luck < kind.reboots, "replace": True}
        return cls(kind, truth, number, looks, ends, mends, dice)
