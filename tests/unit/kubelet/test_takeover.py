"""Whether the kubelet still has our devices, and what follows where it has not."""

import itertools

import pytest

from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.takeover import FIRST_PAUSE, NOBODY, OTHERS, Outcome, Takeovers, lost

GPU, MIG = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"
OURS = {GPU: frozenset({"GPU-0", "GPU-1"})}


@pytest.mark.parametrize(
    ("ours", "allocatable", "found"),
    [
        (OURS, OURS, {}),
        (OURS, {GPU: frozenset({"GPU-1"})}, {}),  # one has just turned Unhealthy
        (OURS, {GPU: frozenset({"GPU-1", "0"})}, {}),
        (OURS, {}, {GPU: NOBODY}),
        (OURS, {GPU: frozenset(), "example.com/nic": frozenset({"GPU-0"})}, {GPU: NOBODY}),
        (OURS, {GPU: frozenset({"0", "1"})}, {GPU: OTHERS}),
        ({GPU: frozenset()}, {}, {}),  # we have none to offer
        ({**OURS, MIG: frozenset({"MIG-0"})}, {GPU: frozenset({"0"})}, {GPU: OTHERS, MIG: NOBODY}),
    ],
)
def test_what_an_answer_means(ours, allocatable, found):
    assert lost(ours, allocatable) == found


def test_a_single_answer_has_no_consequences_and_a_second_one_has():
    takeovers = Takeovers()
    assert takeovers.judge(OURS, {}, 0) == Outcome()
    assert takeovers.judge(OURS, OURS, 3) == Outcome()
    assert takeovers.judge(OURS, {}, 6) == Outcome()
    assert takeovers.judge(OURS, {}, 9) == Outcome(again={GPU: NOBODY})


def test_where_registering_again_does_not_help_it_is_done_ever_more_rarely():
    takeovers = Takeovers()
    done = [now for now in range(0, 600, 3) if takeovers.judge(OURS, {}, now).again]
    assert done[0] == 3
    gaps = [after - before for before, after in itertools.pairwise(done)]
    assert gaps[0] == pytest.approx(FIRST_PAUSE, abs=4)
    assert all(after >= 1.9 * before for before, after in itertools.pairwise(gaps))
    takeovers.judge(OURS, OURS, 601)
    assert [bool(takeovers.judge(OURS, {}, now).again) for now in (604, 607)] == [False, True]


def test_what_another_plugin_has_is_left_to_it_until_it_is_gone():
    takeovers, theirs = Takeovers(), {GPU: frozenset({"0"})}
    takeovers.judge(OURS, theirs, 0)
    assert takeovers.judge(OURS, theirs, 3) == Outcome(taken={GPU: OTHERS})
    assert takeovers.taken == {GPU}
    assert takeovers.judge(OURS, theirs, 6) == Outcome()  # said once
    takeovers.judge(OURS, {}, 9)
    assert takeovers.judge(OURS, {}, 12) == Outcome(again={GPU: NOBODY})
    assert takeovers.taken == frozenset()


def test_what_comes_back_by_itself_is_said():
    takeovers, theirs = Takeovers(), {GPU: frozenset({"0"})}
    takeovers.judge(OURS, theirs, 0)
    takeovers.judge(OURS, theirs, 3)
    assert takeovers.judge(OURS, OURS, 6) == Outcome(back=frozenset({GPU}))
    assert takeovers.taken == frozenset()


def test_allocatable_devices_are_read_as_the_kubelet_writes_them():
    written = wire.encode_allocatable([(GPU, "GPU-0", (0, 1)), (GPU, "GPU-1", ()), (MIG, "MIG-0", (1,))])
    assert wire.decode_allocatable(written) == {**OURS, MIG: frozenset({"MIG-0"})}
    assert wire.decode_allocatable(b"") == {}
    with pytest.raises(ValueError, match="are left"):
        wire.decode_allocatable(b"\x0a\x50abc")
