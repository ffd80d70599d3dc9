"""Whether the kubelet still has our devices, and the reaction if it does not."""

import itertools
import logging
import threading
from pathlib import Path

import pytest

from demo.stand_in_kubelet.pod_resources import encode_allocatable
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import SettingsStore
from gpu_plugin.containers.edits import Access
from gpu_plugin.devices.device import Device, Resource
from gpu_plugin.kubelet import pod_resources, takeover
from gpu_plugin.kubelet.counts import KubeletCounts
from gpu_plugin.kubelet.pod_listing import decode_allocatable
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.kubelet.snapshot import ResourceView, SnapshotStore
from gpu_plugin.kubelet.takeover import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    NO_DEVICES,
    OTHERS,
    UNREAD,
    Outcome,
    Takeovers,
    TakeoverWatch,
    lost,
    steady,
)
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.threads import OFF_LOOP_DEVICES

GPU, MIG = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"
OURS = {GPU: frozenset({"GPU-0", "GPU-1"})}


@pytest.mark.parametrize(
    ("ours", "allocatable", "found"),
    [
        (OURS, OURS, {}),
        (OURS, {GPU: frozenset({"GPU-1"})}, {}),  # GPU-0 has just become Unhealthy
        (OURS, {GPU: frozenset({"GPU-1", "0"})}, {}),
        (OURS, {}, {GPU: NO_DEVICES}),
        (OURS, {GPU: frozenset(), "example.com/nic": frozenset({"GPU-0"})}, {GPU: NO_DEVICES}),
        (OURS, {GPU: frozenset({"0", "1"})}, {GPU: OTHERS}),
        ({GPU: frozenset()}, {}, {}),  # we have none to offer
        ({**OURS, MIG: frozenset({"MIG-0"})}, {GPU: frozenset({"0"})}, {GPU: OTHERS, MIG: NO_DEVICES}),
    ],
)
def test_what_an_answer_means(ours, allocatable, found):
    assert lost(ours, allocatable) == found


def test_a_single_answer_has_no_consequences_and_a_second_one_has():
    takeovers = Takeovers()
    assert takeovers.judge(OURS, {}, 0) == Outcome()
    assert takeovers.judge(OURS, OURS, 3) == Outcome()
    assert takeovers.judge(OURS, {}, 6) == Outcome()
    assert takeovers.judge(OURS, {}, 9) == Outcome(again={GPU: NO_DEVICES})
    assert takeovers.suspects == {}, "what was done about it has time to tell"


def test_where_registering_again_does_not_help_it_is_done_ever_more_rarely():
    takeovers = Takeovers()
    done = [now for now in range(0, 600, 3) if takeovers.judge(OURS, {}, now).again]
    assert done[0] == 3
    gaps = [after - before for before, after in itertools.pairwise(done)]
    assert gaps[0] == pytest.approx(FIRST_PAUSE, abs=4)
    assert all(after >= 1.9 * before for before, after in itertools.pairwise(gaps))
    takeovers.judge(OURS, OURS, 601)
    done = [now for now in range(604, 604 + 86_400, 3) if takeovers.judge(OURS, {}, now).again]
    assert done[0] == 607
    gaps = [after - before for before, after in itertools.pairwise(done)]
    assert gaps[0] == pytest.approx(FIRST_PAUSE, abs=4)
    assert gaps[-1] == pytest.approx(LONGEST_PAUSE, abs=4)


def test_what_another_plugin_has_is_left_to_it_until_it_is_gone():
    takeovers, theirs = Takeovers(), {GPU: frozenset({"0"})}
    takeovers.judge(OURS, theirs, 0)
    assert takeovers.judge(OURS, theirs, 3) == Outcome(taken={GPU: OTHERS})
    assert takeovers.taken == {GPU}
    assert takeovers.judge(OURS, theirs, 6) == Outcome()  # said once
    takeovers.judge(OURS, {}, 9)
    assert takeovers.judge(OURS, {}, 12) == Outcome(again={GPU: NO_DEVICES})
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
    """Ask twice about a resource with these devices (True: healthy) before and after the question. Return the reason."""
    store, registrations = SnapshotStore(), Registrations(clock=lambda: 0.0)

    async def allocatable(_socket, _patience):
        if change:
            published(store, **then)
        return answer

    monkeypatch.setattr(pod_resources, "allocatable", allocatable)
    registrations.taken(GPU)
    watch = TakeoverWatch(store, registrations, SettingsStore(resolve({}, {})), Pulse(), KubeletCounts())
    for _ in range(2):
        published(store, **first)
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


OLD = {GPU: frozenset({"MIG-0", "MIG-1"})}


def test_a_kubelet_that_has_not_read_our_newest_list_yet_is_not_taken_for_another_plugins():
    takeovers, cut = Takeovers(), {GPU: frozenset({"GPU-0"})}
    for now in (0, 15):
        takeovers.judge(OLD, OLD, now)
    for now in (18, 21, 24):  # it is repartitioned, and the kubelet's disk is slow
        assert takeovers.judge(cut, OLD, now, OLD) == Outcome()
    assert takeovers.judge(cut, cut, 27, OLD) == Outcome()
    for now in (30, 33):
        taken = takeovers.judge(cut, {GPU: frozenset({"0"})}, now).taken
    assert taken == {GPU: OTHERS}, "that it never had from us"


def test_a_list_that_is_not_read_for_half_a_minute_is_another_plugins():
    takeovers, cut = Takeovers(), {GPU: frozenset({"GPU-0"})}
    takeovers.judge(OLD, OLD, 0)
    told = [now for now in range(3, 60, 3) if takeovers.judge(cut, OLD, now, OLD).taken]
    assert told == [UNREAD + 3]


def test_that_it_was_read_before_is_no_excuse_for_another_plugin_that_was_found_out():
    takeovers = Takeovers()
    takeovers.judge(OLD, OLD, 0)
    for now in (3, 6):
        takeovers.judge(OLD, {GPU: frozenset({"0"})}, now)
    assert takeovers.judge({GPU: frozenset({"GPU-0"})}, OLD, 9, OLD) == Outcome(), "it has what we call unhealthy"
    assert takeovers.taken == {GPU}


def test_what_a_kubelet_had_before_a_resource_was_registered_anew_excuses_nothing():
    takeovers, cut = Takeovers(), {GPU: frozenset({"GPU-0"})}
    takeovers.judge(OLD, OLD, 0)
    takeovers.judge({}, OLD, 3)
    takeovers.judge(cut, OLD, 6)
    assert takeovers.judge(cut, OLD, 9).taken == {GPU: OTHERS}


SOCKET = Path("first.sock")


@pytest.mark.parametrize(
    "happens",
    [
        lambda registrations: registrations.away(GPU, "the kubelet dropped our stream"),
        lambda registrations: registrations.ended(GPU, SOCKET),
        lambda registrations: registrations.served(GPU, Path("second.sock")),
        lambda registrations: registrations.taken(GPU),
        lambda registrations: registrations.withdrawn(GPU),
    ],
)
def test_whatever_happens_to_our_stream_ends_what_is_known_of_another_plugin(happens):
    registrations = Registrations(clock=lambda: 0.0)
    registrations.served(GPU, SOCKET)
    assert not registrations.overtake(GPU, OTHERS), "it has no stream yet"
    assert registrations.of(GPU).why != OTHERS
    registrations.taken(GPU)
    assert registrations.overtake(GPU, OTHERS)
    assert registrations.overtaken(GPU)
    happens(registrations)
    after = registrations.of(GPU)
    assert not registrations.overtaken(GPU)
    assert not registrations.returned(GPU)
    assert registrations.of(GPU) == after


def published(store, **devices):
    """Publishes these devices, each healthy or not."""
    made = tuple(Device(name, name, name, "0", reason="" if fit else "sick") for name, fit in devices.items())
    store.publish({GPU: ResourceView.of(Resource(GPU, made), Access(), Placement())})


class Watched:
    """A resource whose stream the kubelet has open, and the watch on it; `answer` is what the kubelet has."""

    def __init__(self, monkeypatch, **devices) -> None:
        self.now = 0.0
        self.store, self.registrations = SnapshotStore(), Registrations(clock=lambda: self.now)
        self.answer: dict[str, frozenset[str]] = {}
        published(self.store, **devices)
        self.served("first.sock")

        async def allocatable(_socket, _patience):
            return self.answer

        monkeypatch.setattr(pod_resources, "allocatable", allocatable)
        self.counts = KubeletCounts()
        self.watch = TakeoverWatch(self.store, self.registrations, SettingsStore(resolve({}, {})), Pulse(), self.counts)

    def served(self, socket):
        self.registrations.served(GPU, Path(socket))
        self.registrations.taken(GPU)

    @property
    def standing(self):
        return self.registrations.of(GPU)

    async def ask(self, *answer: str, times: int = 2) -> None:
        self.answer = {GPU: frozenset(answer)}
        for _ in range(times):
            await self.watch.ask()


@pytest.mark.anyio
async def test_a_resource_whose_stream_ended_is_not_registered_whatever_the_kubelet_has(monkeypatch):
    watched = Watched(monkeypatch, a=True)
    await watched.ask("0")
    assert watched.standing.why == OTHERS
    watched.registrations.ended(GPU, Path("first.sock"))
    watched.registrations.away(GPU, why := "registration failed: the kubelet refused")
    await watched.ask("a")
    assert (watched.standing.registered, watched.standing.why) == (None, why)
    await watched.ask("0")
    assert watched.standing.why == why


@pytest.mark.anyio
async def test_a_resource_that_came_back_on_its_stream_is_registered(monkeypatch):
    watched = Watched(monkeypatch, a=True)
    await watched.ask("0")
    watched.now = 7.0
    await watched.ask("a")
    assert (watched.standing.registered, watched.standing.why) == (7.0, "")


@pytest.mark.anyio
async def test_a_resource_that_was_registered_anew_is_judged_anew(monkeypatch):
    watched = Watched(monkeypatch, a=True)
    await watched.ask("0")
    watched.registrations.ended(GPU, Path("first.sock"))
    watched.served("second.sock")
    await watched.ask("0")
    assert watched.standing.why == OTHERS, "it is said again"


@pytest.mark.anyio
async def test_tens_of_thousands_of_devices_are_judged_beside_the_loop(monkeypatch):
    threads, loop = [], threading.get_ident()

    def counted(before, after):
        threads.append(threading.get_ident())
        return steady(before, after)

    monkeypatch.setattr(takeover, "steady", counted)
    watched = Watched(monkeypatch, **{f"d{at}": True for at in range(OFF_LOOP_DEVICES)})
    await watched.ask("0")
    assert watched.standing.why == OTHERS
    published(watched.store, a=True)
    await watched.ask("a")
    assert [thread == loop for thread in threads] == [False, False, True, True]


def test_allocatable_devices_are_read_as_the_kubelet_writes_them():
    written = encode_allocatable([(GPU, "GPU-0", (0, 1)), (GPU, "GPU-1", ()), (MIG, "MIG-0", (1,))])
    assert decode_allocatable(written) == {**OURS, MIG: frozenset({"MIG-0"})}
    assert decode_allocatable(b"") == {}
    with pytest.raises(ValueError, match="message"):
        decode_allocatable(b"\x0a\x50abc")


@pytest.mark.anyio
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(("a", "b"), id="it lacks a healthy device"),
        pytest.param(("a", "b", "c", "sick"), id="it counts an unhealthy device as healthy"),
        pytest.param(("other",), id="it has devices of another plugin"),
    ],
)
async def test_a_request_of_a_kubelet_that_keeps_another_plugins_list_sends_the_list_again(monkeypatch, answer):
    watched = Watched(monkeypatch, a=True, b=True, c=True, sick=False)
    watched.counts.requests[GPU] += 1
    await watched.ask("a", "b", "c")
    await watched.ask(*answer, times=3)
    assert watched.store.resends(GPU) == 0, "requests may go to the other plugin"
    watched.counts.requests[GPU] += 1
    await watched.ask(*answer, times=3)
    assert watched.store.resends(GPU) == 1


@pytest.mark.anyio
async def test_requests_of_a_kubelet_that_has_the_list_send_nothing_again(monkeypatch):
    watched = Watched(monkeypatch, a=True, b=True, sick=False)
    for answer in (("a", "b"), ("a",), ("a", "b"), ("a",), ("a", "b", "older")):
        watched.counts.requests[GPU] += 1
        await watched.ask(*answer, times=1)
    assert watched.store.resends(GPU) == 0, "one answer may be older than the newest list"


@pytest.mark.anyio
async def test_a_kubelet_that_keeps_another_list_is_logged_once_without_a_request(monkeypatch, caplog):
    monkeypatch.setattr(takeover, "UNREAD", 0.0)
    watched = Watched(monkeypatch, a=True, b=True)
    with caplog.at_level(logging.WARNING):
        await watched.ask("a", times=1)
        assert not caplog.records, "the newest list may not have arrived"
        await watched.ask("a", times=3)
        assert len(caplog.records) == 1
        await watched.ask("a", "b")
        await watched.ask("a")
        assert len(caplog.records) == 2
