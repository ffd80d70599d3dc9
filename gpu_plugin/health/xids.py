"""The policy on Xids: the shipped table, with the operator's settings over it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from gpu_plugin.health.latch import Proof, Verdict
from gpu_plugin.health.xid_advice import advised
from gpu_plugin.health.xid_table import XidRow, XidTable

VERDICTS: Mapping[str, Verdict] = {
    "ignore": Verdict.OK,
    "app": Verdict.APP,
    "degraded": Verdict.DEGRADED,
    "fatal": Verdict.FATAL,
}
"""Verdicts by the words of the table and of the config file."""

_ENDED_BY_MORE = frozenset({Proof.RESET, Proof.REBOOT, Proof.RMA})


class Judgement(msgspec.Struct, frozen=True):
    """The policy on one Xid.

    `verdict` is OK for one that is only counted. `recovery` is the class of the proof that it is over. `name` is empty and
    `listed` False for one that the table does not have; `action` is the immediate action of NVIDIA's catalogue, or empty.
    `firm`: the verdict is the operator's own, or the table's for good, and nothing that the driver says changes it.

    `raised` is what it means where it happened `count` times `within` so many seconds, or (a consequence that came alone)
    where `follows` is not 0 and no other Xid came within so many seconds of it on a system with NVSwitches; or where one of
    the Xids that it `brings` came within so many seconds of it.
    `beside` is what it means while the signal of that name is open. `repeats`, `whole_gpu` and `look` are those of the table.
    `resets` is whether the driver may ask for a reset, or more, on its account.
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
    follows: float = 0.0
    brings: tuple[frozenset[int], float] | None = None
    beside: tuple[str, Verdict] | None = None
    repeats: bool = False
    whole_gpu: bool = False
    look: bool = False
    resets: bool = True

    def advised(self, verdict: Verdict, proof: Proof) -> str:
        """Advice to the operator once it came to this, in a few words in which `{gpu}` stands for the GPU."""
        return advised(self.action, verdict, proof)

    def proof(self, verdict: Verdict) -> Proof:
        """The proof that closes a latch of this verdict: what passes by itself proves nothing for a GPU that was unfit."""
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
    """Reads `all`, `xids` and numbers, separated by commas, in any case; what is none of these is in `malformed`."""
    items = [item.strip().lower() for item in text.split(",") if item.strip()]
    words = {"all", "xids"}
    numbers = frozenset(int(item) for item in items if item.isascii() and item.isdigit() and len(item) <= 20)
    malformed = tuple(i for i in items if i not in words and not (i.isascii() and i.isdigit() and len(i) <= 20))
    return XidList("all" in items, "xids" in items, numbers, malformed)


_NO_XIDS = XidList()


@dataclass(frozen=True)
class XidPolicy:
    """The shipped table with the operator's word laid over it. Without a table every Xid is one that it does not have.

    A number that is named wins over a class, a class over `all` and `xids`, and these over the table. Among numbers the
    environment wins over the file, and there `enabled` (DP_ENABLE_HEALTHCHECKS) and `critical` (XID_CONFIG) over `disabled`
    (DP_DISABLE_HEALTHCHECKS): `all` disabled with 79 enabled leaves 79 alone, `all` enabled with 13 disabled leaves out 13.
    `numbers` and `classes` are the file's verdicts by Xid and by recovery class.
    """

    table: XidTable = field(default_factory=dict, repr=False)
    disabled: XidList = _NO_XIDS
    enabled: XidList = _NO_XIDS
    critical: frozenset[int] = frozenset()
    numbers: Mapping[int, Verdict] = field(default_factory=dict)
    classes: Mapping[Proof, Verdict] = field(default_factory=dict)

    def judge(self, xid: int) -> Judgement:
        """The judgement of this Xid. One that nobody names is DEGRADED, unless the driver asks for more."""
        return self._judged.get(xid, self._unlisted)

    def heeded(self, xid: int) -> bool:
        """Whether another Xid means more or less where this one comes with it."""
        return xid in self._heeded

    @cached_property
    def swayed(self) -> frozenset[str]:
        """The Xids, as `LatchKey.part` has them, that mean more or less where another one comes with them."""
        return frozenset(str(xid) for xid, judged in self._judged.items() if judged.follows or judged.brings)

    def describe(self, xid: int) -> str:
        """An Xid with its name, such as `Xid 79 (GPU has fallen off the bus)`."""
        return describe(xid, self.judge(xid).name)

    @cached_property
    def _judged(self) -> Mapping[int, Judgement]:
        named = {*self.table, *self.numbers, *self.disabled.numbers, *self.enabled.numbers, *self.critical}
        return MappingProxyType({xid: self._judge(self.table.get(xid), self._by_number(xid)) for xid in named})

    @cached_property
    def _heeded(self) -> frozenset[int]:
        return frozenset(xid for judged in self._judged.values() if judged.brings for xid in judged.brings[0])

    @cached_property
    def _unlisted(self) -> Judgement:
        return self._judge(None, None)

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
            resets=row.resets or Proof(row.recovery) in _ENDED_BY_MORE,
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
    """An Xid with its name, if it has one."""
    return f"Xid {xid} ({name})" if name else f"Xid {xid}"


def _with_rules(own: Judgement, row: XidRow) -> Judgement:
    """A row's judgement with the rules by which it can come to mean more."""
    beside = (row.beside.signal, VERDICTS[row.beside.verdict]) if row.beside else None
    if row.escalate:
        to = VERDICTS[row.escalate.to]
        return replace(own, beside=beside, raised=to, count=row.escalate.count, within=row.escalate.seconds)
    if row.brings:
        brings = frozenset(row.brings.xids), row.brings.seconds
        return replace(own, beside=beside, raised=VERDICTS[row.brings.verdict], brings=brings)
    if row.follows:
        return replace(own, beside=beside, raised=VERDICTS[row.verdict_without_cause], follows=row.follows_seconds)
    return replace(own, beside=beside)
