"""The health policy: the operator's settings as the health rules take them."""

from collections.abc import Mapping

import msgspec

from gpu_plugin.config.settings import Settings
from gpu_plugin.health.latch import Proof, Verdict
from gpu_plugin.health.xid_table import XidTable
from gpu_plugin.health.xids import VERDICTS, XidPolicy, parse_xid_list

_WITHOUT_TABLE = XidPolicy()


class HealthPolicy(msgspec.Struct, frozen=True):
    """How evidence is judged.

    `xids` without a table (the default) knows no Xid by name: `policy` makes one with the table that it is given.
    `temperature_recovery` and `flap_hold` are in seconds; a hold of 0 means no flap guard. `signals` is the operator's word on
    what a signal of that name means instead of its own DEGRADED or FATAL; OK leaves it without effect. `judging` is
    False where all health checks are disabled: only what makes a GPU impossible to serve counts then, and Xids that are
    enabled by number. `malformed` has a sentence for each word of the operator's lists of Xids that is none.
    """

    xids: XidPolicy = _WITHOUT_TABLE
    temperature_recovery: float = 300.0
    flap_hold: float = 3600.0
    signals: Mapping[str, Verdict] = msgspec.field(default_factory=dict)
    judging: bool = True
    malformed: tuple[str, ...] = ()


def policy(settings: Settings, table: XidTable) -> HealthPolicy:
    """The policy that the settings ask for, over the shipped table of Xids; `malformed` has what they get wrong."""
    disabled, enabled = parse_xid_list(settings.disable_healthchecks), parse_xid_list(settings.enable_healthchecks)
    critical = parse_xid_list(settings.xid_config)
    said = settings.verdicts
    xids = XidPolicy(
        table,
        disabled,
        enabled,
        critical.numbers,
        {xid: VERDICTS[word] for xid, word in said.xids},
        {Proof(recovery): VERDICTS[word] for recovery, word in said.xid_classes},
    )
    return HealthPolicy(
        xids,
        settings.temperature_recovery,
        settings.flap_guard,
        {signal: VERDICTS[word] for signal, word in said.signals},
        judging=not disabled.every or enabled.every,
        malformed=(
            *_malformed("DP_DISABLE_HEALTHCHECKS", disabled.malformed),
            *_malformed("DP_ENABLE_HEALTHCHECKS", enabled.malformed),
            *(
                f"XID_CONFIG: {word!r} is not an Xid and is ignored"
                for word in (*critical.malformed, *["all"] * critical.every, *["xids"] * critical.xids)
            ),
        ),
    )


def _malformed(name: str, words: tuple[str, ...]) -> list[str]:
    return [f"{name}: {word!r} is neither an Xid, nor 'xids', nor 'all', and is ignored" for word in words]
