"""Devices are dealt by the rule of their policy, however many are dealt at a time."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_plugin.placement.shared import POLICIES, Share, deal

BOUNDED = settings(max_examples=150, deadline=None)
EACH = pytest.mark.parametrize("policy", list(POLICIES.values()), ids=list(POLICIES))
FEWEST = {name: policy for name, policy in POLICIES.items() if policy.fewest}
MOST = {name: policy for name, policy in POLICIES.items() if not policy.fewest}
NUMBERS = st.integers(0, 30)
SHARES = st.lists(
    st.builds(Share, NUMBERS | st.just(3), st.integers(0, 2), NUMBERS | st.just(3)), min_size=1, max_size=8
)


def one_by_one(shares, count, policy):
    """Each device comes from the share that ranks first at that time, and of equals from the first in the list."""
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
        if policy.fewest:
            assert {other.room for other in shares if policy.rank(other) == before} == {share.room}
        else:
            assert policy.rank(taken)[0] - before[0] == 1, "a device taken raises the first number of a rank by 1"
        unlike = [policy.rank(other) for other in shares if bool(other.picked) is not bool(share.picked)]
        assert before not in unlike, "what the container has and what it does not have never rank equal"


@pytest.mark.parametrize("policy", list(FEWEST.values()), ids=list(FEWEST))
@settings(max_examples=500, deadline=None)
@given(SHARES, st.data())
def test_devices_come_from_the_fewest_shares_and_of_these_sets_from_the_one_that_ranks_lowest(policy, shares, data):
    count = data.draw(st.integers(0, sum(share.room for share in shares)))
    before, ranks = [replace(share) for share in shares], [policy.rank(share) for share in shares]
    dealt = deal(shares, count, policy)
    assert sum(dealt) == count
    assert [share.room for share in shares] == [
        share.room - number for share, number in zip(before, dealt, strict=True)
    ]
    new = [at for at, share in enumerate(before) if not share.picked and share.room]
    missing = count - sum(share.room for share in before if share.picked)
    used = [at for at in new if dealt[at]]
    if missing <= 0:
        assert not used
        return
    assert all(dealt[at] == share.room for at, share in enumerate(before) if share.picked)
    sets = (
        [chosen for chosen in combinations(new, size) if sum(before[at].room for at in chosen) >= missing]
        for size in range(len(new) + 1)
    )
    fewest = next(filter(None, sets))
    assert len(used) == len(fewest[0])
    assert sorted(ranks[at] for at in used) == min(sorted(ranks[at] for at in chosen) for chosen in fewest)
    assert len([at for at in used if shares[at].room]) <= 1, "one share at most is not filled"


@pytest.mark.parametrize("policy", list(MOST.values()), ids=list(MOST))
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
def test_which_of_equals_is_asked_rarely_and_only_where_not_all_are_needed(policy, shares, data):
    count = data.draw(st.integers(0, sum(share.room for share in shares)))
    asked = []

    def last(equal, number, _):
        asked.append((equal, number, {policy.rank(shares[place]) for place in equal}))
        return equal[-number:]

    dealt = deal(shares, count, policy, last)
    assert sum(dealt) == count
    assert len(asked) <= (len({min(ranks) for _, _, ranks in asked}) if policy.fewest else 1)
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
