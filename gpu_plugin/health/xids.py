"""Which Xids are a fault of the GPU, and what the operator says against it."""

from dataclasses import dataclass

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Xids that NVIDIA's plugin ignores as an application's doing (internal/rm/health.go, v0.20.0)."""

# NVIDIA's catalogue of Xid errors, in few words: for people who read our reasons. Unlisted ones have no words here.
_WORDS = {
    13: "graphics engine exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "preemptive cleanup after an earlier error",
    46: "GPU timeout",
    48: "double-bit ECC error",
    54: "auxiliary power missing",
    61: "microcontroller breakpoint",
    62: "microcontroller halt",
    63: "row remapping or page retirement recorded",
    64: "row remapping or page retirement failed",
    68: "video processor exception",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high single-bit ECC error rate",
    94: "contained ECC error",
    95: "uncontained ECC error",
    109: "context switch timeout",
    119: "GSP RPC timeout",
    120: "GSP error",
    140: "unrecovered ECC error",
    143: "GPU initialisation error",
    149: "NVLink link event",
    154: "GPU recovery action changed",
}


def describe(xid: int) -> str:
    """An Xid with its words, such as `Xid 79 (GPU has fallen off the bus)`."""
    words = _WORDS.get(xid)
    return f"Xid {xid} ({words})" if words else f"Xid {xid}"


@dataclass(frozen=True, slots=True)
class XidList:
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


@dataclass(frozen=True, slots=True)
class XidPolicy:
    """The built-in list with the operator's two lists laid over it.

    A number that is named wins over `all` and `xids`, and enabling wins over disabling: `all` disabled with 79 enabled
    leaves 79 alone, `all` enabled with 13 disabled leaves out 13.
    """

    disabled: XidList = XidList()
    enabled: XidList = XidList()

    def fatal(self, xid: int) -> bool:
        """Whether this Xid makes its GPU unfit for use."""
        if xid in self.enabled.numbers:
            return True
        if xid in self.disabled.numbers:
            return False
        if self.enabled.every or self.enabled.xids:
            return True
        if self.disabled.every or self.disabled.xids:
            return False
        return xid not in APPLICATION_XIDS

    @property
    def watch_temperature(self) -> bool:
        """Whether heat counts: not where `all` health checks are disabled."""
        return not self.disabled.every or self.enabled.every
