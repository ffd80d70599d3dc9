"""The devices that a container runtime can resolve by CDI name now."""

from collections.abc import Iterable, Mapping

import msgspec

NOT_YET = "its CDI specification is not written yet"


class CdiReadiness(msgspec.Struct, frozen=True):  # a dataclass would take 1 ms to define while pods wait for the start
    """The devices in the written specifications."""

    # The device nodes that a container gets with each device of the class gpu, by the device's name.
    nodes: Mapping[str, frozenset[str]] = {}
    trouble: str = NOT_YET  # why no device can be used by its name; empty if the devices of `nodes` can
    missing: Mapping[str, str] = {}  # why a device is not in `nodes`, by its name
    others: frozenset[str] = frozenset()  # the qualified names of devices of other classes
    complaints: tuple[str, ...] = ()  # sentences about files and devices that are left out

    @property
    def known(self) -> bool:
        """Whether the state of the specifications is known: they were written or found, or they could not be made."""
        return self != CdiReadiness()

    def reason(self, name: str, nodes: Iterable[str] = ()) -> str:
        """Say why the device with this name and these device nodes cannot be used; empty if it can.

        A name may belong to another device since the specification was written. For example, 0:1 does after a GPU was
        repartitioned.
        """
        if self.trouble:
            return self.trouble
        there = self.nodes.get(name)
        if there is None:
            return self.missing.get(name, NOT_YET)
        return "" if there.issuperset(nodes) else NOT_YET

    def lacking(self, others: Iterable[str]) -> str:
        """Say why containers with these devices of other classes, by their qualified names, cannot start; empty if they can."""
        gone = next((name for name in others if name not in self.others), "")
        return f"no written CDI specification has {gone}" if gone else ""
