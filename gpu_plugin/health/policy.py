"""What the operator's settings mean for the health rules."""

from gpu_plugin.config.settings import Settings
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.latch import Limits
from gpu_plugin.health.xids import XidPolicy, parse_xid_list


def policy(settings: Settings) -> XidPolicy:
    """The Xid policy that DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS ask for; `complaints` has what they get wrong."""
    return XidPolicy(parse_xid_list(settings.disable_healthchecks), parse_xid_list(settings.enable_healthchecks))


def complaints(asked: XidPolicy) -> list[str]:
    """A sentence for each word of the operator's lists that is none; it is left out of the policy."""
    lists = {"DP_DISABLE_HEALTHCHECKS": asked.disabled, "DP_ENABLE_HEALTHCHECKS": asked.enabled}
    return [
        f"{name}: {word!r} is neither an Xid, nor 'xids', nor 'all', and is ignored"
        for name, read in lists.items()
        for word in read.malformed
    ]


def limits(gpu: Gpu, settings: Settings) -> Limits:
    """A GPU's limits for the health rules."""
    thresholds = gpu.thresholds
    return Limits(
        thresholds.shutdown, thresholds.slowdown, settings.temperature_recovery, policy(settings).watch_temperature
    )
