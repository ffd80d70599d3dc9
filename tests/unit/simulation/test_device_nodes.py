import os
import stat
from pathlib import Path

import pytest

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.simulation import device_nodes, faults, profile
from gpu_plugin.simulation.hardware import SimulatedNode

from .opened import make_node

H200 = {
    "/dev/nvidia-caps/nvidia-cap1": (241, 1),
    "/dev/nvidia-caps/nvidia-cap2": (241, 2),
    "/dev/nvidia-uvm": (238, 0),
    "/dev/nvidia-uvm-tools": (238, 1),
    "/dev/nvidia0": (195, 0),
    "/dev/nvidiactl": (195, 255),
}


def can_make_nodes(folder):
    try:
        os.mknod(folder / "probe", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        return False
    (folder / "probe").unlink()
    return True


@pytest.fixture
def root(tmp_path):
    if not can_make_nodes(tmp_path):
        pytest.skip("needs the right to make device nodes")
    return tmp_path


def made(root):
    found = {}
    for parent, _, files in os.walk(root / "dev"):
        for path in (Path(parent, name) for name in files):
            status = path.lstat()
            assert stat.S_ISCHR(status.st_mode)
            assert stat.S_IMODE(status.st_mode) == 0o666
            found[f"/{path.relative_to(root)}"] = os.major(status.st_rdev), os.minor(status.st_rdev)
    return found


def test_numbers_are_the_real_ones():
    numbers = device_nodes.device_numbers(profile.load("h200").device_nodes)
    assert {path: (os.major(number), os.minor(number)) for path, number in numbers.items()} == H200


@pytest.mark.parametrize("name", profile.names())
def test_no_two_paths_share_a_number(name):
    numbers = device_nodes.device_numbers(profile.load(name).device_nodes | {"/dev/one", "/dev/two"})
    assert len(set(numbers.values())) == len(numbers)


def test_nodes_are_made_and_made_once(root):
    node = make_node("h200")
    assert device_nodes.make(node, root) == root
    assert made(root) == H200
    first = (root / "dev/nvidia0").lstat()
    assert device_nodes.make(SimulatedNode(node.profile), root) == root
    assert (root / "dev/nvidia0").lstat() == first


def test_the_umask_takes_nothing_away(root):
    before = os.umask(0o077)
    try:
        device_nodes.make(make_node("h200"), root)
    finally:
        os.umask(before)
    assert made(root) == H200


def test_nodes_of_another_profile_go_and_nothing_else(root):
    device_nodes.make(make_node("hgx-h100"), root)
    (root / "dev/note").write_text("not ours")
    os.mknod(root / "dev/nvidia-fs9", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    (root / "dev/nvidiactl").unlink()
    os.mknod(root / "dev/nvidiactl", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    (root / "dev/nvidia-uvm").chmod(0o600)
    device_nodes.make(make_node("h200"), root)
    assert (root / "dev/note").read_text() == "not ours"
    (root / "dev/note").unlink()
    assert made(root) == H200
    assert not (root / "dev/infiniband").exists()


def test_a_file_in_the_way_is_left_and_named(root):
    (root / "dev").mkdir()
    (root / "dev/nvidia0").write_text("")
    with pytest.raises(ConfigError, match=r"dev/nvidia0: is in the way"):
        device_nodes.make(make_node("h200"), root)


def caps(root):
    return {
        path.removeprefix("/dev/nvidia-caps/nvidia-cap"): numbers
        for path, numbers in made(root).items()
        if "cap" in path
    }


def test_the_nodes_of_mig_devices_follow_what_a_gpu_is_cut_into(root):
    node = make_node("h200")
    device_nodes.make(node, root)
    assert node.device_root == root
    faults.apply(node, {"gpu": 0, "mig": "3g.71gb,1c.3g.71gb"})
    assert caps(root) == {str(n): (241, n) for n in (1, 2, 12, 13, 21, 22)}
    faults.apply(node, {"gpu": 0, "mig": "1g.18gb"})
    assert caps(root) == {str(n): (241, n) for n in (1, 2, 66, 67)}
    faults.apply(node, {"gpu": 0, "mig": "none"})
    assert made(root) == H200


def test_a_node_that_starts_cut_has_the_nodes_of_it(root):
    node = make_node("a100-mig-mixed")
    device_nodes.make(node, root)
    assert {path for path in made(root) if "caps" in path} == {p for p in node.device_nodes() if "caps" in p}
    assert len(caps(root)) == 2 + 14 + 4 + 8 + 5


def test_where_no_nodes_were_made_none_are_made_later(tmp_path):
    node = make_node("h200", tmp_path)
    faults.apply(node, {"gpu": 0, "mig": "1g.18gb"})
    assert node.device_root is None
    assert not (tmp_path / "dev").exists()


def test_nodes_that_cannot_follow_are_said_and_spoil_no_fault(tmp_path, caplog):
    node = make_node("h200")
    (tmp_path / "dev").symlink_to("/dev")
    node.device_root = tmp_path
    assert faults.apply(node, {"gpu": 0, "mig": "1g.18gb"}).endswith("partitioned into 1g.18gb.")
    assert "the device nodes of the simulated node stay as they were: " in caplog.text


@pytest.mark.parametrize("link", [True, False])
def test_the_host_s_own_dev_is_never_touched(tmp_path, link):
    if link:
        (tmp_path / "dev").symlink_to("/dev")
    with pytest.raises(ConfigError, match="the host's own /dev"):
        device_nodes.make(make_node("h200"), tmp_path if link else Path("/"))


@pytest.mark.parametrize(("user", "why"), [(1000, ": only root may make them"), (0, ": Operation not permitted")])
def test_without_the_right_to_make_nodes_one_line_says_why(tmp_path, monkeypatch, caplog, user, why):
    def refused(path, *_):
        raise PermissionError(1, "Operation not permitted", str(path))

    caplog.set_level("INFO")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "mknod", refused)
    assert device_nodes.make(make_node("h200"), tmp_path) is None
    (line,) = caplog.messages
    assert line.startswith("simulated device nodes are not made: ")
    assert line.endswith(why)
    assert (tmp_path / "dev").exists() is (user == 0)
