import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_plugin.devices.node import Gpu, Link, Node
from gpu_plugin.placement.scores import SAME_NUMA_SCORE, Scores, scores


def pair(link: Link | None, one: int | None = 0, other: int | None = 1) -> int:
    """The score of two GPUs on these NUMA nodes."""
    gpus = (Gpu(uuid="GPU-a", index=0, numa_node=one), Gpu(uuid="GPU-b", index=1, numa_node=other))
    return scores(Node(gpus, {("GPU-a", "GPU-b"): link} if link else {})).of("GPU-a", "GPU-b")


@pytest.mark.parametrize(
    ("ancestor", "score"), [(0, 60), (10, 50), (20, 40), (30, 30), (40, 20), (50, 10), (99, 10), (-1, 60)]
)
def test_pcie_closeness_counts_as_in_nvidias_allocator(ancestor, score):
    assert pair(Link(0, ancestor)) == score


@pytest.mark.parametrize("nvlinks", range(19))
def test_each_nvlink_counts_a_hundred(nvlinks):
    assert pair(Link(nvlinks, 50)) == 10 + 100 * nvlinks


def test_a_pair_of_which_nothing_is_known_is_the_worst():
    assert pair(None) == pair(Link(0, 50)) == 10
    assert Scores().of("GPU-a", "GPU-b") == 0


@pytest.mark.parametrize(
    ("one", "other", "bonus"), [(0, 0, True), (1, 1, True), (0, 1, False), (None, None, False), (0, None, False)]
)
def test_one_numa_node_counts_less_than_a_step_of_pcie(one, other, bonus):
    assert pair(Link(), one, other) - pair(Link()) == (SAME_NUMA_SCORE if bonus else 0)
    assert 0 < SAME_NUMA_SCORE < 10


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(1, 8))
def test_a_pair_scores_the_same_from_both_ends_and_no_gpu_with_itself(data, count):
    uuids = [f"GPU-{at}" for at in range(count)]
    links = {
        (one, other): data.draw(st.builds(Link, st.integers(0, 18), st.sampled_from([0, 10, 20, 30, 40, 50])))
        for one in uuids
        for other in uuids
        if one < other
    }
    found = scores(Node(tuple(Gpu(uuid=uuid, index=at) for at, uuid in enumerate(uuids)), links))
    for one in uuids:
        assert found.of(one, one) == 0
        for other in uuids:
            assert found.of(one, other) == found.of(other, one)
            assert one == other or found.of(one, other) >= 10
