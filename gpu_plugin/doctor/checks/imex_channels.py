"""Check that the configured IMEX channels exist."""

from collections.abc import Iterable
from pathlib import Path

from gpu_plugin.config.values import AUTO
from gpu_plugin.containers.edits import imex_node
from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, failed, ok, seen, skipped, warning
from gpu_plugin.doctor.node import Node

_DIRECTORY = imex_node(0).rpartition("/")[0]

_START = (
    "start nvidia-imex on the node (systemctl status nvidia-imex), and have the module make the channel: "
    "NVreg_CreateImexChannel0=1"
)


def read_channels(roots: Iterable[str]) -> frozenset[str]:
    """Return the IMEX channels with a device node below any of these roots, as paths under /dev."""
    directories = [Path(root, _DIRECTORY.lstrip("/")) for root in roots]
    return frozenset(f"{_DIRECTORY}/{path.name}" for each in directories for path in each.glob("channel*"))


@check("imex-channels")
def imex_channels(node: Node) -> Finding:
    """Fail if a required channel is missing; warn if an optional configured channel is missing."""
    wanted = node.settings.imex_channel_ids
    if not wanted:
        return skipped("no channel is configured (--imex-channel-ids)")
    there = seen(
        node.device_roots() if node.simulated else node.known("imex_channels", read_channels, node.roots),
        "IMEX channels",
    )
    if wanted == AUTO:
        first = imex_node(0)
        return ok(f"auto: {first} exists" if first in there else f"auto: there is no {first}, so pods get no channel")
    channels = [imex_node(each) for each in wanted]
    missing = ", ".join(each for each in channels if each not in there)
    if not missing:
        return ok(f"{', '.join(channels)} exists")
    if node.settings.imex_required:
        return failed(f"there is no {missing}, and --imex-required is set: the daemon does not start", _START)
    return warning(f"there is no {missing}: containers do not get the channel", _START)
