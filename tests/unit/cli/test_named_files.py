"""A path of an operator is refused at once, in one sentence with the path, if it is not a regular file of a possible size."""

import logging
import os
import socket

import pytest

from gpu_plugin.cli import main
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.resolve import resolve
from gpu_plugin.daemon.config_source import ConfigSource
from gpu_plugin.simulation import saved
from gpu_plugin.simulation.gpu import GpuState
from gpu_plugin.simulation.profile import load

HUGE = 300_000_000


def directory(path):
    path.mkdir()


def pipe(path):
    os.mkfifo(path)


def listening(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)  # in the working directory: a path may be too long for a socket


def endless(path):
    path.symlink_to("/dev/zero")


def huge(path):
    with path.open("wb") as file:
        file.truncate(HUGE)


VERBS = [
    ("run", "--config-file"),
    ("validate",),
    ("mps", "--config-file"),
    ("topology", "--simulate"),
    ("simulate-allocation", "--size", "1", "--simulate"),
    ("cdi", "generate", "--simulate"),
    ("cdi", "validate"),
    ("uninstall", "--namespace", "n", "--daemonset", "d", "--kubeconfig"),
]


@pytest.fixture(params=[directory, pipe, listening, endless, huge])
def unfit(request, tmp_path, monkeypatch):
    """The path of something other than a readable regular file."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "named.yaml"
    request.param(path)
    return path


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_file_that_can_be_none_is_one_sentence_of_bad_usage(verb, unfit, capsys):
    assert main([*verb, str(unfit)]) == 2
    shown = capsys.readouterr()
    (line,) = (shown.out + shown.err).splitlines()
    assert str(unfit) in line
    assert len(line) < 300


def test_a_kubeconfig_that_can_be_none_is_refused_before_it_is_read(unfit):
    asked = {"config_file_srcdir": "/configs", "node_name": "n", "kubeconfig": str(unfit)}
    with pytest.raises(ConfigError, match=f"--kubeconfig: {unfit}: is "):
        ConfigSource(resolve(asked, {}))


def test_a_kubeconfig_that_may_come_is_waited_for(tmp_path):
    asked = {"config_file_srcdir": "/configs", "node_name": "n", "kubeconfig": str(tmp_path / "later")}
    assert ConfigSource(resolve(asked, {})).selected() is None


def test_what_a_simulated_node_was_like_is_read_with_a_bound(unfit, caplog):
    caplog.set_level(logging.WARNING)
    assert saved.read(unfit, load("t4-4"), keep=False) is None
    (record,) = caplog.records
    assert str(unfit) in record.message
    assert "starts fresh" in record.message


def test_no_byte_of_what_a_simulated_node_was_like_is_believed_that_is_wrong(tmp_path, caplog):
    profile, file = load("t4-4"), tmp_path / "node.json"
    gpus = [GpuState(energy_since=1.0, temperature=90, lost=True) for _ in profile.gpus]
    saved.write(file, saved.SavedNode(profile=profile.name, boot_id="boot", gpus=gpus))
    assert saved.read(file, profile, keep=False) is not None
    whole = file.read_bytes()
    spoilt = [whole[:at] + b"\xff" + whole[at + 1 :] for at in range(len(whole))]
    for content in (*spoilt, *(whole[:length] for length in range(len(whole) - 1))):
        caplog.clear()
        file.write_bytes(content)
        assert saved.read(file, profile, keep=False) is None
        assert "starts fresh" in caplog.text
