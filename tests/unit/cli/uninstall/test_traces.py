"""Cleanup removes the files of the daemon from a node, and no others."""

import errno
import os
import shutil
import socket
from pathlib import Path

import pytest

from gpu_plugin.cli import main
from gpu_plugin.cli.uninstall.traces import FILES, remove_traces
from gpu_plugin.cluster.labels.features_file import FEATURES_FILE, FeaturesFile, WrittenFiles
from gpu_plugin.containers.cdi.spec import to_json
from gpu_plugin.containers.cdi_files.directory import SpecDirectory
from gpu_plugin.runtime import control
from gpu_plugin.runtime.control import server
from gpu_plugin.state.directory import StateDirectory
from gpu_plugin.state.node_lock import NodeLock
from tests.unit.containers.cdi_files.specs import GPU_FILE, spec


@pytest.fixture
def tmp_path(short_path):
    """Sockets lie below it."""
    return short_path


@pytest.fixture
def node(tmp_path):
    """State, CDI and socket directory."""
    directories = tmp_path / "s", tmp_path / "cdi", tmp_path / "dp"
    for directory in directories:
        directory.mkdir()
    return directories


def write_labels(directory, state):
    """Write the file of labels and its record, as a daemon does."""
    labels = {"nvidia.com/gpu.present": "true", "nvidia.com/gpu.count": "8"}
    written = StateDirectory(state).read(FEATURES_FILE, WrittenFiles) or WrittenFiles()
    file = FeaturesFile(directory, written)
    assert StateDirectory(state).write(FEATURES_FILE, written.updated(file.path, file.digests(labels)))
    file.write(labels)


def refusing(directory, unlink):
    """`unlink` where one directory is mounted read-only."""

    def refused(path, **options):
        if path.parent == directory:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        unlink(path, **options)

    return refused


def dead_socket(path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


def test_everything_of_ours_goes_and_the_state_directory_with_it(node):
    state, cdi, sockets = node
    for name in FILES:
        (state / name).write_text("{}")
    (state / "state-a.log.corrupt").write_text("?")
    (state / ".state-b.log.abcdefg1").write_text("half")
    (state / "simulated-node.json").write_text("{}")
    (state / "dev").mkdir()
    (state / "dev" / "nvidia0").write_text("")
    (state / "driver-root").mkdir()
    dead_socket(state / control.SOCKET)
    dead_socket(sockets / "gpu-plugin-gpu-0-1.sock")
    SpecDirectory(cdi).write({GPU_FILE: spec(_0=("/dev/nvidia0",))})
    done = remove_traces(state, cdi, sockets)
    assert done.left == []
    assert not state.exists()
    assert [*cdi.iterdir(), *sockets.iterdir()] == []
    assert {str(state), str(cdi / GPU_FILE)} < set(done.removed)
    assert remove_traces(state, cdi, sockets) == type(done)()


@pytest.mark.parametrize("content", [b"{}", to_json(spec(_0=("/dev/nvidia0",)))])
def test_a_cdi_specification_of_another_program_is_left_and_no_fault(node, content):
    state, cdi, sockets = node
    (cdi / GPU_FILE).write_bytes(content)
    done = remove_traces(state, cdi, sockets)
    assert (cdi / GPU_FILE).exists()
    assert done.left == []
    [sentence] = done.out_of_reach
    assert str(cdi / GPU_FILE) in sentence


def test_the_file_of_labels_goes_where_it_is_ours(node, tmp_path):
    state, cdi, sockets = node
    features = tmp_path / "features.d"
    assert remove_traces(state, cdi, sockets, features).left == []
    for former in (features, tmp_path / "former"):
        former.mkdir()
        write_labels(former, state)
    done = remove_traces(state, cdi, sockets, features)
    assert {str(features / "gfd"), str(tmp_path / "former" / "gfd")} < set(done.removed)
    assert done.left == []
    (features / "gfd").write_text("nvidia.com/gpu.count=8\nnvidia.com/gpu.present=true\n")
    assert remove_traces(state, cdi, sockets, features) == type(done)()
    assert (features / "gfd").exists()


@pytest.mark.parametrize("why", ["read-only", "away"])
def test_a_file_of_labels_that_cannot_be_removed_is_found_by_the_next_cleanup(node, tmp_path, monkeypatch, why):
    state, cdi, sockets = node
    features, away = tmp_path / "features.d", tmp_path / "away"
    features.mkdir()
    write_labels(features, state)
    (state / "state-a.log").write_text("{}")
    if why == "away":
        features.rename(away)
    for _ in range(2):
        with monkeypatch.context() as patched:
            if why == "read-only":
                patched.setattr(Path, "unlink", refusing(features, Path.unlink))
            done = remove_traces(state, cdi, sockets, features)
        told, untold = (done.out_of_reach, done.left) if why == "away" else (done.left, done.out_of_reach)
        assert [sentence.partition(": ")[0] for sentence in told] == [str(features / "gfd")]
        assert FEATURES_FILE in told[0]
        assert untold == []
        assert [path.name for path in state.iterdir()] == [FEATURES_FILE]
    if why == "away":
        away.rename(features)
    done = remove_traces(state, cdi, sockets, tmp_path / "another")
    assert done.left + done.out_of_reach == []
    assert set(done.removed) == {str(features / "gfd"), str(state / FEATURES_FILE), str(state)}
    assert not state.exists()


def test_of_two_files_of_labels_only_the_one_that_is_left_stays_remembered(node, tmp_path):
    state, cdi, sockets = node
    features, former = tmp_path / "features.d", tmp_path / "former"
    for directory in (features, former):
        directory.mkdir()
        write_labels(directory, state)
    former.rename(tmp_path / "away")
    assert str(features / "gfd") in remove_traces(state, cdi, sockets, features).removed
    remembered = StateDirectory(state).read(FEATURES_FILE, WrittenFiles)
    assert remembered is not None
    assert remembered.directories() == {str(former)}


def test_what_is_not_ours_stays_and_is_named(node):
    state, cdi, sockets = node
    foreign = [state / "dev", state / "notes.txt", cdi / "vendor.json", sockets / "kubelet.sock"]
    foreign[0].mkdir()
    foreign[1].write_text("mine")
    foreign[2].write_text("{}")
    dead_socket(foreign[3])
    (state / "state-a.log").write_text("{}")
    done = remove_traces(state, cdi, sockets)
    assert done.removed == [str(state / "state-a.log")]
    assert done.left == [f"{state}: contains files that are not this plugin's: dev, notes.txt"]
    assert all(path.exists() for path in foreign)


def test_a_link_is_removed_and_not_what_it_leads_to(node, tmp_path):
    state, cdi, sockets = node
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("keep")
    (state / "simulated-node.json").write_text("{}")
    (state / "dev").symlink_to(precious)
    (state / "state-a.log").symlink_to(precious / "data")
    assert remove_traces(state, cdi, sockets).left == []
    assert (precious / "data").read_text() == "keep"


async def test_a_running_daemon_is_left_alone(node):
    state, cdi, sockets = node
    (state / "state-a.log").write_text("{}")
    async with server.serve(state, {}):
        done = remove_traces(state, cdi, sockets)
        assert done.removed == []
        assert "a daemon is running" in done.left[0]
        assert (state / "state-a.log").exists()


@pytest.mark.parametrize("shared", ["state", "sockets"])
def test_a_daemon_whose_control_socket_is_gone_is_left_alone_all_the_same(node, tmp_path, shared):
    state, cdi, sockets = node
    (tmp_path / "own").mkdir()
    lock = NodeLock(state if shared == "state" else tmp_path / "own", sockets if shared == "sockets" else tmp_path, "1")
    assert lock.take() == ""
    (state / "state-a.log").write_text("{}")
    done = remove_traces(state, cdi, sockets)
    assert done.removed == []
    assert "a daemon is running: another daemon" in done.left[0]
    assert (state / "state-a.log").exists()
    lock.release()
    assert str(state / "state-a.log") in remove_traces(state, cdi, sockets).removed


def test_what_cannot_be_removed_is_said_and_the_rest_goes(node, monkeypatch):
    state, cdi, sockets = node
    SpecDirectory(cdi).write({GPU_FILE: spec(_0=("/dev/nvidia0",))})
    monkeypatch.setattr(Path, "unlink", refusing(cdi, Path.unlink))
    (state / "state-a.log").write_text("{}")
    done = remove_traces(state, cdi, sockets)
    assert not state.exists()
    assert len(done.left) == 1
    assert "k8s.device-plugin.nvidia.com-gpu.json" in done.left[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_who_may_not_read_the_directories_gets_a_sentence_for_each(node):
    state, cdi, sockets = node
    SpecDirectory(cdi).write({GPU_FILE: spec(_0=("/dev/nvidia0",))})
    (state / "state-a.log").write_text("{}")
    for directory in node:
        directory.chmod(0o700)
    state.parent.chmod(0o755)
    me = os.geteuid()
    os.seteuid(65534)
    try:
        done = remove_traces(state, cdi, sockets)
    finally:
        os.seteuid(me)
    assert done.removed == []
    assert sum(sentence.startswith(f"{state}: ") for sentence in done.left) == 1
    assert any(sentence.startswith(f"{cdi / GPU_FILE}: ") for sentence in done.left)
    assert {str(state), str(cdi / GPU_FILE)} < set(remove_traces(state, cdi, sockets).removed)


@pytest.mark.parametrize("inner", ["nvidia0", b"nvidia0", None, 7])
def test_what_is_left_is_told_by_its_whole_path(node, monkeypatch, inner):
    state, cdi, sockets = node
    (state / "simulated-node.json").write_text("{}")
    (state / "dev").mkdir()

    def refuse(_path):
        raise OSError(errno.EROFS, "Read-only file system", inner)  # by a name in a directory, as `rmtree` has it

    monkeypatch.setattr(shutil, "rmtree", refuse)
    done = remove_traces(state, cdi, sockets)
    named = " (nvidia0)" if inner in {"nvidia0", b"nvidia0"} else ""
    assert done.left[0] == f"{state / 'dev'}: Read-only file system{named}"


def test_a_state_directory_that_is_a_link_is_left_for_people(node, tmp_path):
    state, cdi, sockets = node
    link = tmp_path / "link"
    link.symlink_to(state)
    (state / "state-a.log").write_text("{}")
    done = remove_traces(link, cdi, sockets)
    assert done.removed == [str(link / "state-a.log")]
    assert done.left == [f"{link}: is a link to {state}: remove both by hand"]


def test_a_socket_that_is_in_use_is_told(node):
    state, cdi, sockets = node
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(sockets / "gpu-plugin-gpu-1-1.sock"))
        living.listen()
        done = remove_traces(state, cdi, sockets)
    assert done.left == [f"{sockets / 'gpu-plugin-gpu-1-1.sock'}: a socket that is in use, or cannot be removed"]


def test_a_file_of_labels_that_is_out_of_reach_fails_no_cleanup(node, tmp_path, capsys):
    state, cdi, sockets = node
    features = tmp_path / "features.d"
    features.mkdir()
    write_labels(features, state)
    features.rename(tmp_path / "unmounted")
    (state / "state-a.log").write_text("{}")
    command = ["cleanup", "--state-dir", str(state), "--cdi-dir", str(cdi), "--device-plugin-dir", str(sockets)]
    for told_first in (f"{state / 'state-a.log'}: removed\n", ""):
        assert main(command) == 0
        told = capsys.readouterr()
        assert told.out == told_first
        assert told.err.startswith(f"left: {features / 'gfd'}: its directory is not there: on the node, remove ")
        assert (state / FEATURES_FILE).exists()


def test_a_config_file_that_is_gone_keeps_nobody_from_cleaning_up(node, monkeypatch, capsys):
    state, cdi, sockets = node
    for name, value in {
        "CONFIG_FILE": "/gone.yaml",
        "STATE_DIR": state,
        "CDI_DIR": cdi,
        "DEVICE_PLUGIN_DIR": sockets,
    }.items():
        monkeypatch.setenv(name, str(value))
    (state / "state-a.log").write_text("{}")
    assert main(["cleanup"]) == 0
    told = capsys.readouterr()
    assert f"{state}: removed" in told.out
    assert "using flags and environment only" in told.err
