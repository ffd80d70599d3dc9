"""Applications that keep failing on one GPU. The signal distinguishes a bad application from a bad GPU."""

import re
from typing import ClassVar, Self

from msgspec.structs import replace

from gpu_plugin.health.hysteresis import MINUTE, recent
from gpu_plugin.health.latch import RESET, Latch, Memory, Moment, Proof, Recovery, Verdict, merged
from gpu_plugin.health.observation import ApplicationError, Sample
from gpu_plugin.health.policy import describe
from gpu_plugin.health.proof import UNKNOWN, AsksNothing, after_recovery
from gpu_plugin.health.signal import Context, SignalKind, signal

NAME = "application-errors"

DEGRADED_AT = 5  # errors after which the signal is DEGRADED
WEDGED_AT = 10  # errors after which the GPU is suspected to be wedged
WITHIN = 600.0  # seconds in which the errors of either number happen
_MAX_ERRORS = 64  # stored errors
_MAX_NAMED_OWNERS = 3  # owners in a message

# Characters of generated names (k8s.io/apimachinery, util/rand): no vowels, and no characters that look like another
_RANDOM = "[bcdfghjklmnpqrstvwxz2456789]"

_GENERATED = re.compile(
    rf"""
    ^(?P<owner>.+?)
    (?:
        -{_RANDOM}{{7,10}}-{_RANDOM}{{5}}  # Deployment: its ReplicaSet's hash, a number of up to ten digits, and the pod's own
      | (?:-\d+)*-{_RANDOM}{{5}}          # Job; Indexed Job with the index; CronJob with the minute; JobSet with two indices
      | (?:-\d+)+                         # StatefulSet: the ordinal
    )$
    """,
    re.VERBOSE,
)

Owners = tuple[str, ...]  # Owners of the pods that held the GPU, in alphabetical order


class Errors(Memory, frozen=True):
    """The errors of the last ten minutes: `owned` with their owners, `unknown` without, each with its Unix time in seconds.

    `wedged` is True after so many errors that the GPU itself is suspected. `unasked` is the time, since the last error, for
    which the driver has requested nothing.
    """

    owned: tuple[tuple[Moment, Owners], ...] = ()
    unknown: tuple[Moment, ...] = ()
    wedged: bool = False
    unasked: AsksNothing = UNKNOWN

    unstored: ClassVar[tuple[str, ...]] = ("unasked",)

    @property
    def lasting(self) -> bool:
        """True if there were errors."""
        return bool(self.owned or self.unknown)

    @property
    def counted_closed(self) -> object:
        """The number of errors, and the time of the last one. It is rounded to minutes, so that a storm is stored seldom."""
        return len(self.owned), len(self.unknown), None if self.last is None else self.last // MINUTE

    counted = counted_closed  # the latch closes some time after the last error

    def joined(self, other: Self) -> Self:
        """Return the memory with the other's errors added."""
        return replace(
            self,
            owned=tuple(sorted({*self.owned, *other.owned}))[-_MAX_ERRORS:],
            unknown=merged(self.unknown, other.unknown),
        )

    @property
    def last(self) -> float | None:
        """The Unix time in seconds of the last error, None if there was no error."""
        return max((*self.unknown[-1:], *(at for at, _ in self.owned[-1:])), default=None)


def owner(pod: str) -> str:
    """Return the owner of a pod as namespace/name, derived from the pod's name; the pod itself if its name is not generated.

    Retries of a Job and replicas of a Deployment have one owner. A name is weaker evidence than an owner reference: pods that a
    user named like generated ones count as pods of one owner, so the signal blames an application rather than a GPU.
    """
    namespace, slash, name = pod.rpartition("/")
    found = _GENERATED.match(name)
    return f"{namespace}{slash}{found['owner'] if found else name}"


def until(latch: Latch[Errors]) -> float:
    """Return the Unix time in seconds at which the latch closes without another error."""
    last = latch.memory.last
    return (latch.since if last is None else last) + WITHIN


@signal(
    NAME,
    SignalKind.EVENT,
    f"see what the pods on it have in common, and whether they run elsewhere; if they do, {RESET}",
    memory=Errors(),
    sees=(Sample, ApplicationError),
    until=until,
    recovers=True,
)
def application_errors(
    latch: Latch[Errors] | None, seen: Sample | ApplicationError, ctx: Context
) -> Latch[Errors] | None:
    """DEGRADED after five errors within ten minutes that no single owner can have caused, or whose pods are unknown.

    An error while several pods hold the GPU may be of any of them. The latch closes after ten minutes without an error. An
    operator may configure the signal as FATAL. Then no pod runs and silence proves nothing, so the latch closes after a reset,
    or if the driver requests nothing for `PROVEN_SECONDS`.
    """
    if isinstance(seen, ApplicationError):
        judged = ctx.policy.xids.judge(seen.xid)
        return _gathered(latch, seen, ctx) if judged.repeats else latch
    if latch is None:
        return None
    if latch.verdict is Verdict.OK or not _unfit(ctx):
        latch = latch if latch.proof is not Proof.RESET else replace(latch, proof=Proof.APPLICATION)
        return None if seen.core_answered and ctx.now >= until(latch) else latch
    known = after_recovery(replace(latch, proof=Proof.RESET), seen, ctx)
    if known is None:
        return None
    if known.recovery.reset and not latch.recovery.reset:
        # Errors before a reset are no evidence about the GPU after it
        known = replace(known, memory=replace(known.memory, owned=(), unknown=()))
    unasked = known.memory.unasked.after(seen, ctx)
    if unasked.is_proven:
        return None
    known = replace(known, memory=replace(known.memory, unasked=unasked))
    return latch if known == latch else known


def _unfit(ctx: Context) -> bool:
    return ctx.policy.signals.get(NAME) is Verdict.FATAL


def _gathered(latch: Latch[Errors] | None, seen: ApplicationError, ctx: Context) -> Latch[Errors]:
    known = latch or Latch(Errors())
    owned = tuple((at, who) for at, who in known.memory.owned if ctx.now - at <= WITHIN)
    unknown = known.memory.unknown
    if seen.pods:
        owned = _with(owned, ctx.now, tuple(sorted({owner(pod) for pod in seen.pods})))
    else:
        unknown = (*unknown, ctx.now)
    unknown = recent(unknown, ctx.now, WITHIN, DEGRADED_AT)
    memory = replace(known.memory, owned=owned, unknown=unknown, unasked=UNKNOWN)
    xid, several = describe(seen.xid, ctx.policy.xids.judge(seen.xid).name), _several(owned)
    if not memory.wedged and len(owned) >= WEDGED_AT and several:
        words = f"suspected wedged GPU: {WEDGED_AT} application errors within 10 minutes, by {_names(owned)}; now {xid}"
        return _opened(known, replace(memory, wedged=True), words, ctx)
    if known.verdict is not Verdict.OK:
        return replace(known, memory=memory)
    by = ""
    if len(owned) >= DEGRADED_AT and several:
        by = f"by {_names(owned)}"
    elif len(unknown) >= DEGRADED_AT:
        by = "whose pods are unknown"
    if not by:
        return replace(known, memory=memory)
    return _opened(known, memory, f"{DEGRADED_AT} application errors within 10 minutes, {by}; now {xid}", ctx)


def _opened(known: Latch[Errors], memory: Errors, words: str, ctx: Context) -> Latch[Errors]:
    if known.verdict is not Verdict.OK:
        return replace(known, memory=memory, detail=words)
    proof = Proof.RESET if _unfit(ctx) else Proof.APPLICATION
    return Latch(memory, Verdict.DEGRADED, words, ctx.now, proof, Recovery(ctx.marks))


def _with(owned: tuple[tuple[float, Owners], ...], now: float, owners: Owners) -> tuple[tuple[float, Owners], ...]:
    """Return the errors with a new one: at most `WEDGED_AT` of each set of owners, and `_MAX_ERRORS` in all, the newest."""
    same = [entry for entry in owned if entry[1] == owners]
    others = tuple(entry for entry in owned if entry is not same[0]) if len(same) >= WEDGED_AT else owned
    return (*others, (now, owners))[-_MAX_ERRORS:]


def _several(owned: tuple[tuple[float, Owners], ...]) -> bool:
    """Return True if no owner's pods held the GPU at all of these errors."""
    return bool(owned) and not frozenset.intersection(*(frozenset(who) for _, who in owned))


def _names(owned: tuple[tuple[float, Owners], ...]) -> str:
    names = sorted({name for _, who in owned for name in who})
    more = f" and {len(names) - _MAX_NAMED_OWNERS} more" if len(names) > _MAX_NAMED_OWNERS else ""
    return f"pods of {', '.join(names[:_MAX_NAMED_OWNERS])}{more}"
