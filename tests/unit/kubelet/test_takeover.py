"""Whether the kubelet still has our devices, and what follows where it has not."""

import itertools
from pathlib import Path

import pytest

from gpu_plugin.access.container import Access
from gpu_plugin.devices.device import Device, Resource
from gpu_plugin.kubelet import pod_resources, wire
from gpu_plugin.kubelet.pod_listing import decode_allocatable
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.kubelet.takeover import FIRST_PAUSE, NOBODY, OTHERS, Outcome, Takeovers, TakeoverWatch, lost
from gpu_plugin.placement.prepared import Placement
from gpu_plugin.snapshot import ResourceView, SnapshotStore

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


UNFIT = {GPU: frozenset({"GPU-1"})}
FIT = {GPU: frozenset({"GPU-0"})}


def test_another_plugin_that_uses_our_ids_is_told_by_what_it_takes_for_healthy():
    takeovers = Takeovers()
    assert takeovers.judge(FIT, OURS, 0, UNFIT) == Outcome(), "our list may not have arrived"
    assert takeovers.judge(FIT, OURS, 3, UNFIT) == Outcome(taken={GPU: OTHERS})
    assert takeovers.judge(FIT, FIT, 6, UNFIT) == Outcome(back=frozenset({GPU}))
    nothing = {GPU: frozenset[str]()}
    assert lost(nothing, OURS, UNFIT) == {GPU: OTHERS}
    assert lost(nothing, {}, UNFIT) == {}


def test_without_a_healthy_device_of_ours_nothing_says_that_another_plugin_is_gone():
    takeovers, theirs, nothing = Takeovers(), {GPU: frozenset({"0"})}, {GPU: frozenset[str]()}
    for now in (0, 3):
        takeovers.judge(OURS, theirs, now)
    for now, answer in ((6, theirs), (9, {}), (12, theirs)):
        assert takeovers.judge(nothing, answer, now) == Outcome()
        assert takeovers.taken == {GPU}
    assert takeovers.judge(OURS, OURS, 15) == Outcome(back=frozenset({GPU}))


async def ask_while(monkeypatch, change, first, then, answer):
    """What becomes of a resource that has these devices (healthy ones by True) before a question and after it, twice."""
    store, registrations = SnapshotStore(), Registrations(clock=lambda: 0.0)

    def publish(devices):
        made = (Device(name, name, name, "0", reason="" if fit else "sick") for name, fit in devices.items())
        store.publish({GPU: ResourceView.of(Resource(GPU, tuple(made)), Access(), Placement())})

    async def allocatable(_socket, _patience):
        if change:
            publish(then)
        return answer

    monkeypatch.setattr(pod_resources, "allocatable", allocatable)
    registrations.taken(GPU)
    watch = TakeoverWatch(store, registrations, lambda: Path("/none"), lambda: None)
    for _ in range(2):
        publish(first)
        await watch.ask()
    return registrations.of(GPU).why


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("first", "then", "answer", "why"),
    [
        pytest.param({"a": False, "b": False}, {"a": True, "b": False}, {GPU: frozenset({"0"})}, "", id="a is new"),
        pytest.param({"a": True, "b": True}, {"a": False, "b": True}, {GPU: frozenset({"a", "b"})}, "", id="a is sick"),
        pytest.param(
            {"a": False, "b": True}, {"a": False, "b": True}, {GPU: frozenset({"a"})}, OTHERS, id="a was sick"
        ),
    ],
)
async def test_only_what_was_so_before_the_question_and_after_it_counts(monkeypatch, first, then, answer, why):
    assert await ask_while(monkeypatch, first != then, first, then, answer) == why


def test_what_comes_back_by_itself_is_said():
    takeovers, theirs = Takeovers(), {GPU: frozenset({"0"})}
    takeovers.judge(OURS, theirs, 0)
    takeovers.judge(OURS, theirs, 3)
    assert takeovers.judge(OURS, OURS, 6) == Outcome(back=frozenset({GPU}))
    assert takeovers.taken == frozenset()


def test_allocatable_devices_are_read_as_the_kubelet_writes_them():
    written = wire.encode_allocatable([(GPU, "GPU-0", (0, 1)), (GPU, "GPU-1", ()), (MIG, "MIG-0", (1,))])
    assert decode_allocatable(written) == {**OURS, MIG: frozenset({"MIG-0"})}
    assert decode_allocatable(b"") == {}
    with pytest.raises(ValueError, match="are left"):
        decode_allocatable(b"\x0a\x50abc")
