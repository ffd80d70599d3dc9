"""NUMA hints and their merging, as in the kubelet's topology manager. Decisions only, no I/O.

Sources: pkg/kubelet/cm/devicemanager/topology_hints.go (generateDeviceTopologyHints),
pkg/kubelet/cm/topologymanager/policy*.go (merging and admission by policy), manager.go (filterByAffinity).
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, product
from typing import Literal

import msgspec

NumaPolicy = Literal["none", "best-effort", "restricted", "single-numa-node"]

Numa = Mapping[str, tuple[int, ...]]  # NUMA node ids by device id; empty if the device has no topology


class Hint(msgspec.Struct, frozen=True):
    """A set of NUMA nodes that could serve a request (None: any), and whether it is as small as possible."""

    nodes: frozenset[int] | None
    preferred: bool


def resource_hints(
    numa: Numa, available: Collection[str], reusable: Collection[str], request: int
) -> list[Hint] | None:
    """Return the hints for `request` devices of one resource: None if it has no NUMA nodes, empty if no set suffices.

    Args:
        numa: all devices of the resource, healthy or not.
        available: ids that may be allocated.
        reusable: ids that the pod's init containers leave.
        request: the number of devices.
    """
    if not any(numa.values()):
        return None
    if len({*available, *reusable}) < request:
        return []
    nodes = sorted({node for ids in numa.values() for node in ids if node >= 0})
    narrowest = len(nodes)
    found = []
    for mask in _masks(nodes):
        if sum(_touches(numa[identifier], mask) for identifier in numa) >= request:
            narrowest = min(narrowest, len(mask))
        placed = [identifier for identifier in reusable if numa[identifier]]
        if not all(_touches(numa[identifier], mask) for identifier in placed):
            continue
        if len(placed) + sum(_touches(numa[identifier], mask) for identifier in available) >= request:
            found.append(mask)
    return [Hint(mask, len(mask) == narrowest) for mask in found]


def merge(policy: NumaPolicy, hints: Sequence[list[Hint] | None], nodes: Collection[int]) -> tuple[Hint, bool]:
    """Return the hint for a container, and whether `policy` admits it. `hints` are for its resources, `nodes` the machine's."""
    if policy == "none":
        return Hint(None, preferred=True), True
    every = frozenset(nodes)
    lists = [_filtered(policy, each) for each in hints]
    best: Hint | None = None
    for choice in product(*lists):
        candidate = _intersect(choice, every)
        if candidate.nodes and (best is None or _rank(candidate) < _rank(best)):
            best = candidate
    if best is None:
        best = Hint(every, preferred=False)
    if policy == "single-numa-node" and best.nodes == every:
        best = Hint(None, best.preferred)
    return best, policy == "best-effort" or best.preferred


def aligned(numa: Numa, available: Collection[str], hint: Hint) -> tuple[set[str], set[str], set[str]]:
    """Split `available` in three sets: on the hint's nodes, on other nodes, without a node.

    All are in the third set if the resource has no NUMA nodes or there is no hint.
    """
    if hint.nodes is None or not any(numa.values()):
        return set(), set(), set(available)
    inside = {identifier for identifier in available if _touches(numa[identifier], hint.nodes)}
    outside = {identifier for identifier in available if max(numa[identifier], default=-1) >= 0} - inside
    return inside, outside, set(available) - inside - outside


def _masks(nodes: Sequence[int]) -> list[frozenset[int]]:
    return [frozenset(chosen) for count in range(1, len(nodes) + 1) for chosen in combinations(nodes, count)]


def _touches(numa: tuple[int, ...], mask: frozenset[int]) -> bool:
    return not mask.isdisjoint(numa)


def _filtered(policy: NumaPolicy, hints: list[Hint] | None) -> list[Hint]:
    if hints is None:
        return [Hint(None, preferred=True)]
    if policy == "single-numa-node":
        return [hint for hint in hints if hint.preferred and hint.nodes is not None and len(hint.nodes) == 1]
    return hints or [Hint(None, preferred=False)]


def _intersect(choice: Sequence[Hint], every: frozenset[int]) -> Hint:
    placed = [hint.nodes for hint in choice if hint.nodes is not None]
    same = all(nodes == placed[0] for nodes in placed)
    return Hint(every.intersection(*placed), same and all(hint.preferred for hint in choice))


def _rank(hint: Hint) -> tuple[bool, int, int]:
    assert hint.nodes is not None
    return not hint.preferred, len(hint.nodes), sum(1 << node for node in hint.nodes)
