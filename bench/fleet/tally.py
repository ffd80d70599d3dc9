"""What a policy comes to. Pure."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """What came of a policy, in GPU-hours and pods.

    `handed_out` are the hours in which a broken GPU was Healthy, by the kind of incident, `handed` how many of these were.
    `held_back` are those in which one that works was Unhealthy, by what held it back and the kind of what was last the matter
    with it, `held` how often; those of `first_look` alone are counted apart. `lost` are pods that began on a broken GPU,
    `turned_away` those that a GPU which works would have had. `broken` are the hours that GPUs were broken in all.

    `incidents` are how many there were, and `steps` what operators did. `restarts`, `standing`, `longer` and `changed` are those
    of `policies.Restarts`.
    """

    hours: float = 0.0
    broken: float = 0.0
    handed_out: dict[str, float] = field(default_factory=dict)
    held_back: dict[tuple[str, str], float] = field(default_factory=dict)
    handed: dict[str, int] = field(default_factory=dict)
    held: dict[tuple[str, str], int] = field(default_factory=dict)
    lost: int = 0
    turned_away: float = 0.0
    first_look: float = 0.0
    incidents: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    standing: int = 0
    longer: int = 0
    changed: dict[str, int] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        """Adds another node's."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                for key, value in theirs.items():
                    mine[key] = mine.get(key, 0) + value
            else:
                setattr(self, name, mine + theirs)
