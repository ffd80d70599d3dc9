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

# Number of different messages to combine (defaultAggregateMaxEvents), and the most seconds between two of them
# (defaultAggregateIntervalInSeconds).
SIMILAR = 10
SIMILAR_WITHIN = 600.0

# Events of one object at once, and seconds for each further Event (defaultSpamBurst, defaultSpamQPS).
BURST = 25
PER = 300.0

# Events of all pods of the node at once, and seconds for each further Event: 16 GPUs, each shared by 28 pods, make 448 pods.
PODS_BURST = 512
PODS_PER = 10.0

MAX_KEPT = 4096
"""The maximum number of entries in each cache (maxLruCacheEntries). The entry that was used least recently is removed."""

LONGEST_MESSAGE = 1024
"""The maximum length of an Event's message in bytes (API validation, core/v1)."""

LONGEST_NAME = 230
"""The number of characters of an object's name in its Events' names, which have at most 253."""

COMBINED: Final = "(combined from similar events): "


class Object(msgspec.Struct, frozen=True):
    """The object that an Event is about (core/v1 ObjectReference). The namespace of a Node is empty."""

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

    def document(self, host: str, uid: str = "") -> dict[str, object]:
        """Return the whole Event (core/v1).

        `host` is the Node that reports. `uid` is the object's uid, if the report does not have it.
        """
        about, at = self.news.about, rfc3339(self.news.at)
        reference = {"apiVersion": "v1", "kind": about.kind, "name": about.name, "uid": about.uid or uid}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "involvedObject": {**reference, **({"namespace": about.namespace} if about.namespace else {})},
            "type": "Warning" if self.news.warning else "Normal",
            "reason": self.news.reason,
            "message": self.news.message,
            "source": {"component": SOURCE, "host": host},
            "reportingComponent": SOURCE,
            "reportingInstance": host,
            "firstTimestamp": rfc3339(self.first),
            "lastTimestamp": at,
            "count": self.count,
        }

    def changes(self) -> dict[str, object]:
        """Return the fields that change in the existing Event."""
        return {"count": self.count, "lastTimestamp": rfc3339(self.news.at), "message": self.news.message}

    @property
    def namespace(self) -> str:
        """The namespace of the Event: `default` if the object has no namespace."""
        return self.news.about.namespace or "default"


SOURCE: Final = "gpu-plugin"

K = TypeVar("K")
V = TypeVar("V")

_Kind = tuple[Object, str, bool]
_Key = tuple[_Kind, str]


class _Similar(msgspec.Struct):
    messages: OrderedDict[str, None] = msgspec.field(default_factory=OrderedDict)
    last: float = 0.0


class Correlator:
    """Keeps the Events of earlier reports. `now` is in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self.dropped = 0
        """The number of Events that were dropped."""
        self._named = 0
        self._similar: OrderedDict[_Kind, _Similar] = OrderedDict()
        self._records: OrderedDict[_Key, EventRecord] = OrderedDict()
        self._buckets: OrderedDict[Object, TokenBucket] = OrderedDict()
        self._pods = TokenBucket(PODS_BURST, PODS_PER)

    def judge(self, news: EventContent, now: float) -> EventRecord | None:
        """Return the Event to write for this report; None if the rate limit drops it."""
        news = replace(news, message=_bounded(news.message))
        key, news = self._aggregated(news, now)
        known = self._records.pop(key, None)
        record = (
            replace(known, news=news, count=known.count + 1)
            if known
            else EventRecord(self._name(news), news, 1, news.at)
        )
        keep(self._records, key, record)
        bucket = self._buckets.pop(news.about, None) or TokenBucket(BURST, PER)
        keep(self._buckets, news.about, bucket)
        if not bucket.take(now) or (news.about.kind == "Pod" and not self._pods.take(now)):
            self.dropped += 1
            return None
        return record

    def reset(self, about: Object) -> None:
        """Remove the Events of an object that was recreated under the same name."""
        for kind in [kind for kind in self._similar if kind[0] == about]:
            del self._similar[kind]
        for key in [key for key in self._records if key[0][0] == about]:
            del self._records[key]

    def _name(self, news: EventContent) -> str:
        """Return a unique Event name, made of the time and a counter for reports of the same moment."""
        self._named += 1
        return f"{news.about.name[:LONGEST_NAME].rstrip('.-')}.{int(news.at * 1e9) + self._named:x}"

    def _aggregated(self, news: EventContent, now: float) -> tuple[_Key, EventContent]:
        kind: _Kind = (news.about, news.reason, news.warning)
        similar = self._similar.pop(kind, None)
        if similar is None or now - similar.last > SIMILAR_WITHIN:
            similar = _Similar()
        similar.last = now
        similar.messages[news.message] = None
        keep(self._similar, kind, similar)
        if len(similar.messages) < SIMILAR:
            return (kind, news.message), news
        similar.messages.popitem(last=False)
        return (kind, ""), replace(news, message=_bounded(COMBINED + news.message))


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
