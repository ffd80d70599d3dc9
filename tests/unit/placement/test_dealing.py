"""Many devices at a time are the same devices as one after the other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_plugin.placement.shared import POLICIES, Share, deal

BOUNDED = settings(max_examples=150, deadline=None)
EACH = pytest.mark.parametrize("policy", list(POLICIES.values()), ids=list(POLICIES))
NUMBERS = st.integers(0, 30)
SHARES = st.lists(
    st.builds(Share, NUMBERS | st.just(3), st.integers(0, 2), NUMBERS | st.just(3)), min_size=1, max_size=8
)


def one_by_one(shares, count, policy):
    """Each device from what ranks first just then, the first in the list of equals."""
    dealt = [0] * len(shares)
    for _ in range(count):
        place = min((at for at, share in enumerate(shares) if share.room), key=lambda at: policy.rank(shares[at]))
        shares[place].take(1)
        dealt[place] += 1
    return dealt


@EACH
@BOUNDED
@given(SHARES)
def test_a_policy_keeps_to_what_dealing_relies_on(policy, shares):
    for share in shares:
        before = policy.rank(share)
        assert len(before) == len(policy.looks_at), "looks_at says of each number of a rank what it is about"
        taken = replace(share)
        taken.take(1)
        step = -1 if policy.fills else 1
        assert policy.rank(taken)[0] - before[0] == step, f"a device taken changes the first number of a rank by {step}"
        unlike = [policy.rank(other) for other in shares if bool(other.picked) is not bool(share.picked)]
        assert before not in unlike, "what the container has and what it does not have never rank equal"


@EACH
@BOUNDED
@given(SHARES, st.data())
def test_dealing_is_taking_one_by_one_what_ranks_first(policy, shares, data):
    count = data.draw(st.integers(0, sum(share.room for share in shares)))
    again = [replace(share) for share in shares]
    assert deal(shares, count, policy) == one_by_one(again, count, policy)
    assert shares == again


@EACH
@BOUNDED
@given(SHARES, st.data())
def test_which_of_equals_is_asked_once_at_most_and_only_where_not_all_are_needed(policy, shares, data):
    count = data.draw(st.integers(0, sum(share.room for share in shares)))
    asked = []

    def last(equal, number):
        asked.append((equal, number, {policy.rank(shares[place]) for place in equal}))
        return equal[-number:]

    dealt = deal(shares, count, policy, last)
    assert sum(dealt) == count
    assert len(asked) <= 1
    for equal, number, ranks in asked:
        assert equal == sorted(equal)
        assert 0 < number <= len(equal)
        assert len(ranks) == 1
        assert all(dealt[place] for place in equal[-number:])


@EACH
def test_a_great_many_of_a_few_are_dealt_at_once(policy):
    counted = []

    def rank(share):
        counted.append(share)
        return policy.rank(share)

    dealt = deal([Share(0, 0, 10**9) for _ in range(8)], 4 * 10**9, replace(policy, rank=rank))
    assert sum(dealt) == 4 * 10**9
    assert len(counted) < 100
