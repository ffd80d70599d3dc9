"""The Node is labelled in the way that the settings want, and in no other."""

import asyncio
import hashlib
import logging
import threading
from functools import lru_cache
from itertools import pairwise

import anyio
import pytest
from msgspec.structs import replace

from gpu_plugin.cli.uninstall import traces
from gpu_plugin.cluster.connection import UnreachableError
from gpu_plugin.cluster.labels import keeper
from gpu_plugin.cluster.labels.features_file import FEATURES_FILE, FeaturesFile, WrittenFiles
from gpu_plugin.cluster.labels.keeper import CHECK, FIRST_PAUSE, LABELS_FILE, LONGEST_PAUSE, RENEW, NodeLabels
from gpu_plugin.config.names import TIMESTAMP
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import SettingsStore
from gpu_plugin.containers.host_view import LinuxHost
from gpu_plugin.daemon.state_files import FILES
from gpu_plugin.devices.node import Node
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.state.directory import StateDirectory
from tests.unit.cluster.api_server import NODE
from tests.unit.cluster.labels.recorded import names, whole
from tests.unit.cluster.writable_server import WritableServer

COUNT = "nvidia.com/gpu.count"
ONE, TWO = Node((whole(0),)), Node((whole(0), whole(1)))


class Api:
    """Accepts or refuses labels, and stores the newest labels by node."""

    def __init__(self):
        self.labels: dict[str, dict[str, str]] = {}
        self.asked = 0
        self.refusal = ""
        self.refused: dict[str, int] = {}

    def __call__(self, node_name, kubeconfig):
        assert kubeconfig == "/kubeconfig"
        self.node = node_name
        return self

    async def apply_labels(self, labels):
        self.asked += 1
        if self.refusal:
            raise UnreachableError("403", self.refusal, 403)
        if self.node in self.refused:
            raise UnreachableError("no", f"no change of {self.node}", self.refused[self.node])
        self.labels[self.node] = dict(labels)


class Bench:
    """A keeper with its own directories, and with settings and a clock that a test can set."""

    def __init__(self, tmp_path, monkeypatch):
        self.features = tmp_path / "features.d"
        self.features.mkdir()
        self.state = tmp_path / "state"
        self.host = LinuxHost(sysfs=str(tmp_path / "sys"))
        self.now = 1_600_000_000.0
        self.steady = 100.0
        self.api = Api()
        self.store = SettingsStore(
            replace(
                resolve({}, {}),
                node_labels="file",
                features_dir=str(self.features),
                node_name="node-a",
                kubeconfig="/kubeconfig",
            )
        )
        monkeypatch.setattr(anyio, "current_time", lambda: self.steady)
        self.labels = self.restarted()

    def restarted(self):
        self.labels = NodeLabels(
            self.store,
            self.host,
            StateDirectory(self.state),
            api=self.api,
            clock=lambda: self.now,
            dice=lambda: 0.0,
        )
        self.labels._directories.add(str(self.features))
        return self.labels

    async def keep(self, node=None, **settings):
        """Run one step of `run`, and return the pause after it."""
        self.store.current = replace(self.store.current, **settings)
        if node is not None:
            self.labels.follow(node)
        return await self.labels._keep()

    def written(self):
        return FeaturesFile(self.features, self.labels._files).read()


@pytest.fixture
def bench(tmp_path, monkeypatch):
    return Bench(tmp_path, monkeypatch)


async def test_the_file_is_written_once_there_are_gpus_and_again_only_where_something_changed(bench):
    assert await bench.keep() is None
    assert bench.written() == {}
    assert await bench.keep(ONE) == CHECK
    first = bench.written()
    assert (first[COUNT], first[TIMESTAMP]) == ("1", "1600000000")
    before = (bench.features / "gfd").stat()
    bench.now += 60
    assert await bench.keep() == CHECK
    bench.restarted()
    assert await bench.keep(ONE) == CHECK
    assert (bench.features / "gfd").stat().st_ino == before.st_ino
    assert await bench.keep(TWO) == CHECK
    assert (bench.written()[COUNT], bench.written()[TIMESTAMP]) == ("2", "1600000060")
    assert bench.labels.trouble == ""


async def test_a_file_that_somebody_removed_or_changed_is_written_again_and_one_that_says_the_same_stays(bench):
    await bench.keep(ONE)
    first = bench.written()
    (bench.features / "gfd").unlink()
    await bench.keep()
    assert bench.written() == first
    (bench.features / "gfd").write_text(f"{COUNT}=9\n")
    await bench.keep()
    assert bench.written()[COUNT] == "1"
    theirs = "".join(f"{key}={value}\n" for key, value in reversed(first.items()) if key != "nvidia.com/gpu.present")
    (bench.features / "gfd").write_text(theirs)  # as GPU Feature Discovery writes it
    await bench.keep()
    assert (bench.features / "gfd").read_text() == theirs


async def test_an_absent_directory_is_said_once_and_is_no_trouble_once_it_is_there(bench, caplog):
    caplog.set_level(logging.INFO)
    bench.features.rmdir()
    for _ in range(3):
        assert await bench.keep(ONE) == CHECK
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(bench.features) in bench.labels.trouble
    assert "no such directory" in bench.labels.trouble
    bench.features.mkdir()
    await bench.keep()
    assert bench.written()[COUNT] == "1"
    assert bench.labels.trouble == ""
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO"]


async def test_the_file_goes_when_labels_are_switched_off_now_or_at_the_next_start(bench):
    await bench.keep(ONE)
    assert await bench.keep(node_labels="none") is None
    assert names(bench.features) == []
    await bench.keep(node_labels="file")
    bench.restarted()
    await bench.keep(ONE, node_labels="none")
    assert names(bench.features) == []
    (bench.features / "gfd").write_text(f"{COUNT}=8\n")
    bench.restarted()
    await bench.keep(ONE)
    assert names(bench.features) == ["gfd"], "which is somebody else's"
    assert names(bench.state) == [FEATURES_FILE]


async def test_a_file_that_cannot_be_removed_is_said_until_it_is_gone_and_others_directories_are_not(
    bench, monkeypatch
):
    def refuse(_):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(FeaturesFile, "remove", refuse)
        await bench.keep(ONE, node_labels="none")
        assert bench.labels.trouble == "", "nothing was written there"
        await bench.keep(node_labels="file")
        assert await bench.keep(node_labels="none") == CHECK
        assert bench.labels.trouble == f"{bench.features}: Read-only file system"
    await bench.keep()
    assert (names(bench.features), bench.labels.trouble) == ([], "")


@pytest.mark.parametrize("claimed", [True, False])
async def test_our_file_is_removed_although_the_state_directory_was_lost(bench, claimed):
    await bench.keep(ONE)
    (bench.state / FEATURES_FILE).unlink()
    bench.restarted()
    if claimed:
        await bench.keep(ONE)
        bench.restarted()
    await bench.keep(ONE, node_labels="none")
    assert names(bench.features) == []


async def test_a_state_directory_that_hangs_keeps_no_label_from_being_written_and_is_named(bench, monkeypatch):
    await bench.keep(TWO)
    monkeypatch.setattr(keeper, "MEMORY_PATIENCE", 0.05)
    monkeypatch.setattr(keeper, "LABELS_WAIT", 0.05)
    thawed, begun = threading.Event(), []
    read, write = StateDirectory.read, StateDirectory.write

    def hang(call):
        def hanging(*given):
            begun.append(given)
            assert thawed.wait(10)
            return call(*given)

        return hanging

    monkeypatch.setattr(StateDirectory, "read", hang(read))
    monkeypatch.setattr(StateDirectory, "write", hang(write))
    for restarted in (False, True):
        if restarted:
            bench.restarted()
        for node in (ONE, TWO, ONE):
            assert await bench.keep(node) == CHECK
            assert bench.written()[COUNT] == str(len(node.gpus))
            assert bench.labels.trouble.startswith(f"{bench.state}: ")
            assert str(bench.features) not in bench.labels.trouble
    assert len(begun) == 2, "one call a process hangs, and no second one beside it"
    thawed.set()
    monkeypatch.setattr(keeper, "MEMORY_PATIENCE", 10.0)
    await bench.keep()
    assert bench.labels.trouble == ""
    bench.restarted()
    await bench.keep(ONE, node_labels="none")
    assert names(bench.features) == [], "which process ever wrote it"


async def test_a_former_directory_s_file_is_removed_once_the_state_directory_says_which_it_is(
    bench, monkeypatch, tmp_path
):
    await bench.keep(ONE)
    monkeypatch.setattr(keeper, "MEMORY_PATIENCE", 0.05)
    thawed, read = threading.Event(), StateDirectory.read

    def hanging(*given):
        assert thawed.wait(10)
        return read(*given)

    monkeypatch.setattr(StateDirectory, "read", hanging)
    bench.restarted()
    bench.labels._directories.clear()
    assert await bench.keep(node_labels="none", features_dir=str(tmp_path / "another")) == CHECK
    assert names(bench.features) == ["gfd"]
    thawed.set()
    monkeypatch.setattr(keeper, "MEMORY_PATIENCE", 10.0)
    await bench.keep()
    assert names(bench.features) == []


async def test_what_is_written_is_remembered_before_so_that_a_kill_in_between_leaves_no_strange_file(
    bench, monkeypatch
):
    remembered, write = [], FeaturesFile.write

    def noting(file, labels):
        known = StateDirectory(bench.state).read(FEATURES_FILE, WrittenFiles)
        write(file, labels)
        digest = hashlib.sha256(file.path.read_bytes()).hexdigest()
        remembered.append(known is not None and digest in known.files[str(file.path)])

    monkeypatch.setattr(FeaturesFile, "write", noting)
    await bench.keep(ONE)
    await bench.keep(TWO)
    assert remembered == [True, True]


async def test_what_the_state_directory_refused_it_is_given_until_it_takes_it(bench):
    bench.state.write_text("no directory")
    assert await bench.keep(ONE, node_labels="api") == CHECK
    assert bench.api.labels["node-a"][COUNT] == "1"
    bench.state.unlink()
    assert await bench.keep() > CHECK
    bench.restarted()
    await bench.keep(node_labels="none")
    assert bench.api.labels["node-a"] == {}


async def test_a_file_in_a_directory_that_is_away_is_told_once_and_removed_by_a_process_that_finds_it(bench, caplog):
    await bench.keep(ONE)
    bench.features.rename(bench.features.with_name("away"))
    for _ in range(2):
        await bench.keep(node_labels="none")
    assert bench.labels.trouble == ""
    said = f"{bench.features}/gfd: the file of labels cannot be removed"
    assert caplog.text.count(said) == 1
    bench.features.with_name("away").rename(bench.features)
    bench.restarted()
    await bench.keep()
    assert names(bench.features) == []


async def test_the_file_moves_with_its_directory(bench, tmp_path):
    await bench.keep(ONE)
    (tmp_path / "other").mkdir()
    await bench.keep(features_dir=str(tmp_path / "other"))
    assert names(bench.features) == []
    assert names(tmp_path / "other") == ["gfd"]
    bench.restarted()
    await bench.keep(ONE, features_dir=str(bench.features))
    assert names(tmp_path / "other") == [], "over a restart, too"
    assert names(bench.features) == ["gfd"]


async def test_the_api_is_given_the_labels_once_and_again_when_they_changed_or_after_an_hour(bench):
    pause = await bench.keep(ONE, node_labels="api")
    assert pause == pytest.approx(0.9 * RENEW)
    assert bench.api.labels["node-a"][COUNT] == "1"
    first = dict(bench.api.labels["node-a"])
    bench.steady += 60
    bench.now += 60
    await bench.keep()
    assert bench.api.asked == 1
    await bench.keep(TWO)
    assert (bench.api.labels["node-a"][COUNT], bench.api.labels["node-a"][TIMESTAMP]) == ("2", "1600000060")
    await bench.keep(ONE)
    bench.steady += RENEW
    await bench.keep()
    assert bench.api.asked == 4
    assert first.keys() == bench.api.labels["node-a"].keys()
    assert names(bench.features) == []


async def test_a_restart_changes_nothing_where_nothing_has_changed(bench):
    await bench.keep(ONE, node_labels="api")
    first = dict(bench.api.labels["node-a"])
    bench.now += 3600
    bench.restarted()
    await bench.keep(ONE)
    assert bench.api.asked == 2, "the Node may have been recreated"
    assert bench.api.labels["node-a"] == first


async def test_labels_are_taken_back_from_the_api_when_they_are_switched_off_now_or_at_the_next_start(bench):
    await bench.keep(ONE, node_labels="api")
    await bench.keep(node_labels="file")
    assert bench.api.labels["node-a"] == {}
    assert bench.written()[COUNT] == "1"
    await bench.keep(node_labels="api")
    assert (names(bench.features), bench.api.labels["node-a"][COUNT]) == ([], "1")
    bench.restarted()
    assert await bench.keep(node_labels="none", node_name="renamed") is None
    assert bench.api.labels == {"node-a": {}}
    asked = bench.api.asked
    bench.restarted()
    await bench.keep(ONE)
    assert bench.api.asked == asked


async def test_a_node_of_another_name_is_labelled_and_the_former_one_s_labels_are_taken_back(bench):
    await bench.keep(ONE, node_labels="api")
    first = dict(bench.api.labels["node-a"])
    bench.restarted()
    await bench.keep(ONE, node_name="node-b")
    assert {name: labels.get(COUNT) for name, labels in bench.api.labels.items()} == {"node-a": None, "node-b": "1"}
    assert bench.api.labels["node-b"].keys() == first.keys()
    asked = bench.api.asked
    await bench.keep()
    assert bench.api.asked == asked
    await bench.keep(node_labels="none")
    assert bench.api.labels == {"node-a": {}, "node-b": {}}


@pytest.mark.parametrize(("code", "says"), [(403, True), (422, True), (404, False)])
async def test_a_former_node_that_may_not_be_changed_is_said_once_with_what_to_do_and_one_that_is_gone_is_not(
    bench, caplog, code, says
):
    await bench.keep(ONE, node_labels="api")
    given = dict(bench.api.labels["node-a"])
    bench.api.refused["node-a"] = code
    for _ in range(2):
        bench.restarted()
        await bench.keep(ONE, node_name="node-b")
    assert bench.api.labels["node-b"][COUNT] == "1"
    assert bench.labels.trouble == ""
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == says
    for warning in warnings:
        assert "node node-a: the plugin's labels cannot be removed, since the plugin is on node node-b now" in warning
        assert warning.endswith(
            f"no change of node-a; run: kubectl label node node-a {' '.join(f'{key}-' for key in sorted(given))}"
        )


async def test_while_a_former_node_cannot_be_reached_nothing_of_it_is_forgotten(bench, monkeypatch):
    async def sleep(seconds):
        bench.steady += seconds

    monkeypatch.setattr(anyio, "sleep", sleep)
    await bench.keep(ONE, node_labels="api")
    bench.api.refused["node-a"] = 503
    bench.restarted()
    draws = iter([0.0])
    bench.labels._dice = lambda: next(draws, 0.99)  # a short pause, and a late first request
    assert await bench.keep(ONE, node_name="node-b") == pytest.approx(FIRST_PAUSE / 2)
    assert "no change of node-a" in bench.labels.trouble
    assert "node-b" not in bench.api.labels
    bench.api.refused.clear()
    bench.steady += FIRST_PAUSE
    await bench.keep()
    assert (bench.api.labels["node-a"], bench.api.labels["node-b"][COUNT]) == ({}, "1")
    assert bench.labels.trouble == ""


async def test_labels_of_a_node_that_is_gone_need_not_be_taken_back(bench):
    await bench.keep(ONE, node_labels="api")
    bench.api.refused["node-a"] = 404
    assert await bench.keep(node_labels="none") is None
    asked = bench.api.asked
    bench.restarted()
    await bench.keep(ONE)
    assert (bench.api.asked, bench.labels.trouble) == (asked, "")


async def test_an_api_server_that_refuses_is_asked_ever_more_rarely_and_keeps_nothing_else_from_being_done(
    bench, caplog
):
    bench.api.refusal = "it may not patch nodes"
    assert await bench.keep(ONE, node_labels="api") == pytest.approx(FIRST_PAUSE / 2)
    bench.labels._dice = lambda: 0.99
    assert "it may not patch nodes" in bench.labels.trouble
    assert bench.api.asked == 1
    bench.steady += 1
    await bench.keep(TWO)
    assert bench.api.asked == 1, "news of the node are no reason to ask before the pause is over"
    asked_at = []
    until = bench.steady + 3600
    while bench.steady < until:
        asked = bench.api.asked
        pause = await bench.keep()
        if bench.api.asked > asked:
            asked_at.append(bench.steady)
        bench.steady += pause
    pauses = [round(later - earlier, 3) for earlier, later in pairwise(asked_at)]
    assert pauses == sorted(pauses)
    assert pauses[-1] <= LONGEST_PAUSE
    assert len(pauses) < 12
    assert len(caplog.records) == 1
    bench.api.refusal = ""
    await bench.keep()
    assert bench.labels.trouble == ""
    bench.api.refusal = "away"
    await bench.keep(node_labels="file")
    assert bench.written()[COUNT] == "2"
    assert "away" in bench.labels.trouble


async def test_what_the_api_needs_and_lacks_is_said(bench, monkeypatch):
    assert await bench.keep(ONE, node_labels="api", node_name="") is None
    assert "--node-name" in bench.labels.trouble
    await bench.keep(node_name="node-a")
    await bench.keep(node_name="")
    assert bench.api.labels["node-a"][COUNT] == "1", "who does not say the Node's name has not named another one"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    bench.labels._api = lru_cache(1)(keeper.node_api)
    bench.restarted()
    bench.labels._api = lru_cache(1)(keeper.node_api)
    assert await bench.keep(ONE, node_name="node-a") is None
    assert "gpu-plugin[kube]" in bench.labels.trouble


async def test_switched_off_it_reads_and_writes_nothing_but_whether_there_is_something_to_take_back(bench):
    assert await bench.keep(ONE, node_labels="none") is None
    bench.features.rmdir()
    bench.restarted()
    assert await bench.keep(ONE) is None
    assert bench.labels.trouble == ""
    assert (bench.api.asked, bench.state.exists()) == (0, False)


async def test_by_the_api_itself_others_labels_stay(bench, tmp_path):
    async with WritableServer() as server:
        others = dict(server.labels)
        bench.labels._api = lru_cache(1)(keeper.node_api)
        config = {"kubeconfig": server.kubeconfig(tmp_path), "node_name": NODE, "node_labels": "api"}
        await bench.keep(TWO, **config)
        assert bench.labels.trouble == ""
        assert {**others, COUNT: "2"}.items() < server.labels.items()
        asked = len(server.requests)
        bench.steady += RENEW
        await bench.keep()
        assert [method for method, _, _, _ in server.requests[asked:]] == ["PATCH"]
        await bench.keep(node_labels="none")
        assert server.labels == others


async def test_it_runs_for_ever_and_takes_news_of_the_node(tmp_path, monkeypatch):
    monkeypatch.setattr(keeper, "SETTLE", 0.001)
    counts: list[str] = []
    loop, written = asyncio.get_running_loop(), Pulse()

    def write(_, labels):
        counts.append(labels[COUNT])
        loop.call_soon_threadsafe(written.ring)

    monkeypatch.setattr(FeaturesFile, "write", write)
    settings = replace(resolve({}, {}), node_labels="file", features_dir=str(tmp_path))
    labels = NodeLabels(SettingsStore(settings), LinuxHost(sysfs="/nowhere"), StateDirectory(tmp_path / "state"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(labels.run)
        for node in (ONE, TWO):
            labels.follow(node)
            with anyio.fail_after(10):
                await written.wait()
        tasks.cancel_scope.cancel()
    assert counts == ["1", "2"]


def test_the_names_of_its_files_are_known_to_who_cleans_up():
    assert {LABELS_FILE, FEATURES_FILE} <= set(FILES) & set(traces.FILES)


async def test_what_was_heard_of_a_node_before_a_pause_says_nothing_of_the_labels_that_are_to_be_taken_back(bench):
    await bench.keep(ONE, node_labels="api")
    bench.api.refused["node-a"] = 404
    await bench.keep(TWO)
    bench.api.refused.clear()
    pause = await bench.keep(node_labels="none")
    assert pause == pytest.approx(FIRST_PAUSE / 2)
    assert "no change of node-a" in bench.labels.trouble
    bench.steady += FIRST_PAUSE
    assert await bench.keep() is None
    assert bench.api.labels["node-a"] == {}


@pytest.mark.parametrize("way", ["api", "file"])
async def test_labels_of_another_daemon_that_ran_meanwhile_are_replaced(bench, tmp_path, way):
    """The other daemon took the node over, and gave it back."""
    former, other = bench.labels, tmp_path / "other.d"
    other.mkdir()
    bench.store.current = replace(bench.store.current, node_labels=way)
    former.follow(ONE)
    await run_briefly(former)
    bench.restarted()
    assert await bench.keep(TWO, features_dir=str(other)) is not None
    bench.store.current = replace(bench.store.current, features_dir=str(bench.features))
    await run_briefly(former)
    if way == "api":
        assert bench.api.labels["node-a"][COUNT] == "1"
    else:
        assert FeaturesFile(bench.features, former._files).read()[COUNT] == "1"
        assert not (other / "gfd").exists()


async def run_briefly(labels):
    with anyio.move_on_after(0.3):
        await labels.run()
