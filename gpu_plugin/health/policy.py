"""The health policy: the shipped table of Xids, overridden by the operator's settings, and the other settings of health."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from gpu_plugin.config.settings import Settings
from gpu_plugin.health.latch import Proof, Verdict
from gpu_plugin.health.xid_table import XidRow, XidTable

# Verdicts by their names in the table and in the config file
VERDICTS: Mapping[str, Verdict] = {
    "ignore": Verdict.OK,
    "app": Verdict.APP,
    "degraded": Verdict.DEGRADED,
    "fatal": Verdict.FATAL,
}


class XidList(msgspec.Struct, frozen=True):
    """A DP_*_HEALTHCHECKS value: `every` health check, every Xid (`xids`), or the `numbers` named."""

    every: bool = False
    xids: bool = False
    numbers: frozenset[int] = frozenset()
    malformed: tuple[str, ...] = ()


def parse_xid_list(text: str) -> XidList:
    """Read `all`, `xids` and numbers, separated by commas, in any case. Other words are in `malformed`."""
    items = [item.strip().lower() for item in text.split(",") if item.strip()]
    digits = [item for item in items if item.isascii() and item.isdigit() and len(item) <= 20]
    malformed = tuple(item for item in items if item not in {"all", "xids", *digits})
    return XidList("all" in items, "xids" in items, frozenset(map(int, digits)), malformed)


_NO_XIDS = XidList()


@dataclass(frozen=True)
class XidPolicy:
    """The shipped table, overridden by the operator's settings. Without a table every Xid is unknown.

    A number wins over a class, a class over `all` and `xids`, and these over the table. For numbers the environment wins over
    the file, and in the environment `enabled` (DP_ENABLE_HEALTHCHECKS) and `critical` (XID_CONFIG) win over `disabled`
    (DP_DISABLE_HEALTHCHECKS). With `all` disabled and 79 enabled, only 79 counts. With `all` enabled and 13 disabled, all but
    13 count. `numbers` and `classes` are the file's verdicts by Xid and by recovery class.
    """

    table: XidTable = field(default_factory=dict, repr=False)
    disabled: XidList = _NO_XIDS
    enabled: XidList = _NO_XIDS
    critical: frozenset[int] = frozenset()
    numbers: Mapping[int, Verdict] = field(default_factory=dict)
    classes: Mapping[Proof, Verdict] = field(default_factory=dict)

    def judge(self, xid: int) -> XidRow:
        """Return the judgement of this Xid. An unknown Xid is DEGRADED, unless the driver requests a recovery."""
        return self._judged.get(xid) or self._judge(None, None)

    @cached_property
    def companions(self) -> frozenset[int]:
        """The Xids that change the verdict of another Xid."""
        return frozenset(xid for judged in self._judged.values() if judged.brings for xid in judged.brings.xids)

    @cached_property
    def accompanied(self) -> frozenset[int]:
        """The Xids whose verdict another Xid changes."""
        return frozenset(xid for xid, judged in self._judged.items() if judged.brings)

    @cached_property
    def _judged(self) -> Mapping[int, XidRow]:
        named = {*self.table, *self.numbers, *self.disabled.numbers, *self.enabled.numbers, *self.critical}
        return {xid: self._judge(self.table.get(xid), self._by_number(xid)) for xid in named}

    def _judge(self, row: XidRow | None, named: Verdict | None) -> XidRow:
        asked = named if named is not None else self._by_word(row.recovery if row else None)
        row = row or XidRow()
        return row if asked is None else row.set_to(asked)

    def _by_number(self, xid: int) -> Verdict | None:
        if xid in self.enabled.numbers or xid in self.critical:
            return Verdict.FATAL
        return Verdict.OK if xid in self.disabled.numbers else self.numbers.get(xid)

    def _by_word(self, recovery: Proof | None) -> Verdict | None:
        if recovery is not None and recovery in self.classes:
            return self.classes[recovery]
        if self.enabled.every or self.enabled.xids:
            return Verdict.FATAL
        return Verdict.OK if self.disabled.every or self.disabled.xids else None


def describe(xid: int, name: str = "") -> str:
    """Return words for an Xid, with its name if it has one."""
    return f"Xid {xid} ({name})" if name else f"Xid {xid}"


class HealthPolicy(msgspec.Struct, frozen=True):
    """The rules by which evidence is judged.

    The default of `xids` has no table; `policy` gives it one. `temperature_recovery` and `flap_hold` are in seconds. A hold of
    0 turns the flap guard off. `signals` has the operator's verdicts by signal, which replace DEGRADED and FATAL; OK leaves the
    signal without effect. `judging` is False if all health checks are disabled: only signals of GPUs that cannot be served
    count then, and Xids that are enabled by number. `malformed` has a sentence for each invalid word in the operator's lists
    of Xids.
    """

    xids: XidPolicy = XidPolicy()
    temperature_recovery: float = 300.0
    flap_hold: float = 3600.0
    signals: Mapping[str, Verdict] = msgspec.field(default_factory=dict)
    judging: bool = True
    malformed: tuple[str, ...] = ()


def policy(settings: Settings, table: XidTable) -> HealthPolicy:
    """Return the policy of these settings over the shipped table of Xids."""
    disabled, enabled = parse_xid_list(settings.disable_healthchecks), parse_xid_list(settings.enable_healthchecks)
    critical = parse_xid_list(settings.xid_config)
    verdicts = settings.verdicts
    xids = XidPolicy(
        table,
        disabled,
        enabled,
        critical.numbers,
        {xid: VERDICTS[word] for xid, word in verdicts.xid.items()},
        {Proof(recovery): VERDICTS[word] for recovery, word in verdicts.xid_class.items()},
    )
    return HealthPolicy(
        xids,
        settings.temperature_recovery,
        settings.flap_guard,
        {signal: VERDICTS[word] for signal, word in verdicts.signals.items()},
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
