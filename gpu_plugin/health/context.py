"""What a signal is told besides its latch and the observation."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpu_plugin.health.facts import Facts
from gpu_plugin.health.latch import UNMARKED, Latch, LatchKey, Marks
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.policy import HealthPolicy


@dataclass(frozen=True, slots=True)
class Context:
    """One observation's surroundings. `now` is Unix time in seconds; `key` which latch is asked for.

    `marks` and `before` are the GPU's marks and its last faultless sample before this observation (None: there was none);
    `open` its latches as they are now; `unfit` whether a signal that judges by its own readings calls it FATAL now.
    `xids` are the Xids of the last minutes on it, the newest last, as (Unix seconds, number).
    """

    now: float
    key: LatchKey
    facts: Facts
    policy: HealthPolicy
    marks: Marks = UNMARKED
    before: Sample | None = None
    open: Mapping[LatchKey, Latch] = field(default_factory=dict)
    unfit: bool = False
    xids: tuple[tuple[float, int], ...] = ()
