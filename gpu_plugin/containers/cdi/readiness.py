"""Which devices a container runtime can be told of by CDI name now."""

from collections.abc import Iterable, Mapping

import msgspec

NOT_YET = "its CDI specification is not written yet"


class CdiReadiness(msgspec.Struct, frozen=True):  # made while pods wait for the start: a dataclass takes 1 ms
    """What the written specifications have.

    `nodes` are the device nodes that a container gets with each device of the class gpu, by its name; `others` the qualified
    names of devices of other classes. `trouble` is why no device can be used by its name, empty where those of `nodes` can;
    `missing` why single ones are not among them. `complaints` are sentences about files and devices that were left out.
    """

    nodes: Mapping[str, frozenset[str]] = {}
    trouble: str = NOT_YET
    missing: Mapping[str, str] = {}
    others: frozenset[str] = frozenset()
    complaints: tuple[str, ...] = ()

    @property
    def known(self) -> bool:
        """Whether anything is known of the specifications: they were written, found, or could not be made."""
        return self != CdiReadiness()

    def reason(self, name: str, nodes: Iterable[str] = ()) -> str:
        """Why the device of that name, whose device nodes are these, cannot be used; empty where it can.

        A name may be another device's than when the specification was written: 0:1 is, once a GPU is repartitioned.
        """
        if self.trouble:
            return self.trouble
        there = self.nodes.get(name)
        if there is None:
            return self.missing.get(name, NOT_YET)
        return "" if there.issuperset(nodes) else NOT_YET

    def lacking(self, others: Iterable[str]) -> str:
        """Why containers that get these devices of other classes too, by their qualified names, cannot be made; or empty."""
        gone = next((name for name in others if name not in self.others), "")
        return f"no CDI specification is written that has {gone}" if gone else ""
