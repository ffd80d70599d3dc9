"""Resources that one container cannot use together under a strategy, since both set the same environment variable.

The kubelet merges the answers for a container's resources in random order; of two values of one variable it keeps the first
(pkg/kubelet/cm/devicemanager/pod_devices.go, deviceRunContainerOptions). Of the strategies in `container.py` this meets
envvar alone: under volume-mounts every resource gives NVIDIA_VISIBLE_DEVICES the same value and mounts of its own, which add
up, even beside envvar; annotations are keyed by the devices they name, and names of CDI devices add up. CDI beside envvar
adds its names, but leaves two values of the variable.
"""

from collections.abc import Sequence

from gpu_plugin.containers.edits import VISIBLE_DEVICES
from gpu_plugin.devices.device import Resource

SAME_CONTAINER_SECONDS = 0.1
"""Seconds between two calls of Allocate that may be for one container. The kubelet makes them one after the other, each with a
GetPreferredAllocation at most before it; a plugin of someone else's may be asked in between."""

WARNING_INTERVAL = 1.0  # seconds between two sentences on such calls, at least


def overwrites(strategies: Sequence[str]) -> bool:
    """Whether two resources of one container give NVIDIA_VISIBLE_DEVICES different values under these strategies."""
    return "envvar" in strategies and "volume-mounts" not in strategies


def pair_warning(strategies: Sequence[str], resources: Sequence[Resource]) -> str:
    """A sentence where these resources leave room for a container that asks for two of them; empty where they do not."""
    names = [resource.name for resource in resources if resource.devices]
    if len(names) < 2 or not overwrites(strategies):
        return ""
    return f"a container that asks for two of {', '.join(names)} {_outcome(strategies)}"


def _outcome(strategies: Sequence[str]) -> str:
    read = " where its runtime goes by that variable" if len(strategies) > 1 else ""
    return (
        f"sees the devices of only one of them, at random{read}, since each sets {VISIBLE_DEVICES} under the device list "
        "strategy envvar; --device-list-strategy cdi-cri, cdi-annotations or volume-mounts gives it both"
    )


class PairWatch:
    """Which resource was allocated last, and when: tells of two that may be one container's. Times are of a steady clock, in s.

    Calls from several threads do no harm: at worst a sentence is missing, or one more is said.
    """

    def __init__(self) -> None:
        self._last: tuple[str, float] | None = None
        self._said = float("-inf")

    def allocated(self, resource: str, strategies: Sequence[str], now: float) -> str:
        """Notes an allocation. Returns a warning if another resource was allocated just before, one in `WARNING_INTERVAL`."""
        if not overwrites(strategies):
            return ""
        last, self._last = self._last, (resource, now)
        if (
            last is None
            or last[0] == resource
            or now - last[1] > SAME_CONTAINER_SECONDS
            or now - self._said < WARNING_INTERVAL
        ):
            return ""
        self._said = now
        near = f"{last[0]} and {resource} were allocated within {SAME_CONTAINER_SECONDS * 1000:.0f} ms of each other"
        return f"{near}: if that was for one container, it {_outcome(strategies)}"
