"""The table of Xids that ships with the package: its rows, read strictly from the JSON that is made of `xids.yaml`."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from gpu_plugin.config.values import duration

Action = Literal[
    "",
    "CHECK_MECHANICALS",
    "CHECK_UVM",
    "CONTACT_SUPPORT",
    "IGNORE",
    "RESET_GPU",
    "RESTART_APP",
    "RESTART_BM",
    "RESTART_VM",
    "UPDATE_SWFW",
    "WORKFLOW_NVLINK5_ERR",
    "WORKFLOW_NVLINK_ERR",
    "WORKFLOW_XID_45",
    "WORKFLOW_XID_48",
    "XID_154",
]
"""Immediate actions of NVIDIA's catalogue of Xid errors; empty where it has none."""

Link = Literal["never", "always", "R565", "R570", "R575"]
"""Whether, and from which driver branch on, the driver's recovery action follows an Xid."""

_seconds = duration(1, 30 * 86400)


class Seconds(float):
    """A time that the table has as text, such as 24h, in seconds."""


class Escalation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule: so many of an Xid on one GPU `within` a time mean more."""

    to: Literal["degraded", "fatal"]
    count: int
    within: Seconds

    def __post_init__(self) -> None:
        if not 2 <= self.count <= 64:
            raise ValueError(f"count {self.count} is not between 2 and 64")


class WhileSignalOpen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule: the verdict of an Xid while a signal of this name is open."""

    signal: str
    verdict: Literal["degraded", "fatal"]


class WithOtherXid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule: the verdict of an Xid where one of these `xids` comes `within` a time of it; with `later` only after it."""

    xids: tuple[int, ...]
    verdict: Literal["degraded", "fatal"]
    within: Seconds
    later: bool = False

    def __post_init__(self) -> None:
        if not self.xids:
            raise ValueError("there are no xids")


class XidRow(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"beside": "with"},
):
    """A row of the table; the head of `xids.yaml` says what each of its words means."""

    codes: tuple[int | str, ...]
    name: str
    verdict: Literal["ignore", "app", "degraded", "fatal"]
    recovery: Literal["application", "quiet", "reset", "reboot", "rma"]
    linked: Link
    action: Action = ""
    note: str = ""
    source: str = ""
    escalate: Escalation | None = None
    beside: WhileSignalOpen | None = None
    brings: WithOtherXid | None = None
    silent: Literal["", "degraded", "fatal"] = ""
    repeats: bool = False
    whole_gpu: bool = False
    always: bool = False
    look: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("the name is empty")
        if self.escalate and self.brings:
            raise ValueError("escalate and brings exclude each other")
        if self.repeats and self.verdict == "fatal":
            raise ValueError("repeats is for errors of applications, and a fatal one is not theirs")
        if not self.numbers:
            raise ValueError("there are no codes")

    @property
    def linked_since(self) -> int | None:
        """The first driver branch whose recovery action follows it, 0 for all branches, None for none."""
        if self.linked.startswith("R"):
            return int(self.linked[1:])
        return 0 if self.linked == "always" else None

    @property
    def numbers(self) -> tuple[int, ...]:
        """The Xids it is about, ranges written out."""
        return tuple(number for code in self.codes for number in _numbers(code))


XidTable = Mapping[int, XidRow]
"""Rows by Xid."""


def xid_table(content: object) -> XidTable:
    """The table of a parsed file: a list of rows.

    Raises:
        ValueError: a row that cannot be, or an Xid that two rows are about; with the place in the file.
    """
    if not isinstance(content, list):
        raise ValueError("the table is not a list of rows")
    found: dict[int, XidRow] = {}
    for at, each in enumerate(content):
        try:
            row = msgspec.convert(each, XidRow, dec_hook=lambda _, text: Seconds(_seconds(text)))
        except msgspec.ValidationError as error:
            raise ValueError(f"row {at}: {error}") from None
        for number in row.numbers:
            if number in found:
                raise ValueError(f"Xid {number} appears in two rows, {found[number].name!r} and {row.name!r}")
            found[number] = row
    return found


def _numbers(code: int | str) -> range:
    first, _, last = (code if isinstance(code, str) else f"{code}").partition("-")
    if not (first.isascii() and first.isdigit() and (not last or (last.isascii() and last.isdigit()))):
        raise ValueError(f"{code!r} is neither an Xid nor a range of them such as 39-41")
    numbers = range(int(first), int(last or first) + 1)
    if not numbers or len(numbers) > 1000:
        raise ValueError(f"{code!r} is not a range of Xids")
    return numbers
