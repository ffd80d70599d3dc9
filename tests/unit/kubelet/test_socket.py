"""Names of our sockets, and the removal of dead ones."""

import os
import socket
from contextlib import closing
from pathlib import Path

import pytest

from gpu_plugin.config.socket_path import room
from gpu_plugin.kubelet import socket as sockets
from gpu_plugin.kubelet.socket import identity, remove_stale, socket_path


def bound(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    return made


def test_no_two_incarnations_or_instances_share_a_name():
    names = {socket_path(Path("/d"), "nvidia.com/gpu", n, i) for n in range(3) for i in ("a", "b")}
    assert len(names) == 6


@pytest.mark.parametrize("length", [32, 60, 72])
def test_a_name_is_shortened_to_fit_a_socket_address(length):
    path = socket_path(Path("/" + "d" * (length - 1)), "nvidia.com/" + "m" * 63, 999_999)
    assert room(str(path)) >= 0
    with closing(socket.socket(socket.AF_UNIX)) as probe:
        assert probe.connect_ex(str(path)) != 0  # and the address itself is one


def test_a_directory_too_long_for_any_name_is_said():
    with pytest.raises(ValueError, match="too long a path"):
        socket_path(Path("/" + "d" * 100), "nvidia.com/gpu", 1)


def test_only_dead_sockets_of_our_own_are_removed(directory):
    bound(directory / "gpu-plugin-gpu-dead-1.sock").close()
    bound(directory / "nvidia-gpu.sock").close()
    (directory / "gpu-plugin-notes.txt").touch()
    (directory / "kubelet_internal_checkpoint").touch()
    with closing(bound(directory / "gpu-plugin-gpu-alive-1.sock")) as alive:
        alive.listen()
        assert remove_stale(directory) == ["gpu-plugin-gpu-dead-1.sock"]
    assert sorted(p.name for p in directory.iterdir()) == [
        "gpu-plugin-gpu-alive-1.sock",
        "gpu-plugin-notes.txt",
        "kubelet_internal_checkpoint",
        "nvidia-gpu.sock",
    ]


def test_a_directory_that_is_not_there_has_nothing_to_remove(directory):
    assert remove_stale(directory / "none") == []


def test_a_socket_made_again_is_another_one_even_under_the_same_inode_number(directory):
    path = directory / "kubelet.sock"
    bound(path).close()
    first = identity(path)
    path.unlink()
    bound(path).close()
    assert identity(path) != first
    assert identity(directory / "none") is None
    assert identity(directory) is None


@pytest.mark.parametrize("without_statx", [False, True])
def test_what_is_done_to_a_socket_makes_it_no_other(directory, monkeypatch, without_statx):
    path, elsewhere = directory / "kubelet.sock", directory / "other.sock"
    bound(path).close()
    if without_statx:
        monkeypatch.setattr(sockets, "_statx", lambda: None)
        assert identity(path) == (path.stat().st_dev, path.stat().st_ino, path.stat().st_ctime_ns)
        return
    first = identity(path)
    path.chmod(0o600)
    os.utime(path)
    elsewhere.hardlink_to(path)
    path.rename(directory / "away.sock")
    elsewhere.rename(path)
    assert identity(path) == first
