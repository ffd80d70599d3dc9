"""Devices that were given to containers, until the kubelet confirms them."""

import sys
import threading
import time
from math import inf

import pytest

from gpu_plugin.devices.recent_allocations import ENTERED, RecentAllocations

KEY = ("nvidia.com/gpu", "GPU-a")
OTHER = ("nvidia.com/gpu", "GPU-b")
LISTED = frozenset({KEY})
NOTHING: frozenset[tuple[str, str]] = frozenset()


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        pytest.param([], False, id="nobody said anything"),
        pytest.param([(LISTED, 1, 11)], True, id="PodResources lists it"),
        pytest.param([(LISTED, 1, 10)], False, id="it did so before: another pod had it"),
        pytest.param([(NOTHING, 1, 11), (NOTHING, 1, 99)], False, id="the checkpoint stays as it was"),
        pytest.param([(NOTHING, 1, 11), (NOTHING, 2, 12)], True, id="the checkpoint was written"),
        pytest.param([(NOTHING, 1, 9), (NOTHING, 2, 11)], False, id="it may have been before"),
        pytest.param([(NOTHING, 1, 10 + ENTERED / 2), (NOTHING, 2, 12)], False, id="the kubelet may not have had it"),
        pytest.param([(NOTHING, 1, 11), (NOTHING, None, 12)], False, id="the checkpoint went"),
        pytest.param([(NOTHING, 1, 11), (NOTHING, None, 12), (NOTHING, 2, 13)], True, id="and came back written"),
    ],
)
def test_it_is_noted_until_the_kubelet_has_said_so(seen, said):
    given = RecentAllocations()
    given.note(KEY[0], [KEY[1]], 10)
    for listed, writing, asked in seen:
        given.seen(listed, writing, asked)
    assert given.unconfirmed([KEY, OTHER]) == (NOTHING if said else {KEY})


def test_what_is_given_again_begins_anew():
    given = RecentAllocations()
    given.note(KEY[0], [KEY[1]], 10)
    given.seen(NOTHING, 1, 11)
    given.note(KEY[0], [KEY[1]], 11.5)
    given.seen(NOTHING, 2, 13)
    assert given.unconfirmed([KEY]) == {KEY}
    given.seen(NOTHING, 3, 14)
    assert given.unconfirmed([KEY]) == NOTHING


def test_when_the_next_question_tells_more_is_known():
    given = RecentAllocations()
    given.note(KEY[0], [KEY[1]], 10)
    given.note(OTHER[0], [OTHER[1]], 12)
    both = [KEY, OTHER]
    assert (given.worth_asking(both), given.begun(both)) == (10 + ENTERED, NOTHING)
    given.seen(NOTHING, None, 11)
    assert (given.worth_asking(both), given.begun(both)) == (10 + ENTERED, NOTHING), "the checkpoint was not read"
    given.seen(NOTHING, 1, 11)
    assert (given.worth_asking(both), given.begun(both)) == (12 + ENTERED, LISTED)
    assert (given.worth_asking([KEY]), given.begun([OTHER])) == (inf, NOTHING)
    given.note(KEY[0], [KEY[1]], 14)
    assert (given.worth_asking([KEY]), given.begun(both)) == (14 + ENTERED, NOTHING), "it was given again"
    given.seen(NOTHING, 1, 15)
    given.seen(NOTHING, 2, 16)
    assert (given.worth_asking(both), given.begun(both)) == (inf, NOTHING), "the kubelet has said so"


def test_the_work_for_an_answer_of_the_kubelet_is_linear():
    """50,000 allocations of a device each, then all of them confirmed: quadratic work would take minutes."""
    given = RecentAllocations()
    keys = [("nvidia.com/gpu", f"GPU-{at}") for at in range(50_000)]
    for now, (resource, identifier) in enumerate(keys):
        given.note(resource, [identifier], now)
    began = time.monotonic()
    assert len(given.unconfirmed(keys)) == len(keys)
    given.seen(frozenset(keys[::2]), 1, 100_000)
    assert given.begun(keys) == {*keys[1::2]}
    given.seen(NOTHING, 2, 100_001)
    assert given.unconfirmed(keys) == NOTHING
    assert time.monotonic() - began < 10


def test_an_allocation_on_a_thread_is_not_lost_while_others_are_confirmed():
    given = RecentAllocations()
    keys = [("nvidia.com/gpu", f"GPU-{at}") for at in range(3_000)]

    def note() -> None:
        for resource, identifier in keys:
            given.note(resource, [identifier], 10)

    noting = threading.Thread(target=note)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        noting.start()
        while noting.is_alive():
            given.seen(LISTED, None, 1)
        noting.join()
    finally:
        sys.setswitchinterval(before)
    assert given.unconfirmed(keys) == {*keys}
