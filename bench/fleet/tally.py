"""The results of a policy. Pure."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """The results of a policy, in GPU-hours and numbers of pods.

    Attributes:
        hours: all GPU-hours.
        broken: the hours in which GPUs were broken.
        handed_out: the hours in which a broken GPU was Healthy, by kind of incident.
        held_back: the hours in which a working GPU was Unhealthy, by the signal and the kind of the last incident.
        handed: the number of incidents in `handed_out`.
        held: the number of cases in `held_back`.
        lost: the number of pods that started on a broken GPU.
        turned_away: the number of pods that working GPUs could have had.
        first_look: the hours in which only the missing first look held a GPU back. They are not in `held_back`.
        incidents: the number of incidents by kind.
        steps: the number of operators' steps.
        restarts, standing, longer, changed: see `policies.Restarts`.
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
        """Add the results of another node."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                for key, value in theirs.items():
                    mine[key] = mine.get(key, 0) + value
            else:
                setattr(self, name, mine + theirs)
