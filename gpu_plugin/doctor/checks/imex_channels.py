"""Check that the configured IMEX channels exist."""

from gpu_plugin.config.values import AUTO
from gpu_plugin.containers.edits import imex_node
from gpu_plugin.doctor.check import Finding, check, failed, ok, seen, skipped, warning
from gpu_plugin.doctor.facts import Facts

_START = (
    "start nvidia-imex on the node (systemctl status nvidia-imex), and have the module make the channel: "
    "NVreg_CreateImexChannel0=1"
)


@check("imex-channels")
def imex_channels(facts: Facts) -> Finding:
    """Fail if a required channel is missing; warn if a channel is missing that is configured but not required."""
    settings = facts.settings
    if not settings.imex_channel_ids:
        return skipped("no channel is configured (--imex-channel-ids)")
    known = seen(facts.nodes, "IMEX channels")
    if settings.imex_channel_ids == AUTO:
        there = imex_node(0) in known.imex_channels
        return ok(
            f"auto: {imex_node(0)} exists" if there else f"auto: there is no {imex_node(0)}, so pods get no channel"
        )
    missing = [imex_node(each) for each in settings.imex_channel_ids if imex_node(each) not in known.imex_channels]
    if not missing:
        return ok(f"{', '.join(map(imex_node, settings.imex_channel_ids))} exists")
    if settings.imex_required:
        return failed(
            f"there is no {', '.join(missing)}, and --imex-required is set: the daemon does not start", _START
        )
    return warning(f"there is no {', '.join(missing)}: containers do not get the channel", _START)
