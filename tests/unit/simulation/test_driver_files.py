import os
from pathlib import Path

import pytest

from gpu_plugin.containers.driver_root.search import Search
from gpu_plugin.simulation import driver_files
from gpu_plugin.simulation.device_nodes import device_numbers
from gpu_plugin.simulation.host import SimulatedHost

from .opened import make_node


def test_a_simulated_nodes_driver_is_found_as_a_real_one_and_made_once(tmp_path):
    root = driver_files.make(tmp_path / "root", "550.54.15")
    search = Search([(str(root), "")])
    files = search.files("550.54.15")
    assert (files.fault, files.complaints, files.version) == ("", (), "550.54.15")
    names = {name for library in files.libraries for name in library.names}
    assert {
        "libcuda.so.1",
        "libcuda.so",
        "libnvidia-ml.so.1",
        "libnvidia-nvvm.so.4",
        "libnvidia-opticalflow.so",
    } <= names
    assert [file.container_path for file in files.files] == ["/usr/bin/nvidia-smi"]
    driver_files.make(root, "550.54.15")
    search.files("550.54.15")
    assert search.searches == 1  # existing files are not written again
    (root / "usr/lib64/libcuda.so.1").unlink()
    (root / "usr/lib64/libcuda.so.1").symlink_to("elsewhere")
    driver_files.make(root, "570.1.1")
    assert search.files("570.1.1").complaints == ()
    assert not list(root.glob("usr/lib64/*.550.54.15"))
    assert (root / "usr/lib64/libcuda.so.1").readlink() == Path("libcuda.so.570.1.1")


def test_a_simulated_host_has_its_device_nodes_with_the_numbers_that_they_are_made_with(tmp_path):
    node = make_node("a100-mig-mixed", tmp_path)
    devices = SimulatedHost(node).devices(["00000000:07:00.0"])
    assert devices.nodes.keys() == node.device_nodes()
    assert {path: os.makedev(each.major, each.minor) for path, each in devices.nodes.items()} == device_numbers(
        node.device_nodes()
    )
    assert devices.drm == {}


@pytest.mark.parametrize("umask", [0, 0o002, 0o022, 0o077])
def test_nobody_but_the_owner_may_write_to_them_whatever_the_umask_is(tmp_path, umask):
    before = os.umask(umask)
    try:
        root = driver_files.make(tmp_path / "state/root", "550.1")
    finally:
        os.umask(before)
    assert [path for path in (root, *root.rglob("*")) if not path.is_symlink() and path.stat().st_mode & 0o022] == []
