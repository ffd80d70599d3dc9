"""Which pods hold which devices: the kept answer, its age, and failures of the kubelet."""

import anyio
import pytest

from demo.stand_in_kubelet import Container, StandInKubelet
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import SettingsStore
from gpu_plugin.kubelet import attribution, pod_resources
from gpu_plugin.kubelet.attribution import (
    AGE,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    STALE,
    PodAttribution,
)
from gpu_plugin.kubelet.bounded_channel import CallError
from gpu_plugin.kubelet.pod_listing import Holder, HoldersByDevice, pods
from tests.unit.demo.stand_in_kubelet.fake_plugin import healthy, plugin

GPU = "nvidia.com/gpu"
ONE: HoldersByDevice = {(GPU, "a"): frozenset({Holder("default", "p", "main")})}


def at(socket) -> SettingsStore:
    """Settings with this PodResources socket."""
    return SettingsStore(resolve({"pod_resources_socket": str(socket)}, {}))


class Kubelet:
    """A kubelet with a given answer and socket, which counts the questions."""

    def __init__(self, monkeypatch, path):
        self.now, self.asked = 1000.0, 0
        self.answer: HoldersByDevice | str = ONE
        self.socket: tuple[int, int, int] | None = (1, 1, 1)
        self.began, self.gate = anyio.Event(), anyio.Event()
        self.gate.set()
        self.attribution = PodAttribution(at(path), lambda: self.now)
        monkeypatch.setattr(pod_resources, "holders", self._holders)
        monkeypatch.setattr(attribution, "identity", lambda _: self.socket)
        monkeypatch.setattr(anyio, "sleep", self._sleep)

    async def _sleep(self, seconds):
        self.now += seconds

    async def _holders(self, _socket, _timeout):
        self.asked += 1
        self.began.set()
        await self.gate.wait()
        if isinstance(self.answer, str):
            raise CallError(self.answer)
        return dict(self.answer)


@pytest.fixture
def kubelet(monkeypatch, tmp_path):
    return Kubelet(monkeypatch, tmp_path / "kubelet.sock")


async def all_at_once(ask, times):
    told = []

    async def one():
        told.append(await ask())

    async with anyio.create_task_group() as tasks:
        for _ in range(times):
            tasks.start_soon(one)
    return told


async def test_one_question_serves_all_who_ask_for_ten_seconds_and_the_answer_stays_the_same_object(kubelet):
    told = await all_at_once(kubelet.attribution.current, 20)
    assert kubelet.asked == 1
    assert all(each is told[0] for each in told)
    assert told[0] == ONE
    kubelet.now += AGE - 0.1
    assert await kubelet.attribution.current() is told[0]
    assert kubelet.asked == 1
    kubelet.now += 0.1
    assert await kubelet.attribution.current() is told[0]
    assert kubelet.asked == 2
    kubelet.now += AGE
    kubelet.answer = {}
    assert await kubelet.attribution.current() == {}


async def test_who_wants_the_newest_gets_the_answer_to_a_later_question(kubelet):
    assert await kubelet.attribution.newest() == ONE
    kubelet.now += 1
    kubelet.answer = {}
    assert await kubelet.attribution.current() == ONE
    assert await kubelet.attribution.newest() == {}
    assert kubelet.asked == 2
    kubelet.now += 1
    assert await all_at_once(kubelet.attribution.newest, 20) == [{}] * 20
    assert kubelet.asked == 3


async def test_a_question_that_began_before_is_no_answer(kubelet):
    kubelet.gate = anyio.Event()
    told = []

    async def ask():
        told.append(await kubelet.attribution.newest())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await kubelet.began.wait()
        tasks.start_soon(ask)  # a pod was admitted, and two callers need a newer answer
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        kubelet.gate.set()
    assert told == [ONE] * 3
    assert kubelet.asked == 2


async def test_questions_keep_a_distance(kubelet):
    for _ in range(40):
        began = kubelet.now
        assert await kubelet.attribution.newest() == ONE
        kubelet.now += 1e-6
    assert kubelet.asked == 40
    assert kubelet.now - 1000 > 39 * attribution.GAP
    assert kubelet.now - began <= attribution.GAP + 1e-5


async def test_who_is_cancelled_leaves_the_question_to_the_next(kubelet):
    kubelet.gate = anyio.Event()
    impatient = anyio.CancelScope()
    told = []

    async def ask(scope):
        with scope:
            told.append(await kubelet.attribution.newest())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, impatient)
        for _ in range(5):
            tasks.start_soon(ask, anyio.CancelScope())
        await kubelet.began.wait()
        await anyio.wait_all_tasks_blocked()
        impatient.cancel()
        kubelet.gate.set()
    assert told == [ONE] * 5
    assert kubelet.asked == 2


async def test_silence_is_said_once_asked_about_ever_more_rarely_and_its_end_is_said(kubelet, caplog):
    caplog.set_level("INFO")
    assert await kubelet.attribution.current() == ONE
    kubelet.answer = "there is no such socket"
    kubelet.now += AGE
    failed_at = kubelet.now
    tried = []
    while kubelet.now < failed_at + 300:
        asked = kubelet.asked
        told = await kubelet.attribution.current()
        assert told == (ONE if kubelet.now < 1000 + STALE else None)
        if kubelet.asked > asked:
            tried.append(kubelet.now - failed_at)
        kubelet.now += 1
    assert tried == [0, FIRST_PAUSE, 30, 70, 70 + LONGEST_PAUSE, 190, 250]
    assert kubelet.attribution.trouble == "there is no such socket"
    assert (kubelet.attribution.failures, kubelet.attribution.questions) == (7, 8)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    kubelet.answer = {}
    kubelet.now += LONGEST_PAUSE
    assert await kubelet.attribution.current() == {}
    assert kubelet.attribution.trouble == ""
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_a_new_kubelets_socket_is_asked_at_once_and_a_refusal_is_no_answer_to_who_wants_the_newest(kubelet):
    kubelet.answer = "refused"
    assert await all_at_once(kubelet.attribution.current, 5) == [None] * 5
    assert kubelet.asked == 1
    assert await kubelet.attribution.newest() is None
    assert kubelet.asked == 2
    kubelet.answer = ONE
    kubelet.socket = None
    assert await kubelet.attribution.current() is None
    kubelet.socket = (1, 1, 2)
    assert await kubelet.attribution.current() == ONE
    kubelet.answer = "refused"
    kubelet.now += 1
    assert await kubelet.attribution.newest() is None
    assert await kubelet.attribution.current() == ONE


async def test_an_answer_is_as_old_as_its_question(kubelet):
    kubelet.gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kubelet.attribution.current)
        await kubelet.began.wait()
        kubelet.now += 4  # a pod may have been admitted since the kubelet began to answer
        kubelet.gate.set()
    kubelet.now += AGE - 4 - 0.1
    assert await kubelet.attribution.current() == ONE
    assert kubelet.asked == 1
    kubelet.now += 0.1
    assert await kubelet.attribution.current() == ONE
    assert kubelet.asked == 2


async def test_who_cannot_wait_gets_what_was_known_and_the_next_one_the_answer(kubelet, monkeypatch):
    monkeypatch.setattr(attribution, "SHORTLY", 0.01)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kubelet.attribution.run)
        await anyio.wait_all_tasks_blocked()
        monkeypatch.setattr(attribution, "SHORTLY", 60.0)
        assert await kubelet.attribution.shortly() == ONE, "an answer that comes at once is waited for"
        assert kubelet.asked == 1
        kubelet.now += AGE
        kubelet.gate, kubelet.answer = anyio.Event(), {}
        monkeypatch.setattr(attribution, "SHORTLY", 0.01)
        with anyio.fail_after(5):
            assert await all_at_once(kubelet.attribution.shortly, 5) == [ONE] * 5
        assert kubelet.asked == 2
        kubelet.gate.set()
        await anyio.wait_all_tasks_blocked()
        assert await kubelet.attribution.shortly() == {}
        assert kubelet.asked == 2
        tasks.cancel_scope.cancel()


async def test_with_the_stand_in_over_a_restart(directory):
    async with StandInKubelet(directory / "device-plugins") as kubelet:
        where = kubelet.pod_resources_socket
        assert where is not None
        now = 0.0
        told = PodAttribution(at(where), lambda: now)
        assert await told.current() == {}
        async with plugin(kubelet, "a.sock", healthy("m", "n")):
            both = await kubelet.admit("p", containers=[Container("x", {GPU: 1}), Container("y", {GPU: 1})])
            now += AGE
            held = await told.current()
            assert held == {
                (each.resource, identifier): frozenset({Holder("default", "p", each.container)})
                for each in both.allocations
                for identifier in each.ids
            }
            assert len(held) == 2
            assert set(pods(held).values()) == {frozenset({"default/p"})}
        await kubelet.restart()
        now += 1
        assert await told.newest() is held  # the plugin has gone, the pod has not
        kubelet.release("p")
        now += AGE
        assert await told.current() == {}
        kubelet.check()
