"""The health policy: the shipped table of Xids, overridden by the operator's settings, and the other settings of health."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
from msgspec.structs import replace

from gpu_plugin.config.settings import Settings
from gpu_plugin.health.latch import REBOOT, RESET, Proof, Verdict
from gpu_plugin.health.xid_table import XidRow, XidTable

# Verdicts by their names in the table and in the config file
VERDICTS: Mapping[str, Verdict] = {
    "ignore": Verdict.OK,
    "app": Verdict.APP,
    "degraded": Verdict.DEGRADED,
    "fatal": Verdict.FATAL,
}

_LINKS = "look at its NVLinks (nvidia-smi nvlink --status -i {gpu}), reset all GPUs that they join"
_VENDOR = "have the GPU inspected by its vendor"
_LOG = "look at the kernel's log and at NVIDIA's catalogue of Xid errors"
_NOTHING = "nothing need be done"

# Advice for the immediate actions of NVIDIA's catalogue that lead to a proof; `{gpu}` is replaced by the GPU's uuid
_RECOVERIES: Mapping[Proof, Mapping[str, str]] = {
    Proof.RESET: {
        "CHECK_MECHANICALS": "check the GPU's power cables and seat, then reboot the node",
        "RESET_GPU": RESET,
        "RESTART_BM": REBOOT,
        "RESTART_VM": "restart the virtual machine, or reboot the node",
        "UPDATE_SWFW": "update the driver and the firmware, then reset the GPU",
        "WORKFLOW_NVLINK5_ERR": _LINKS,
        "WORKFLOW_NVLINK_ERR": _LINKS,
        "WORKFLOW_XID_48": RESET,
    },
    Proof.REBOOT: {
        "CHECK_MECHANICALS": "check the GPU's power cables and seat, then reboot the node",
        "RESTART_BM": REBOOT,
        "RESTART_VM": "restart the virtual machine, or reboot the node",
    },
}

# Advice for the immediate actions of faults that end by themselves
_PASSING: Mapping[str, str] = {
    "CHECK_UVM": "look at the kernel's log for messages of the unified memory driver",
    "CONTACT_SUPPORT": f"if it comes again, {_VENDOR}",
    "RESTART_APP": "restart the application",
    "WORKFLOW_XID_45": "look for the error before it; without one, a process ended or was killed, or see the signal fabric",
    "XID_154": "carry out the driver's recovery action, which the kernel's log has as well",
}

_ENDED_BY_MORE = frozenset({Proof.RESET, Proof.REBOOT, Proof.RMA})


class Companions(msgspec.Struct, frozen=True):
    """The `xids` that change an Xid's verdict if one comes `within` this time in seconds before or after it.

    With `later`, only an Xid after it counts.
    """

    xids: frozenset[int]
    within: float
    later: bool = False


class Judgement(msgspec.Struct, frozen=True):
    """The policy for one Xid.

    `verdict` is OK for an Xid that is only counted. `recovery` is the class of the proof that the fault is over. `name` is
    empty and `listed` False for an Xid that is not in the table. `action` is the immediate action of NVIDIA's catalogue, or
    empty. `firm` is True if the operator set the verdict, or the table fixes it, so that no recovery action changes it.

    `raised` is the verdict if the Xid happened `count` times `within` this time in seconds, or with one of the Xids of
    `brings`. `beside` has a signal, and the verdict during that signal's open latch. `silent` is the verdict on a part that
    reports no recovery action. `repeats`, `whole_gpu` and `look` are the fields of the table's row. `linked` is the first driver
    branch whose recovery action follows this Xid, 0 for all branches, None for no branch. `resets` is True if the driver may
    request a reset, or more, because of this Xid.
    """

    verdict: Verdict
    recovery: Proof = Proof.RESET
    name: str = ""
    action: str = ""
    listed: bool = False
    firm: bool = False
    raised: Verdict = Verdict.OK
    count: int = 1
    within: float = 0.0
    brings: Companions | None = None
    beside: tuple[str, Verdict] | None = None
    silent: Verdict = Verdict.OK
    linked: int | None = None
    repeats: bool = False
    whole_gpu: bool = False
    look: bool = False
    resets: bool = True

    def answered_by(self, driver_branch: int | None) -> bool:
        """Return True if the recovery action of this driver branch follows this Xid, so that no request is evidence.

        A branch of None is unknown.
        """
        return self.linked is not None and driver_branch is not None and driver_branch >= self.linked

    def advised(self, verdict: Verdict, proof: Proof) -> str:
        """Return advice to the operator for this verdict and proof, in a few words with `{gpu}` for the GPU."""
        if proof is Proof.RMA:
            return _VENDOR
        if proof not in _RECOVERIES:
            unknown = verdict is Verdict.DEGRADED and self.action in ("", "RESET_GPU")
            return _PASSING.get(self.action, _LOG if unknown else _NOTHING)
        if known := _RECOVERIES[proof].get(self.action):
            return known
        recovery = RESET if proof is Proof.RESET else REBOOT
        if self.action == "CONTACT_SUPPORT":
            return f"{recovery}; if it comes again, {_VENDOR}"
        if verdict is not Verdict.DEGRADED:
            return recovery
        if self.action == "IGNORE":
            return f"nothing at once, since work continues; {recovery}, which ends it"
        return f"{_LOG}; {recovery}"

    def proof(self, verdict: Verdict) -> Proof:
        """Return the proof that closes a latch of this verdict. Time alone closes no latch that is FATAL."""
        if verdict is Verdict.APP:
            return Proof.APPLICATION
        if verdict is Verdict.FATAL and self.recovery in (Proof.APPLICATION, Proof.QUIET):
            return Proof.RESET
        return Proof.QUIET if self.recovery is Proof.APPLICATION else self.recovery


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

    def judge(self, xid: int) -> Judgement:
        """Return the judgement of this Xid. An unknown Xid is DEGRADED, unless the driver requests a recovery."""
        return self._judged.get(xid) or self._judge(None, None)

    @cached_property
    def companions(self) -> frozenset[int]:
        """The Xids that change the verdict of another Xid."""
        return frozenset(xid for judged in self._judged.values() if judged.brings for xid in judged.brings.xids)

    @cached_property
    def accompanied(self) -> frozenset[str]:
        """The Xids, as values of `LatchKey.part`, whose verdict another Xid changes."""
        return frozenset(str(xid) for xid, judged in self._judged.items() if judged.brings)

    @cached_property
    def _judged(self) -> Mapping[int, Judgement]:
        named = {*self.table, *self.numbers, *self.disabled.numbers, *self.enabled.numbers, *self.critical}
        return {xid: self._judge(self.table.get(xid), self._by_number(xid)) for xid in named}

    def _judge(self, row: XidRow | None, named: Verdict | None) -> Judgement:
        asked = named if named is not None else self._by_word(Proof(row.recovery) if row else None)
        if row is None:
            return Judgement(Verdict.DEGRADED if asked is None else asked, Proof.RESET, firm=asked is not None)
        own = Judgement(
            VERDICTS[row.verdict] if asked is None else asked,
            Proof(row.recovery),
            row.name,
            row.action,
            listed=True,
            firm=asked is not None or row.always,
            whole_gpu=row.whole_gpu,
            look=row.look,
            linked=row.linked_since,
            resets=row.linked_since is not None or Proof(row.recovery) in _ENDED_BY_MORE,
            repeats=row.repeats and asked in (None, Verdict.APP),
        )
        return own if own.firm else _with_rules(own, row)

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


def _with_rules(own: Judgement, row: XidRow) -> Judgement:
    """Return a row's judgement with the rules that change its verdict."""
    beside = (row.beside.signal, VERDICTS[row.beside.verdict]) if row.beside else None
    own = replace(own, beside=beside, silent=VERDICTS[row.silent] if row.silent else Verdict.OK)
    if row.escalate:
        to = VERDICTS[row.escalate.to]
        return replace(own, raised=to, count=row.escalate.count, within=float(row.escalate.within))
    if row.brings:
        brings = Companions(frozenset(row.brings.xids), float(row.brings.within), row.brings.later)
        return replace(own, raised=VERDICTS[row.brings.verdict], brings=brings)
    return own


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
