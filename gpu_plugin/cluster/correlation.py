"""Which news become Kubernetes Events, which are counted in an older one, and which are let go. Pure.

The rules are those of client-go's EventCorrelator (tools/record/events_cache.go), by which the kubelet and the controllers
report, with its numbers: what is the same but for the message is put together from the tenth message within ten minutes on; the
same news again counts in the Event that there is; and one object gets 25 at once, then one every five minutes.
"""

from collections import OrderedDict
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from gpu_plugin.config.times import rfc3339
from gpu_plugin.runtime.rates import TokenBucket

# Different messages (defaultAggregateMaxEvents), and seconds that they are apart at most (defaultAggregateIntervalInSeconds).
SIMILAR = 10
SIMILAR_WITHIN = 600.0

# Events of one object at once, and seconds for each further one (defaultSpamBurst, defaultSpamQPS).
BURST = 25
PER = 300.0

# Events of all pods of the node at once, and seconds for each further one: 16 GPUs, each shared by 28 pods, are 448 pods.
PODS_BURST = 512
PODS_PER = 10.0

REMEMBERED = 4096
"""Events, and objects, that are remembered at most (maxLruCacheEntries); of more, those heard of longest ago are forgotten."""

LONGEST_MESSAGE = 1024
"""Bytes of an Event's message (API validation, core/v1)."""

LONGEST_NAME = 230
"""Characters of an object's name that an Event's name, which has 253 at most, begins with."""

COMBINED: Final = "(combined from similar events): "


class Object(msgspec.Struct, frozen=True):
    """What an Event is about (core/v1 ObjectReference). The namespace of a Node is empty."""

    kind: str
    name: str
    namespace: str = ""
    uid: str = ""


class EventContent(msgspec.Struct, frozen=True):
    """What is to be told of an object at Unix time `at`. `reason` is in CamelCase, `warning` whether somebody should act."""

    about: Object
    reason: str
    message: str
    warning: bool
    at: float


class EventRecord(msgspec.Struct, frozen=True):
    """An Event as it is to be written: created where `count` is 1, else changed. `first` is Unix time in seconds."""

    name: str
    news: EventContent
    count: int
    first: float

    def document(self, host: str, uid: str = "") -> dict[str, object]:
        """The whole Event (core/v1); `host` is the Node that reports, `uid` that of the object where the news do not say it."""
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
        """What differs from the Event that there is."""
        return {"count": self.count, "lastTimestamp": rfc3339(self.news.at), "message": self.news.message}

    @property
    def namespace(self) -> str:
        """Where it is written: Events about what has no namespace lie in `default`."""
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
    """Remembers what was told. `now` is a steady clock in seconds throughout."""

    def __init__(self) -> None:
        self.dropped = 0
        """Events that were dropped."""
        self._named = 0
        self._similar: OrderedDict[_Kind, _Similar] = OrderedDict()
        self._told: OrderedDict[_Key, EventRecord] = OrderedDict()
        self._buckets: OrderedDict[Object, TokenBucket] = OrderedDict()
        self._pods = TokenBucket(PODS_BURST, PODS_PER)

    def judge(self, news: EventContent, now: float) -> EventRecord | None:
        """The Event that is to be written for these news; None: none, since there were too many."""
        news = replace(news, message=_bounded(news.message))
        key, news = self._aggregated(news, now)
        known = self._told.pop(key, None)
        told = (
            replace(known, news=news, count=known.count + 1)
            if known
            else EventRecord(self._name(news), news, 1, news.at)
        )
        keep(self._told, key, told)
        bucket = self._buckets.pop(news.about, None) or TokenBucket(BURST, PER)
        keep(self._buckets, news.about, bucket)
        if not bucket.take(now) or (news.about.kind == "Pod" and not self._pods.take(now)):
            self.dropped += 1
            return None
        return told

    def forget(self, about: Object) -> None:
        """The object of this name is another one now: nothing was told of it."""
        for kind in [kind for kind in self._similar if kind[0] == about]:
            del self._similar[kind]
        for key in [key for key in self._told if key[0][0] == about]:
            del self._told[key]

    def _name(self, news: EventContent) -> str:
        """A name that no other Event has: the time, and a count for news of the same moment."""
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
    """Takes it in as the newest, and forgets the oldest of too many."""
    known[key] = value
    while len(known) > REMEMBERED:
        known.popitem(last=False)


def _bounded(message: str) -> str:
    content = message.encode()
    return (
        message if len(content) <= LONGEST_MESSAGE else content[: LONGEST_MESSAGE - 3].decode(errors="ignore") + "..."
    )
