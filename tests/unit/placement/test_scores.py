import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_plugin.devices.node import Gpu, Link
from gpu_plugin.placement.topology import pair_score


def pair(link: Link, one: int | None = None, other: int | None = None) -> int:
    """The score of two GPUs of these architectures."""
    return pair_score(
        Gpu(uuid="GPU-a", index=0, architecture=one), Gpu(uuid="GPU-b", index=1, architecture=other), link
    )


@pytest.mark.parametrize(
    ("ancestor", "score"), [(0, 60), (10, 50), (20, 40), (30, 30), (40, 20), (50, 10), (99, 10), (-1, 10)]
)
def test_pcie_closeness_counts_as_in_nvidias_allocator(ancestor, score):
    assert pair(Link(0, ancestor)) == score


@pytest.mark.parametrize("nvlinks", range(19))
def test_each_direct_nvlink_counts_a_hundred_whatever_its_generation(nvlinks):
    assert {pair(Link(nvlinks, 50), arch, arch) for arch in (None, 4, 5, 7, 9, 10, 99)} == {10 + 100 * nvlinks}


@pytest.mark.parametrize(
    ("architecture", "links", "gb_s"),
    [(5, 6, 150), (7, 12, 300), (9, 18, 450), (10, 18, 900)],  # V100, A100, H100, B200: one direction of a whole GPU
)
def test_through_switches_it_is_the_bandwidth_that_counts(architecture, links, gb_s):
    assert pair(Link(links, 50, switched=True), architecture, architecture) == 10 + 4 * gb_s


def test_the_slower_end_of_a_switched_pair_is_what_it_has():
    link = Link(18, 40, switched=True)
    assert pair(link, 10, 9) == pair(link, 9, 10) == pair(link, 9, 9) == pair(link, 10, None) < pair(link, 10, 10)


@given(st.integers(0, 36), st.sampled_from([0, 10, 20, 30, 40, 50]), st.booleans())
def test_a_link_more_or_a_nearer_ancestor_is_never_worse(nvlinks, ancestor, switched):
    link = Link(nvlinks, ancestor, switched)
    assert pair(Link(nvlinks + 1, ancestor, switched)) > pair(link) >= 10
    assert pair(Link(nvlinks + 1, 50, switched)) > pair(Link(nvlinks, 0, switched))
    if ancestor:
        assert pair(Link(nvlinks, ancestor - 10, switched)) == pair(link) + 10


def test_a_pair_of_which_nothing_is_known_is_the_worst():
    assert pair(Link()) == 10
