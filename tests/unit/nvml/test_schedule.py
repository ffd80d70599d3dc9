"""Whose turn it is, by a clock that the test turns."""

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpu_plugin.nvml.schedule import EVENT_GAP, UNKNOWN_GPU, Schedule, Turn

EVERYONE = Turn(whole=True, full=None)


def polled(at=100.0):
    made = Schedule()
    assert made.take(0.0) == Turn(whole=True, full=frozenset())
    made.poll_at(at)
    return made


def test_a_poll_looks_at_all_gpus_and_includes_full_looks_that_are_due():
    made = polled()
    made.one("a", 150.0)
    assert made.next() == 100.0
    assert made.take(99.0) == Turn(whole=False, full=frozenset())
    assert made.take(100.0) == Turn(whole=True, full=frozenset("a"))
    made.poll_at(200.0)
    assert made.next() == 200.0, "what was due of one is done with everyone's"


def test_a_request_for_all_gpus_is_one_full_turn():
    made = polled()
    made.everyone(-math.inf)
    made.one("a", 50.0)
    assert made.take(1.0) == EVERYONE
    assert made.next() == 100.0


def test_a_request_for_one_gpu_looks_at_that_gpu():
    made = polled()
    made.one("a", 2.0)
    made.one("a", 5.0)
    made.one("b", 3.0)
    assert made.next() == 2.0
    assert made.take(2.0) == Turn(whole=False, full=frozenset("a"))
    assert made.take(3.0) == Turn(whole=False, full=frozenset("b"))


def test_the_first_event_causes_a_look_at_once_and_later_events_one_a_second():
    made, looks = polled(1e9), []
    for tenth in range(100):
        now = 1.0 + tenth / 10
        made.event_arrived("a", now)
        assert made.expects("a")
        assert not made.expects("b")
        if made.next() <= now:
            assert made.take(now) == Turn(whole=False, full=frozenset("a"))
            looks.append(now)
    assert looks[0] == 1.0
    assert len(looks) == 10
    assert all(later - earlier >= EVENT_GAP for earlier, later in pairwise(looks))


def test_events_of_unknown_gpus_cause_a_look_at_all_gpus_once_a_second():
    made = polled()
    made.event_arrived(UNKNOWN_GPU, 1.0)
    assert made.take(1.0) == EVERYONE
    made.event_arrived(UNKNOWN_GPU, 1.1)
    assert made.next() == 1.0 + EVENT_GAP
    assert made.take(1.5) == Turn(whole=False, full=frozenset())
    assert made.take(2.0) == EVERYONE


@given(
    st.lists(
        st.tuples(st.sampled_from(["event", "soon", "everyone", "turn"]), st.sampled_from("ab"), st.floats(0.0, 3.0)),
        max_size=60,
    )
)
def test_requests_are_done_in_time_and_only_for_their_gpu(steps):
    made, now = polled(1e9), 0.0
    owed: dict[str, float] = {}
    for kind, uuid, passed in steps:
        now += passed
        if kind == "event":
            made.event_arrived(uuid, now)
            owed[uuid] = min(owed.get(uuid, math.inf), now + EVENT_GAP)
        elif kind == "soon":
            made.one(uuid, now + 1.0)
            owed[uuid] = min(owed.get(uuid, math.inf), now + 1.0)
        elif kind == "everyone":
            made.everyone(now)
            owed["everyone"] = now
        if kind == "turn" or made.next() <= now:
            turn = made.take(now)
            if turn.full is None:
                owed.clear()
            else:
                assert "everyone" not in owed
                assert all(each in owed for each in turn.full), "nobody is looked at on another's account"
                for each in turn.full:
                    del owed[each]
        assert all(made.next() <= due for due in owed.values())
