"""The choice of the config file, by an option or by the node's label."""

import errno
import importlib.util
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest

from gpu_plugin.cluster import node_metadata
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.label import Choice
from gpu_plugin.config.resolve import resolve
from gpu_plugin.daemon.config_source import CHOICE_FILE, ConfigSource, LastChoice
from tests.unit.cluster.api_server import LABEL, NODE, FakeApiServer
from tests.unit.daemon.config_map import ConfigMapVolume, Listener
from tests.unit.waiting import until


@pytest.fixture
async def api():
    async with FakeApiServer() as running:
        yield running


@pytest.fixture
def volume(tmp_path):
    made = ConfigMapVolume(tmp_path / "configs")
    made.write(a100="a", default="d", h100="h")
    return made


@dataclass
class Running:
    source: ConfigSource
    heard: Listener

    def file(self):
        path = self.source.selected()
        return path.name if path else None

    async def becomes(self, name):
        await self.heard.until(lambda: self.file() == name)


@asynccontextmanager
async def running(source):
    source.changed = heard = Listener()

    async def take():
        while True:
            await heard.wait()
            heard.clear()
            source.keep(source.selected())  # as the settings of every file here are taken

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        tasks.start_soon(source.run)
        yield Running(source, heard)
        tasks.cancel_scope.cancel()


def without_api(volume, tmp_path):
    return {"config_file_srcdir": str(volume.directory), "node_name": NODE, "state_dir": str(tmp_path / "state")}


@asynccontextmanager
async def by_label(api, volume, tmp_path, **more):
    asked = {**without_api(volume, tmp_path), "kubeconfig": api.kubeconfig(tmp_path), **more}
    async with running(ConfigSource(resolve(asked, {}))) as made:
        yield made


async def test_without_a_file_nothing_changes():
    async with running(ConfigSource(resolve({}, {}))) as made:
        await made.source.wait_selected()
        await anyio.sleep(0.1)
        assert made.source.selected() is None
        assert made.heard.calls == 0


async def test_one_file_is_followed(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("version: v1")
    source = ConfigSource(resolve({"config_file": str(path)}, {}))
    await source.wait_selected()
    assert source.selected() == path
    async with running(source) as made:
        await made.heard.called(1)  # it may have changed since it was read
        path.write_text("version: v2")
        await made.heard.called(2)


async def test_the_label_chooses_and_every_change_of_it_is_followed(api, volume, tmp_path):
    api.label("h100")
    async with by_label(api, volume, tmp_path) as made:
        await made.source.wait_selected()
        assert made.source.selected() == volume.directory / "h100"
        assert made.heard.calls == 1
        await api.until(lambda: api.watchers)
        api.label("a100")
        await made.becomes("a100")
        api.label(None)
        await made.becomes("default")
        assert made.heard.calls == 3


async def test_the_default_and_the_fallbacks_apply_without_a_label(api, volume, tmp_path):
    async with by_label(api, volume, tmp_path, default_config="h100") as made:
        await made.becomes("h100")
    async with by_label(api, volume, tmp_path, fallback_strategies="single,named") as made:
        await made.becomes("default")
    async with by_label(api, volume, tmp_path, fallback_strategies="empty") as made:
        await made.heard.called(1)
        assert made.file() == "default"
        assert "the fallback empty does not replace one that was chosen before" in made.source.complaint
    elsewhere = str(tmp_path / "elsewhere")
    async with by_label(api, volume, tmp_path, fallback_strategies="empty", state_dir=elsewhere) as made:
        await made.heard.called(1)
        assert made.source.selected() is None
        assert made.source.complaint == ""


@pytest.mark.parametrize("began", ["before", "after a restart"])
async def test_an_unreadable_directory_keeps_the_chosen_file(api, volume, tmp_path, began):
    label = {"fallback_strategies": "named,empty"}
    gone = tmp_path / "away"
    async with by_label(api, volume, tmp_path, **label) as made:
        await made.becomes("default")
        if began == "before":
            volume.directory.rename(gone)
            await until(lambda: "cannot be read: No such file" in made.source.complaint)
            assert made.file() == "default"
            assert made.heard.calls == 1
            gone.rename(volume.directory)
            await until(lambda: not made.source.complaint)
    if began == "after a restart":
        volume.directory.rename(gone)
        async with by_label(api, volume, tmp_path, **label) as made:
            await made.becomes("default")
            assert made.source.complaint.endswith("; config default stays in force")


async def test_a_choice_is_stored_once_its_settings_are_in_force(api, volume, tmp_path):
    settings = resolve(without_api(volume, tmp_path), {})
    source = ConfigSource(settings)
    known = LastChoice(settings)

    def look(label):
        source._label = label
        source._label_known.set()
        return source._read()[0].choice

    assert look("h100") == Choice("h100")
    assert known.read() is None
    source.keep(volume.directory / "h100")
    assert known.read() == "h100"
    assert look("a100") == Choice("a100")  # these settings are refused
    assert known.read() == "h100"
    assert look("gone").file == "h100"


async def test_an_unknown_label_keeps_the_file_and_is_logged_once_per_value(api, volume, tmp_path, caplog):
    api.label("h100")
    async with by_label(api, volume, tmp_path) as made:
        await made.becomes("h100")
        await api.until(lambda: api.watchers)
        for value in ("b200", "gb200"):
            api.label(value)
            await said(caplog, f"specified config {value} ")
        volume.write(a100="other", default="d", h100="h")
        await anyio.sleep(0.3)
        assert made.file() == "h100"
        assert made.heard.calls == 1
        volume.write(a100="a", gb200="g", h100="h")
        await made.becomes("gb200")
    assert caplog.text.count("specified config b200") == 1
    assert caplog.text.count("specified config gb200") == 1
    assert "config h100 stays in force" in caplog.text


async def test_the_file_in_force_may_disappear_and_return_changed(api, volume, tmp_path, caplog):
    api.label("h100")
    async with by_label(api, volume, tmp_path) as made:
        await made.becomes("h100")
        volume.write(a100="a", default="d")
        await until(lambda: "specified config h100" in caplog.text)
        assert made.file() == "h100"
        assert made.heard.calls == 1
        volume.write(a100="a", default="d", h100="another")
        await made.heard.called(2)
        assert made.file() == "h100"


async def test_only_the_content_of_the_chosen_file_matters(api, volume, tmp_path):
    api.label("h100")
    async with by_label(api, volume, tmp_path) as made:
        await made.heard.called(1)
        volume.write(a100="changed", default="changed", h100="h")
        await anyio.sleep(0.3)
        assert made.heard.calls == 1
        volume.write(a100="changed", default="changed", h100="changed")
        await made.heard.called(2)


async def test_hidden_entries_and_directories_are_ignored(api, tmp_path):
    volume = ConfigMapVolume(tmp_path / "configs")
    volume.write(only="o")
    (volume.directory / ".hidden").write_text("x")
    (volume.directory / "directory").mkdir()
    (volume.directory / "dangling").symlink_to("nowhere")
    async with by_label(api, volume, tmp_path, fallback_strategies="single") as made:
        await made.becomes("only")


async def said(caplog, text):
    await until(lambda: text in caplog.text)


async def test_a_late_directory_delays_the_start(api, tmp_path, caplog):
    volume = ConfigMapVolume(tmp_path / "configs")
    volume.directory.rmdir()
    api.label("h100")
    async with by_label(api, volume, tmp_path, fallback_strategies="named,empty") as made:
        await said(
            caplog, "cannot be read: No such file or directory; nothing is served until there is a valid configuration"
        )
        assert not made.source._is_selected.is_set()
        volume.directory.mkdir()
        await until(lambda: "no configuration files are available" in made.source.complaint)
        volume.write(default="d")  # which is not what the label asks for
        await until(lambda: "there are default" in made.source.complaint)
        assert made.heard.calls == 0
        assert str(made.source.wanted()) == str(volume.directory / "h100")
        volume.write(default="d", h100="h")
        await made.becomes("h100")


async def test_an_absent_api_delays_the_start_without_a_former_choice(api, volume, tmp_path, caplog):
    api.label("h100")
    kubeconfig = api.kubeconfig(tmp_path)
    await api.stop()
    async with by_label(
        api, volume, tmp_path, kubeconfig=kubeconfig, default_config="a100", fallback_strategies="named,empty"
    ) as made:
        await said(caplog, "nothing is served until there is a valid configuration")
        assert not made.source._is_selected.is_set()
        assert "the Kubernetes API cannot be reached" in made.source.complaint
        await api.start()
        await made.becomes("h100")
        assert made.source.complaint == ""
        await api.until(lambda: api.watchers)
        assert made.source.watch_trouble == ""
        await api.stop()
        await until(lambda: "are not received: the Kubernetes API cannot be reached" in made.source.watch_trouble)
        assert made.file() == "h100"
        assert made.source.complaint == ""
        assert made.heard.calls == 1
        await api.start()
        await until(lambda: not made.source.watch_trouble)


async def test_after_a_restart_the_last_choice_is_used_until_the_label_is_known(api, volume, tmp_path, caplog):
    api.label("h100")
    async with by_label(api, volume, tmp_path) as made:
        await made.becomes("h100")
    kubeconfig = api.kubeconfig(tmp_path)
    await api.stop()
    async with by_label(api, volume, tmp_path, kubeconfig=kubeconfig, default_config="a100") as made:
        await made.becomes("h100")
        assert made.source.complaint.endswith("; config h100 stays in force")
        assert caplog.text.count("config h100 stays in force") == 1
        await api.start()
        api.label("a100")
        await made.becomes("a100")
        assert made.source.complaint == ""
    api.label("b200")
    async with by_label(api, volume, tmp_path) as made:
        await made.becomes("a100")
        assert made.source.complaint.startswith("specified config b200 (by the node's label) does not exist")


def choice(state, **other):
    asked = {"config_file_srcdir": "/configs", "node_name": "node-é", "node_label": "example.com/config", **other}
    return LastChoice(resolve({"state_dir": str(state), **asked}, {}))


@pytest.mark.parametrize(
    "other", [{"node_name": "n2"}, {"node_label": "example.com/c"}, {"config_file_srcdir": "/etc"}]
)
def test_a_stored_choice_is_of_one_node_one_label_and_one_directory(tmp_path, other):
    assert choice(tmp_path).read() is None
    for file in ("a100", ""):  # no file is a choice, too
        choice(tmp_path).write(file)
        assert choice(tmp_path, **other).read() is None
        assert choice(tmp_path).read() == file


async def test_a_choice_that_cannot_be_stored_deletes_the_former_choice(volume, tmp_path, monkeypatch):
    state = tmp_path / "state"
    settings = resolve(without_api(volume, tmp_path), {})
    source = ConfigSource(settings)
    assert source.keep(volume.directory / "h100")
    real = tempfile.mkstemp

    def full(*_arguments, **_more):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    assert not source.keep(volume.directory / "a100")
    assert not source.keep(volume.directory / "a100")
    assert LastChoice(settings).read() is None  # h100 is what the operator no longer wants
    monkeypatch.setattr(tempfile, "mkstemp", real)
    assert source.keep(volume.directory / "a100")
    assert LastChoice(settings).read() == "a100"
    for gone in (lambda: state.rename(tmp_path / "away"), (state / CHOICE_FILE).unlink):
        gone()
        assert source.keep(volume.directory / "a100")
        assert LastChoice(settings).read() == "a100"


async def test_missing_rights_do_not_select_a_fallback(api, volume, tmp_path, caplog):
    api.refusals = [("get", 403)] * 1000
    async with by_label(api, volume, tmp_path, fallback_strategies="named") as made:
        await said(caplog, "nothing is served until there is a valid configuration")
        assert not made.source._is_selected.is_set()
        assert "403" in made.source.complaint
        assert "ClusterRole" in made.source.complaint


async def test_no_file_is_chosen_before_the_label_is_known(api, volume, tmp_path, monkeypatch):
    monkeypatch.setattr(node_metadata, "FIRST_PAUSE", 0.01)
    api.refusals = [("get", 503)] * 3
    api.label("h100")
    async with by_label(api, volume, tmp_path, default_config="a100") as made:
        await made.source.wait_selected()
        assert made.file() == "h100"
        assert made.heard.calls == 1


async def test_another_label_can_be_named(api, volume, tmp_path):
    api.labels = {LABEL: "a100", "example.com/config": "h100"}
    async with by_label(api, volume, tmp_path, node_label="example.com/config") as made:
        await made.becomes("h100")


async def test_a_source_that_runs_again_reports_changes_in_between(api, volume, tmp_path):
    api.label("h100")
    async with by_label(api, volume, tmp_path) as made:
        await made.becomes("h100")
    async with running(made.source) as again:
        await api.until(lambda: api.watchers)
        await anyio.sleep(0.3)
        assert again.heard.calls == 0
        assert again.file() == "h100"
    volume.write(default="d", h100="changed")
    async with running(made.source) as again:
        await again.heard.called(1)


async def test_cancelling_closes_everything(api, volume, tmp_path):
    async with by_label(api, volume, tmp_path):
        await api.until(lambda: api.watchers)
    await api.until(lambda: not api.connections)


def test_a_missing_client_library_is_an_error_at_the_start(tmp_path, monkeypatch):
    settings = resolve({"config_file_srcdir": str(tmp_path), "node_name": NODE}, {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"install gpu-plugin\[kube\]"):
        ConfigSource(settings)


async def test_the_reason_of_an_unknown_label_is_available_until_it_is_known(api, volume, tmp_path, monkeypatch):
    monkeypatch.setattr(node_metadata, "FIRST_PAUSE", 0.01)
    kubeconfig = api.kubeconfig(tmp_path)
    await api.stop()
    source = ConfigSource(resolve({**without_api(volume, tmp_path), "kubeconfig": kubeconfig}, {}))
    waiting = f"waiting for the label {LABEL} of node {NODE}: "
    assert source.unknown == f"{waiting}the Kubernetes API has not answered yet"
    async with running(source):
        with anyio.fail_after(10):
            while not source.unknown.startswith(f"{waiting}the Kubernetes API cannot be reached: "):
                await anyio.sleep(0.005)
            await api.start()
            await source.wait_selected()
    assert source.unknown == ""
    assert ConfigSource(resolve({}, {})).unknown == ""
