"""The stored choice of the node's label: read back whole, or not at all if the file is damaged."""

import os

import pytest

from gpu_plugin.config.resolve import resolve
from gpu_plugin.daemon.config_source import CHOICE_FILE, LastChoice


def choice(state, **other):
    asked = {"config_file_srcdir": "/configs", "node_name": "node-é", "node_label": "example.com/config", **other}
    return LastChoice(resolve({"state_dir": str(state), **asked}, {}))


def test_it_outlives_the_process(tmp_path):
    assert choice(tmp_path).read() is None
    choice(tmp_path).write("a100")
    assert choice(tmp_path).read() == "a100"
    choice(tmp_path).write("")  # an empty choice is also a choice
    assert choice(tmp_path).read() == ""


@pytest.mark.parametrize(
    "other", [{"node_name": "n2"}, {"node_label": "example.com/c"}, {"config_file_srcdir": "/etc"}]
)
def test_it_is_of_one_node_one_label_and_one_directory(tmp_path, other):
    choice(tmp_path).write("a100")
    assert choice(tmp_path, **other).read() is None
    assert choice(tmp_path).read() == "a100"


def test_no_byte_that_is_wrong_and_no_length_that_is_cut_makes_it_another_choice(tmp_path):
    choice(tmp_path).write("a100")
    file = tmp_path / CHOICE_FILE
    whole = file.read_bytes()
    spoilt = [whole[:at] + b"\xff" + whole[at + 1 :] for at in range(len(whole))]
    for content in (*spoilt, *(whole[:length] for length in range(len(whole) - 1))):
        file.write_bytes(content)
        assert choice(tmp_path).read() is None
        assert (tmp_path / f"{CHOICE_FILE}.corrupt").read_bytes() == content
    choice(tmp_path).write("h100")
    assert choice(tmp_path).read() == "h100"


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_what_stands_in_its_place_is_not_believed_and_makes_room(tmp_path, caplog, kind):
    state, file = tmp_path / "state", tmp_path / "state" / CHOICE_FILE
    choice(state).write("a100")
    file.rename(tmp_path / "elsewhere")
    make = {
        "link": lambda: file.symlink_to(tmp_path / "elsewhere"),
        "fifo": lambda: os.mkfifo(file),
        "directory": file.mkdir,
    }
    make[kind]()
    assert choice(state).read() is None
    assert f"{file} cannot be read, so its content is lost (kept as {file}.corrupt)" in caplog.text
    choice(state).write("h100")
    assert choice(state).read() == "h100"
    assert (tmp_path / "elsewhere").read_bytes().count(b"a100") == 1


def test_where_nothing_can_be_written_it_is_known_by_nobody(tmp_path, caplog):
    file = tmp_path / "file"
    file.touch()
    choice(file / "state").write("a100")
    assert "cannot be written" in caplog.text
    assert choice(file / "state").read() is None
