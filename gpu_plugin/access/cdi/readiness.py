"""Which devices a container runtime can be told of by CDI name now."""

from collections.abc import Mapping
from dataclasses import dataclass, field

NOT_YET = "its CDI specification is not written yet"


@dataclass(frozen=True, slots=True)
class CdiReadiness:
    """The names that the written specification of GPUs has, and why others are not among them.

    `trouble` is why no device can be used by its name, empty where those of `names` can.
    """

    names: frozenset[str] = frozenset()
    trouble: str = NOT_YET
    missing: Mapping[str, str] = field(default_factory=dict)

    def reason(self, name: str) -> str:
        """Why the device of that name cannot be used; empty where it can."""
        if self.trouble:
            return self.trouble
        return "" if name in self.names else self.missing.get(name, NOT_YET)
