"""Decides which reports become new Kubernetes Events, which increase the count of an earlier Event, and which are dropped. Pure.

The rules and numbers are the same as in client-go's EventCorrelator (tools/record/events_cache.go), which the kubelet and the
controllers use:

- A repeated report increases the count of its Event.
- From the tenth different message within ten minutes on, reports that differ only in the message are combined in one Event.
- One object gets 25 Events at once, then one every five minutes.
"""

from collections import OrderedDict
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from gpu_plugin.config.times import rfc3339
from gpu_plugin.runtime.rates import TokenBucket

# Different messages to combine, and the most seconds between two of them (defaultAggregateMaxEvents, ...IntervalInSeconds)
SIMILAR, SIMILAR_WITHIN = 10, 600.0

# Events of one object at once, and seconds for each further Event (defaultSpamBurst, defaultSpamQPS)
BURST, PER = 25, 300.0

# Events of all pods of the node at once, and seconds for each further Event: 16 GPUs, each shared by 28 pods, make 448 pods
PODS_BURST, PODS_PER = 512, 10.0

MAX_KEPT = 4096  # entries of each cache (maxLruCacheEntries); the entry that was used least recently is removed

LONGEST_MESSAGE = 1024  # bytes of an Event's message (API validation, core/v1)

LONGEST_NAME = 230  # characters of an object's name in its Events' names, which have at most 253

COMBINED: Final = "(combined from similar events): "


class Object(msgspec.Struct, frozen=True):
    """The object of an Event (core/v1 ObjectReference). The namespace of a Node is empty."""

    kind: str
    name: str
    namespace: str = ""
    uid: str = ""


class EventContent(msgspec.Struct, frozen=True):
    """A report about an object at Unix time `at`. `reason` is in CamelCase; `warning` is True if an operator should act."""

    about: Object
    reason: str
    message: str
    warning: bool
    at: float


class EventRecord(msgspec.Struct, frozen=True):
    """An Event to write: a new Event if `count` is 1, else a change. `first` is Unix time in seconds."""

    name: str
    news: EventContent
    count: int
    first: float

    def document(self, host: str, uid: str) -> dict[str, object]:
        """Return the whole Event (core/v1). `host` is the Node that reports, and `uid` is the object's."""
        about, by = self.news.about, "gpu-plugin"
        reference = {"apiVersion": "v1", "kind": about.kind, "name": about.name, "uid": uid}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "involvedObject": {**reference, **({"namespace": about.namespace} if about.namespace else {})},
            "type": "Warning" if self.news.warning else "Normal",
            "reason": self.news.reason,
            "source": {"component": by, "host": host},
            "reportingComponent": by,
            "reportingInstance": host,
            "firstTimestamp": rfc3339(self.first),
            **self.changes(),
        }

    def changes(self) -> dict[str, object]:
        """Return the fields that change in the existing Event."""
        return {"count": self.count, "lastTimestamp": rfc3339(self.news.at), "message": self.news.message}

    @property
    def namespace(self) -> str:
        """The namespace of the Event: `default` if the object has no namespace."""
        return self.news.about.namespace or "default"


K = TypeVar("K")
V = TypeVar("V")

_Kind = tuple[Object, str, bool]  # the object, the reason, and whether it is a warning
_Key = tuple[_Kind, str]  # the message, too; empty for combined messages


class _Similar(msgspec.Struct):
    """Recent messages of one kind, the oldest first, and the time of the newest message."""

    messages: dict[str, None] = {}
    last: float = 0.0


class Correlator:
    """Keeps the Events of earlier reports. `now` is in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._named = 0
        self._similar: OrderedDict[_Kind, _Similar] = OrderedDict()
        self._records: OrderedDict[_Key, EventRecord] = OrderedDict()
        self._buckets: OrderedDict[Object, TokenBucket] = OrderedDict()
        self._pods = TokenBucket(PODS_BURST, PODS_PER)

    def judge(self, news: EventContent, now: float) -> EventRecord | None:
        """Return the Event to write for this report; None if the rate limit drops it."""
        kind: _Kind = (news.about, news.reason, news.warning)
        key, message = self._aggregated(kind, _bounded(news.message), now)
        news = replace(news, message=message)
        known = self._records.pop(key, None)
        if known is None:
            self._named += 1  # makes the names of reports of one moment different
            name = f"{news.about.name[:LONGEST_NAME].rstrip('.-')}.{int(news.at * 1e9) + self._named:x}"
            known = EventRecord(name, news, 0, news.at)
        record = replace(known, news=news, count=known.count + 1)
        keep(self._records, key, record)
        bucket = self._buckets.pop(news.about, None) or TokenBucket(BURST, PER)
        keep(self._buckets, news.about, bucket)
        passes = bucket.take(now) and (news.about.kind != "Pod" or self._pods.take(now))
        return record if passes else None

    def reset(self, about: Object) -> None:
        """Remove the Events of an object that was recreated under the same name."""
        for kind in [kind for kind in self._similar if kind[0] == about]:
            del self._similar[kind]
        for key in [key for key in self._records if key[0][0] == about]:
            del self._records[key]

    def _aggregated(self, kind: _Kind, message: str, now: float) -> tuple[_Key, str]:
        similar = self._similar.pop(kind, None)
        if similar is None or now - similar.last > SIMILAR_WITHIN:
            similar = _Similar()
        similar.last = now
        similar.messages[message] = None
        keep(self._similar, kind, similar)
        if len(similar.messages) < SIMILAR:
            return (kind, message), message
        del similar.messages[next(iter(similar.messages))]
        return (kind, ""), _bounded(COMBINED + message)


def keep(known: OrderedDict[K, V], key: K, value: V) -> None:
    """Store a new entry at the end of `known`, and remove the oldest entries above MAX_KEPT."""
    known[key] = value
    while len(known) > MAX_KEPT:
        known.popitem(last=False)


def _bounded(message: str) -> str:
    content = message.encode()
    return (
        message if len(content) <= LONGEST_MESSAGE else content[: LONGEST_MESSAGE - 3].decode(errors="ignore") + "..."
    )
