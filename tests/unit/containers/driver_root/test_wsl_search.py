import os

import pytest

from gpu_plugin.containers.cdi.host_files import DeviceFile, HostDevices
from gpu_plugin.containers.cdi.options import CdiOptions
from gpu_plugin.containers.driver_root import wsl
from gpu_plugin.containers.driver_root.wsl import WslSearch
from gpu_plugin.simulation.driver_files import shared_library
from tests.unit.containers.driver_root.installed import put

NEW, OLD = "nv_dispi.inf_amd64_0373d825005116d0", "nv_dispi.inf_amd64_6f3cfb7117944855"
STORE = "usr/lib/wsl/drivers"
DXG = HostDevices({"/dev/dxg": DeviceFile(10, 125)})

SONAMES = {
    "libcuda.so.1.1": "libcuda.so.1",
    "libcuda_loader.so": "libcuda.so.1",
    "libnvidia-ptxjitcompiler.so.1": "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-ml.so.1": "libnvidia-ml.so.1",
    "libnvidia-ml_loader.so": "libnvidia-ml.so.1",
    "libnvdxgdmal.so.1": "libnvdxgdmal.so.1",
}


def library(soname):
    return shared_library(soname, "x86_64")


def driver(root, name=NEW, mark=b"", written=None):
    """A driver of NVIDIA in the store; `mark` makes its loader different from other loaders."""
    for file, soname in SONAMES.items():
        put(root, f"{STORE}/{name}/{file}", library(soname) + mark)
    os.utime(root / STORE / name / "libcuda_loader.so", (1, 1))  # Windows gives all files of a driver its date
    for file in ("nvcubins.bin", "nvidia-smi", "nvcuda64.dll", "nv_dispi.inf"):
        put(root, f"{STORE}/{name}/{file}")
    if written is not None:
        os.utime(root / STORE / name / "libcuda.so.1.1", (written, written))


def windows(root, mark=b""):
    """WSL's own directory, with the loader of the driver in use."""
    put(root, "usr/lib/wsl/lib/libdxcore.so", library("libdxcore.so"))
    os.utime(put(root, "usr/lib/wsl/lib/libcuda.so.1", library("libcuda.so.1") + mark), (1, 1))


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "root"
    path.mkdir()
    return path


def search(*roots):
    return WslSearch([(str(root), f"/host/{root.name}") for root in roots])


def paths(files):
    return [each.seen.path for each in files.libraries], [seen.path for seen in files.files]


def mounts(files):
    (spec,) = wsl.wsl_specs(files, DXG, CdiOptions(driver_root="/host")).specs.values()
    return {mount.container_path: mount.host_path for mount in spec.container_edits.mounts}


def test_the_store_of_nvidias_display_driver_is_found_among_those_of_others(root):
    windows(root)
    driver(root)
    put(
        root, f"{STORE}/iigd_dch.inf_amd64_73655f941b1dd71f/libcuda.so.1.1", library("libcuda.so.1")
    )  # Intel's graphics
    put(root, f"{STORE}/nvhda.inf_amd64_1/nvhda64v.sys")  # NVIDIA's audio
    put(root, f"{STORE}/nv_dispi.inf_amd64_9")
    found = search(root).files()
    libraries, files = paths(found)
    assert libraries == [f"/{STORE}/{NEW}/{name}" for name in SONAMES]
    assert files == [f"/{STORE}/{NEW}/{name}" for name in ("nvcubins.bin", "nvidia-smi")]
    assert found.dxcore.seen.path == "/usr/lib/wsl/lib/libdxcore.so"
    assert (found.fault, found.complaints) == ("", ())
    assert mounts(found)["/usr/lib/x86_64-linux-gnu/libcuda.so.1"] == f"/host/{STORE}/{NEW}/libcuda_loader.so"


def test_libraries_and_data_that_newer_drivers_bring_go_along(root):
    windows(root)
    driver(root)
    put(root, f"{STORE}/{NEW}/libnvdxdlkernels.so", library("libnvdxdlkernels.so"))
    put(root, f"{STORE}/{NEW}/nvoptix.bin")
    libraries, files = paths(search(root).files())
    assert libraries[-1].endswith("/libnvdxdlkernels.so")
    assert files[-1].endswith("/nvoptix.bin")


@pytest.mark.parametrize(
    ("in_use", "newest", "expected", "why"),
    [
        (b"old", NEW, OLD, "since its libcuda_loader.so is also in /usr/lib/wsl/lib"),
        (b"new", OLD, NEW, "since its libcuda_loader.so is also in /usr/lib/wsl/lib"),
        (b"any", NEW, NEW, "which was written last"),
        (b"any", OLD, OLD, "which was written last"),
        (None, OLD, OLD, "which was written last"),
    ],
)
def test_of_several_drivers_that_in_use_is_taken_else_the_newest(root, in_use, newest, expected, why):
    windows(root, in_use or b"")
    if in_use is None:
        (root / "usr/lib/wsl/lib/libcuda.so.1").unlink()
    driver(root, OLD, b"old", 2000 if newest == OLD else 1000)
    driver(root, NEW, b"new", 2000 if newest == NEW else 1000)
    found = search(root).files()
    assert {path.split("/")[5] for path in paths(found)[0]} == {expected}
    (complaint,) = found.complaints
    assert f"in the driver root /host/root has several NVIDIA drivers, {NEW}, {OLD}; containers get" in complaint
    assert f"/{STORE}/{expected}, {why}" in complaint


@pytest.mark.parametrize("directory", ["usr/lib/x86_64-linux-gnu", "usr/lib64"])
def test_dxcore_lies_elsewhere_in_a_node_that_is_a_container(root, directory):
    driver(root)
    put(root, f"{directory}/libdxcore.so", library("libdxcore.so"))
    found = search(root).files()
    assert found.dxcore.seen.path == f"/{directory}/libdxcore.so"
    assert f"/{directory}/libdxcore.so" in mounts(found)


def test_a_dxcore_that_is_no_library_is_passed_over_for_one_that_is(root):
    driver(root)
    put(root, "usr/lib/wsl/lib/libdxcore.so")
    put(root, "usr/lib64/libdxcore.so", library("libdxcore.so"))
    assert search(root).files().dxcore.seen.path == "/usr/lib64/libdxcore.so"
    (root / "usr/lib64/libdxcore.so").unlink()
    built = wsl.wsl_specs(search(root).files(), DXG, CdiOptions())
    assert "no libdxcore.so that programs can load: /usr/lib/wsl/lib/libdxcore.so" in built.trouble
    assert "not an ELF file" in built.trouble


def test_without_a_driver_it_says_what_to_do(root):
    windows(root)
    (root / STORE / "nvhda.inf_amd64_1").mkdir(parents=True)
    found = search(root).files()
    assert (found.libraries, found.files) == ((), ())
    assert "the driver root /host/root has no libcuda.so.1.1" in found.fault
    assert "install NVIDIA's driver on the Windows host" in found.fault


def test_the_first_root_with_a_driver_is_used(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    windows(first)
    windows(second)
    driver(second)
    looking = search(first, second)
    assert looking.files().libraries
    assert looking.host_root == "/host/second"
    driver(first)
    assert looking.files().libraries
    assert looking.host_root == "/host/first"


def test_it_is_searched_again_only_where_something_changed(root):
    windows(root)
    looking = search(root)
    assert looking.files().fault
    driver(root)
    assert not looking.files().fault
    before = looking.files()
    assert looking.files() is before
    assert looking.searches == 2
    driver(root, OLD, written=1)
    assert looking.files().complaints
    (root / STORE / NEW / "nvcubins.bin").unlink()
    assert any("has no nvcubins.bin" in complaint for complaint in looking.files().complaints)
    assert looking.searches == 4
