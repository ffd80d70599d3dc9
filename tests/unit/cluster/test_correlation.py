"""The creation, counting, combination and dropping of Events, by the rules of client-go."""

from typing import Any

from gpu_plugin.cluster.correlation import (
    BURST,
    COMBINED,
    LONGEST_MESSAGE,
    MAX_KEPT,
    PER,
    SIMILAR,
    SIMILAR_WITHIN,
    Correlator,
    EventContent,
    Object,
)
from gpu_plugin.runtime.rates import TokenBucket

NODE = Object("Node", "node-a", uid="node-a")
POD = Object("Pod", "p", "ns", "uid-p")
T = 1_760_000_000.0


def correlator() -> Any:
    """Return a new correlator. `Any` spares the tests from checks for None."""
    return Correlator()


def news(message="m", reason="GPUUnhealthy", about=NODE, at=T):
    return EventContent(about, reason, message, warning=True, at=at)


def test_the_same_is_counted_in_one_event():
    of = correlator()
    first, second = of.judge(news(), 0), of.judge(news(at=T + 5), 5)
    assert (first.name, first.count) == (second.name, 1)
    assert second.changes() == {"count": 2, "lastTimestamp": "2025-10-09T08:53:25Z", "message": "m"}
    assert second.document("node-a", "node-a")["firstTimestamp"] == "2025-10-09T08:53:20Z"
    assert of.judge(news("another"), 6).count == 1


def test_news_of_one_moment_have_names_of_their_own():
    of = correlator()
    assert len({of.judge(news(str(number)), 0).name for number in range(5)}) == 5


def test_an_event_of_a_node_lies_in_default_and_one_of_a_pod_beside_it():
    node, pod = (correlator().judge(news(about=about), 0).document("node-a", about.uid) for about in (NODE, POD))
    assert node["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": "node-a"}
    assert node["metadata"]["namespace"] == "default"
    assert (pod["metadata"]["namespace"], pod["involvedObject"]["namespace"]) == ("ns", "ns")
    assert node["source"] == {"component": "gpu-plugin", "host": "node-a"}
    assert node["type"] == "Warning"


def test_different_messages_of_one_reason_are_put_together_from_the_tenth_on():
    of = correlator()
    told = [of.judge(news(f"Xid {number}"), number) for number in range(SIMILAR + 3)]
    assert len({each.name for each in told}) == SIMILAR
    assert [each.count for each in told[-4:]] == [1, 2, 3, 4]
    assert told[-1].news.message == f"{COMBINED}Xid {SIMILAR + 2}"
    later = of.judge(news("Xid 99"), SIMILAR + 3 + SIMILAR_WITHIN + 1)
    assert later.news.message == "Xid 99"


def test_one_object_has_a_burst_and_then_one_every_five_minutes():
    of = correlator()
    told = [of.judge(news(), 0) for _ in range(BURST + 10)]
    assert sum(each is not None for each in told) == BURST
    assert of.judge(news(about=POD), 0) is not None, "another object has its own"
    assert of.judge(news(), PER - 1) is None
    assert of.judge(news(), PER + 1).count == BURST + 12, "what was let go is counted"


def test_messages_and_names_are_bounded():
    told = correlator().judge(news("ü" * 5000, about=Object("Pod", "a" * 253, "ns")), 0)
    assert len(told.news.message.encode()) <= LONGEST_MESSAGE
    assert len(told.name) <= 253


def test_what_is_remembered_is_bounded():
    of = correlator()
    for number in range(3 * MAX_KEPT):
        of.judge(news(about=Object("Pod", f"p{number}", "ns")), number)
    assert max(map(len, (of._similar, of._records, of._buckets))) == MAX_KEPT


def test_a_bucket_fills_again_and_never_beyond_its_burst():
    bucket = TokenBucket(2, 10)
    assert [bucket.take(at) for at in (100, 100, 100, 109, 110, 111)] == [True, True, False, False, True, False]
    assert bucket.wait(115) == 5
    assert [bucket.take(10_000) for _ in range(3)] == [True, True, False]


def test_what_two_reasons_told_448_pods_is_remembered():
    of = correlator()
    steps = iter(range(0, 10**6, 20))
    abouts = [(Object("Pod", f"p{number}", "ns"), reason) for number in range(448) for reason in ("A", "B")]
    counts = [[of.judge(news(reason=reason, about=pod), next(steps)).count for pod, reason in abouts] for _ in range(2)]
    assert [set(each) for each in counts] == [{1}, {2}]
