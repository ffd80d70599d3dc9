"""Resources that one container cannot use together under a strategy, since both set the same environment variable.

The kubelet merges the answers for a container's resources in random order. If two answers set the same variable, it keeps the
first value (pkg/kubelet/cm/devicemanager/pod_devices.go, deviceRunContainerOptions). This matters only for envvar:

- Under volume-mounts, also together with envvar, each resource sets NVIDIA_VISIBLE_DEVICES to the same value and adds its own
  mounts.
- The keys of annotations differ, since they are made from the devices' names.
- The kubelet joins the lists of CDI names. CDI together with envvar still has two values of the variable.
"""

from collections.abc import Sequence

from gpu_plugin.containers.edits import VISIBLE_DEVICES
from gpu_plugin.devices.device import Resource

SAME_CONTAINER_SECONDS = 0.1
"""The most seconds between two calls of Allocate that may be for one container. The kubelet makes these calls one after the
other. Between them there may be one call of GetPreferredAllocation, and calls to other plugins."""

WARNING_INTERVAL = 1.0  # the least number of seconds between two warnings about such calls


def overwrites(strategies: Sequence[str]) -> bool:
    """Whether two resources of one container set NVIDIA_VISIBLE_DEVICES to different values under these strategies."""
    return "envvar" in strategies and "volume-mounts" not in strategies


def pair_warning(strategies: Sequence[str], resources: Sequence[Resource]) -> str:
    """Return a warning if a container could request two of these resources and get only one of them; else empty."""
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
    """Detects allocations of two resources that may be for one container. Times are seconds of a monotonic clock.

    It needs no lock: if several threads call it, the worst result is a missing warning or a second warning.
    """

    def __init__(self) -> None:
        self._last: tuple[str, float] | None = None
        self._warned_at = float("-inf")

    def allocated(self, resource: str, strategies: Sequence[str], now: float) -> str:
        """Record an allocation. Returns a warning if another resource was allocated just before; else empty.

        There is at most one warning in `WARNING_INTERVAL` seconds.
        """
        if not overwrites(strategies):
            return ""
        last, self._last = self._last, (resource, now)
        if (
            last is None
            or last[0] == resource
            or now - last[1] > SAME_CONTAINER_SECONDS
            or now - self._warned_at < WARNING_INTERVAL
        ):
            return ""
        self._warned_at = now
        near = f"{last[0]} and {resource} were allocated within {SAME_CONTAINER_SECONDS * 1000:.0f} ms of each other"
        return f"{near}: if that was for one container, it {_outcome(strategies)}"
