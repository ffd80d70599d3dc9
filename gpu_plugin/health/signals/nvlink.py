"""NVLinks of a GPU that went down."""

from collections.abc import Sequence
from typing import ClassVar, Self

from msgspec.structs import replace

from gpu_plugin.health.latch import CLEAN_SAMPLES, RESET, Count, Latch, Memory, Moment, Verdict
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.signal import Context, SignalKind, signal

# Seconds after which a link makes the GPU unfit if it is down at every look.
# NVIDIA's Health Validation calls any inactive link of an A100, H100, GB200 or GB300 critical, and drains and resets
# the GPU (https://docs.nvidia.com/health-validation/reference/checks/nvlink). Links of a GPU whose peer is reset are
# down for less.
STAYS_DOWN = 300.0


class Links(Memory, frozen=True):
    """Masks of links: `up` has the links that were ever up, `down` the links that were down at the last look.

    `named` has the links that the detail names as down. `row` is the number of looks in a row with all links up. `down_since`
    is the Unix time in seconds since which every look found a link down.
    """

    up: Count = 0
    down: Count = 0
    named: Count = 0
    row: Count = 0
    down_since: Moment | None = None

    unstored: ClassVar[tuple[str, ...]] = ("row",)

    @property
    def gathering(self) -> bool:
        """True if the next look may decide that links are down, or up again."""
        return self.row > 0 or self.down & ~self.named != 0

    @property
    def lasting(self) -> bool:
        """True if a link was ever up."""
        return bool(self.up)

    @property
    def counted_closed(self) -> object:
        """The links that were ever up, and the links that are down."""
        return self.up, self.down

    counted = counted_closed  # more links may go down

    def after_boot(self) -> Self:
        """Return the memory without the time before the boot."""
        return self.without(("row", "down_since"))


@signal(
    "nvlink",
    SignalKind.READING,
    RESET,
    memory=Links(),
    asks=("nvlinks",),
    clears="three checks in a row find every link up that was up before",
)
def nvlink(latch: Latch[Links] | None, seen: Sample, ctx: Context) -> Latch[Links] | None:
    """DEGRADED if a link that was up is down at two looks in a row, FATAL if links stay down for `STAYS_DOWN`.

    Closes after three looks in a row with all formerly active links up. Other links are ignored. A GPU in MIG mode does not use
    its links (NVIDIA's MIG user guide: no peer-to-peer). They may be powered down then, so the latch is dropped.
    """
    if ctx.facts.mig:
        return None
    if seen.nvlinks is None:
        memory = replace(latch.memory, down=latch.memory.named, row=0) if latch is not None else None
        return latch if latch is None or memory is None or memory == latch.memory else replace(latch, memory=memory)
    known = latch.memory if latch is not None else Links()
    now = _mask(seen.nvlinks)
    up = known.up | now
    down = up & ~now
    twice = down & known.down
    since = None if not down else ctx.now if known.down_since is None else known.down_since
    if latch is None or latch.verdict is Verdict.OK:
        if twice:
            return Latch(Links(up, down, twice, 0, since), Verdict.DEGRADED, _words(twice), ctx.now)
        memory = Links(up, down, down_since=since)
        return latch if latch is not None and memory == known else Latch(memory) if up else None
    if not down and known.row + 1 >= CLEAN_SAMPLES:
        return Latch(Links(up))
    named = known.named | twice
    stays = since is not None and ctx.now - since >= STAYS_DOWN
    verdict = Verdict.FATAL if stays else latch.verdict
    memory = Links(up, down, named, 0 if down else known.row + 1, since)
    if named != known.named or verdict is not latch.verdict:
        words = f"{_words(named)} and stays down" if verdict is Verdict.FATAL else _words(named)
        return latch.renewed(memory, verdict=verdict, detail=words)
    return latch if memory == known else replace(latch, memory=memory)


def _mask(links: Sequence[bool]) -> int:
    return sum(1 << at for at, up in enumerate(links) if up)


def _words(links: int) -> str:
    numbers = [str(at) for at in range(links.bit_length()) if links >> at & 1]
    if len(numbers) == 1:
        return f"NVLink {numbers[0]} went down"
    return f"NVLinks {', '.join(numbers[:-1])} and {numbers[-1]} went down"
