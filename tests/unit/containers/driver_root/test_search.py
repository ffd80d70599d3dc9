import errno
import os
import subprocess
from functools import partial
from pathlib import Path

import msgspec
import pytest

from gpu_plugin.containers.cdi.host_files import LIBRARY_DIRECTORIES, DriverFiles
from gpu_plugin.containers.driver_root.search import Search
from tests.unit.containers.driver_root.installed import VERSION, Root, ld_cache_of

HOST = "/run/nvidia/driver"
KERNEL = "6.1.0-18-amd64"


@pytest.fixture
def root(tmp_path):
    return Root(tmp_path / "driver-root")


@pytest.fixture
def search(root):
    """Of that root, which the host calls otherwise."""
    return Search([(str(root), HOST)], KERNEL)


def bound(files: DriverFiles) -> dict[str, str]:
    """The file behind each name in the loader's directories."""
    return {name: library.target for library in files.libraries for name in library.names}


def placed(files: DriverFiles) -> dict[str, str]:
    return {file.container_path: file.target for file in files.files}


def found(search: Search, running: str = VERSION) -> DriverFiles:
    """The files of a search without complaints."""
    files = search.files(running)
    assert (files.fault, files.complaints, files.version) == ("", (), VERSION)
    return files


def all_of(directory: str) -> dict[str, str]:
    return {
        "libcuda.so.1": f"{directory}/libcuda.so.{VERSION}",
        "libcuda.so": f"{directory}/libcuda.so.{VERSION}",
        "libnvidia-ml.so.1": f"{directory}/libnvidia-ml.so.{VERSION}",
    }


class Layout(msgspec.Struct, frozen=True):
    """Where a distribution or an installer puts a driver, by paths below the root without links."""

    libraries: str
    program: str = ""
    links: dict[str, str] = {}
    files: dict[str, bytes] = {}


DATA_CENTRE = "usr/lib/x86_64-linux-gnu/nvidia/tesla-535"

LAYOUTS = {
    "Ubuntu": Layout("usr/lib/x86_64-linux-gnu", program="usr/bin", links={"lib": "usr/lib"}),
    "Debian": Layout("usr/lib/x86_64-linux-gnu/nvidia/current", program="usr/lib/nvidia/current"),
    "Debian, driver for data centres": Layout(  # found by its alternatives
        DATA_CENTRE,
        links={
            "usr/lib/x86_64-linux-gnu/libcuda.so.1": "/etc/alternatives/nvidia--libcuda.so.1",
            "etc/alternatives/nvidia--libcuda.so.1": f"/{DATA_CENTRE}/libcuda.so.{VERSION}",
        },
    ),
    "RHEL": Layout("usr/lib64", program="usr/bin", links={"lib64": "usr/lib64"}),
    "Fedora CoreOS": Layout("usr/lib64", program="usr/bin", links={"lib64": "usr/lib64", "bin": "usr/bin"}),
    "Talos": Layout("usr/local/lib", program="usr/local/bin"),
    "Talos with glibc of its own": Layout("usr/local/glibc/usr/lib64", program="usr/local/bin"),
    "Talos before": Layout("usr/local/glibc/usr/lib", program="usr/local/bin"),
    "Bottlerocket": Layout(
        "x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla",
        program="x86_64-bottlerocket-linux-gnu/sys-root/usr/libexec/nvidia/tesla/bin",
        links={"usr": "x86_64-bottlerocket-linux-gnu/sys-root/usr"},
    ),
    "Bottlerocket before": Layout(
        "usr/lib/nvidia/tesla/550.1", files={"etc/ld.so.conf": b"/usr/lib/nvidia/tesla/550.1\n"}
    ),
    "Container-Optimized OS": Layout("var/lib/nvidia/lib64", program="var/lib/nvidia/bin"),
    "GKE": Layout("lib64", program="bin"),
    "Flatcar": Layout("opt/nvidia/550/usr/lib64", program="opt/bin", links={"opt/nvidia/current": "550"}),
    "Flatcar, configured": Layout("opt/nvidia/550/lib64", files={"etc/ld.so.conf": b"/opt/nvidia/550/lib64\n"}),
    "NixOS": Layout(
        "nix/store/abc-graphics-drivers/lib",
        program="nix/store/def-nvidia/bin",
        links={
            "run/opengl-driver": "/nix/store/abc-graphics-drivers",
            "run/current-system": "/nix/store/ghi-nixos",
            "nix/store/ghi-nixos/sw/bin/nvidia-smi": "/nix/store/def-nvidia/bin/nvidia-smi",
        },
    ),
    "driver container": Layout(
        "usr/lib/x86_64-linux-gnu",
        program="usr/bin",
        files={"etc/ld.so.cache": ld_cache_of(["/usr/lib/x86_64-linux-gnu/libcuda.so.1"])},
    ),
    "prebuilt image": Layout("usr/local/nvidia/lib64", program="usr/local/nvidia/bin"),
    "a site's own, cached": Layout("srv/gpu", files={"etc/ld.so.cache": ld_cache_of(["/srv/gpu/libcuda.so.1"])}),
    "a site's own, configured": Layout(
        "srv/gpu",
        files={"etc/ld.so.conf": b"include ld.so.conf.d/*.conf", "etc/ld.so.conf.d/gpu.conf": b"/opt/gpu"},
        links={"opt/gpu": "/srv/gpu"},
    ),
    "a site's own, linked": Layout(
        "data/550",
        files={"etc/ld.so.conf": b"/srv/gpu"},
        links={"srv/gpu/libcuda.so.1": f"/data/550/libcuda.so.{VERSION}"},
    ),
    "a link to a directory": Layout("data/libs", links={"usr/lib64": "../data/libs"}),
    "links on links": Layout("data/libs", links={"usr": "a/usr", "a/usr/lib64": "../../data/libs"}),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_where_distributions_and_installers_have_their_libraries_and_programs(root, search, layout):
    root.driver(layout.libraries)
    root.links(layout.links)
    for path, content in layout.files.items():
        root.write(path, content)
    if layout.program:
        root.write(f"{layout.program}/nvidia-smi")
    files = found(search)
    assert bound(files) == all_of(f"/{layout.libraries}")
    program = {"/usr/bin/nvidia-smi": f"/{layout.program}/nvidia-smi"} if layout.program else {}
    assert placed(files) == program


def test_the_directories_of_the_loader_are_searched_again_when_its_files_change(root, search):
    root.driver("srv/gpu")
    assert search.files(VERSION).libraries == ()
    root.write("etc/ld.so.conf", b"/srv/other\n")
    assert search.files(VERSION).libraries == ()
    root.write("etc/ld.so.conf", b"/srv/gpu\n/srv/other\n")
    assert bound(found(search)) == all_of("/srv/gpu")
    root.write("etc/ld.so.cache", ld_cache_of(["/srv/other/libcuda.so.1"]))
    assert search.files(VERSION).libraries == ()


def test_a_root_without_a_driver_is_told_with_the_directories_that_were_searched(root, search):
    root.write("etc/ld.so.conf", b"/srv/gpu\n")
    fault = search.files(VERSION).fault
    assert all(directory in fault for directory in (*LIBRARY_DIRECTORIES, "srv/gpu"))


def test_gke_has_its_binaries_and_vulkan_files_at_the_top_of_the_root(root, search):
    root.driver("lib64")
    root.write("bin/nvidia-smi")
    root.write("vulkan/icd.d/nvidia_icd.json")
    assert placed(found(search)) == {
        "/usr/bin/nvidia-smi": "/bin/nvidia-smi",
        "/etc/vulkan/icd.d/nvidia_icd.json": "/vulkan/icd.d/nvidia_icd.json",
    }


def test_everything_else_that_drivers_bring(root, search):
    root.driver("usr/lib64", names=("libcuda.so", "libnvidia-ml.so", "libnvidia-allocator.so", "libGLX_nvidia.so"))
    root.library(f"usr/lib64/vdpau/libvdpau_nvidia.so.{VERSION}", "libvdpau_nvidia.so.1")
    root.library("usr/lib64/libnvidia-egl-gbm.so.1.1.9", "libnvidia-egl-gbm.so.1")
    root.library("usr/lib64/libnvidia-egl-gbm.so.1.1.10", "libnvidia-egl-gbm.so.1")
    root.library("usr/lib64/libnvidia-egl-gbm.so.1.1.11.bak", "libnvidia-egl-gbm.so.1")
    root.library("usr/lib64/libnvidia-nvvm70.so.4", "libnvidia-nvvm70.so.4")
    root.library("usr/lib64/libforeign.so.1.2", "libforeign.so.1")
    root.link("usr/lib64/gbm/nvidia-drm_gbm.so", f"../libnvidia-allocator.so.{VERSION}")
    for path in (
        f"usr/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin",
        f"lib/firmware/{KERNEL}/nvidia/{VERSION}/gsp_ga10x.bin",
        "lib/firmware/nvidia/535.1.1/gsp_ga10x.bin",
        f"usr/lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin",
        f"usr/lib/firmware/nvidia/{VERSION}/readme",
        "usr/sbin/nvidia-persistenced",
        "usr/bin/other",
        "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "usr/share/glvnd/egl_vendor.d/50_mesa.json",
        "etc/OpenCL/vendors/nvidia.icd",
        "usr/share/nvidia/nvoptix.bin",
        "usr/local/share/vulkan/icd.d/nvidia_icd.json",
        "usr/local/share/egl/egl_external_platform.d/09_nvidia_wayland2.json",
        "usr/lib/xorg/modules/updates/drivers/nvidia_drv.so",
        "usr/lib64/xorg/modules/updates/drivers/nvidia_drv.so",
        f"usr/lib64/xorg/modules/updates/extensions/libglxserver_nvidia.so.{VERSION}",
        "etc/X11/xorg.conf.d/10-nvidia.conf",
        "usr/lib64/xorg/modules/drivers/nvidia_drv.so",
        f"usr/lib64/xorg/modules/extensions/libglxserver_nvidia.so.{VERSION}",
    ):
        root.write(path)
    files = found(search)
    assert bound(files) == {
        **all_of("/usr/lib64"),
        "libGLX_nvidia.so.0": f"/usr/lib64/libGLX_nvidia.so.{VERSION}",
        "libGLX_indirect.so.0": f"/usr/lib64/libGLX_nvidia.so.{VERSION}",
        "libnvidia-allocator.so.1": f"/usr/lib64/libnvidia-allocator.so.{VERSION}",
        "gbm/nvidia-drm_gbm.so": f"/usr/lib64/libnvidia-allocator.so.{VERSION}",
        "vdpau/libvdpau_nvidia.so.1": f"/usr/lib64/vdpau/libvdpau_nvidia.so.{VERSION}",
        "libnvidia-egl-gbm.so.1": "/usr/lib64/libnvidia-egl-gbm.so.1.1.10",
        "libnvidia-nvvm70.so.4": "/usr/lib64/libnvidia-nvvm70.so.4",
    }
    extensions = "/usr/lib64/xorg/modules/extensions"
    updates = "/usr/lib64/xorg/modules/updates/extensions"
    assert placed(files) == {
        "/usr/sbin/nvidia-persistenced": "/usr/sbin/nvidia-persistenced",
        f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin": f"/lib/firmware/{KERNEL}/nvidia/{VERSION}/gsp_ga10x.bin",
        f"/lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin": f"/usr/lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin",
        "/etc/OpenCL/vendors/nvidia.icd": "/etc/OpenCL/vendors/nvidia.icd",
        "/etc/X11/xorg.conf.d/10-nvidia.conf": "/etc/X11/xorg.conf.d/10-nvidia.conf",
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json": "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "/usr/share/nvidia/nvoptix.bin": "/usr/share/nvidia/nvoptix.bin",
        "/usr/share/vulkan/icd.d/nvidia_icd.json": "/usr/local/share/vulkan/icd.d/nvidia_icd.json",
        "/usr/share/egl/egl_external_platform.d/09_nvidia_wayland2.json": (
            "/usr/local/share/egl/egl_external_platform.d/09_nvidia_wayland2.json"
        ),
        "/usr/lib/xorg/modules/updates/drivers/nvidia_drv.so": "/usr/lib/xorg/modules/updates/drivers/nvidia_drv.so",
        "/usr/lib64/xorg/modules/drivers/nvidia_drv.so": "/usr/lib64/xorg/modules/drivers/nvidia_drv.so",
        "/usr/lib64/xorg/modules/updates/drivers/nvidia_drv.so": "/usr/lib64/xorg/modules/updates/drivers/nvidia_drv.so",
        f"{updates}/libglxserver_nvidia.so": f"{updates}/libglxserver_nvidia.so.{VERSION}",
        # X loads the extension by the name without a version.
        f"{extensions}/libglxserver_nvidia.so": f"{extensions}/libglxserver_nvidia.so.{VERSION}",
    }


def test_names_without_a_version_that_the_host_has(root, search):
    directory = "usr/lib/x86_64-linux-gnu"
    root.driver(directory, names=("libcuda.so", "libnvidia-ml.so"))
    root.library(f"{directory}/libnvcuvid.so.{VERSION}", "libnvcuvid.so.1")
    root.library(f"{directory}/libnvidia-encode.so.{VERSION}", "libnvidia-encode.so.1")
    root.library(f"{directory}/vdpau/libvdpau_nvidia.so.{VERSION}", "libvdpau_nvidia.so.1")
    root.library(f"usr/lib/libnvidia-encode.so.{VERSION}", "libnvidia-encode.so.1", "aarch64")
    root.links(
        {
            f"{directory}/libnvidia-ml.so": "/etc/alternatives/nvidia--libnvidia-ml.so",
            "etc/alternatives/nvidia--libnvidia-ml.so": f"/{directory}/libnvidia-ml.so.1",
            f"{directory}/libnvidia-ml.so.1": f"libnvidia-ml.so.{VERSION}",
            f"{directory}/libnvcuvid.so": f"libnvcuvid.so.{VERSION}",
            f"{directory}/vdpau/libvdpau_nvidia.so": f"libvdpau_nvidia.so.{VERSION}",
            "usr/lib/libnvidia-encode.so": f"libnvidia-encode.so.{VERSION}",  # of another processor
            f"{directory}/libnvidia-other.so": f"libnvidia-ml.so.{VERSION}",
        }
    )
    assert bound(found(search)) == {
        **all_of(f"/{directory}"),
        "libnvidia-ml.so": f"/{directory}/libnvidia-ml.so.{VERSION}",
        "libnvcuvid.so.1": f"/{directory}/libnvcuvid.so.{VERSION}",
        "libnvcuvid.so": f"/{directory}/libnvcuvid.so.{VERSION}",
        "libnvidia-encode.so.1": f"/{directory}/libnvidia-encode.so.{VERSION}",
        "vdpau/libvdpau_nvidia.so.1": f"/{directory}/vdpau/libvdpau_nvidia.so.{VERSION}",
        "vdpau/libvdpau_nvidia.so": f"/{directory}/vdpau/libvdpau_nvidia.so.{VERSION}",
    }


def test_a_socket_that_comes_or_goes_is_noticed_and_what_else_is_in_its_directory_is_not(root, search):
    root.driver("usr/lib64")
    (root.path / "tmp").mkdir()
    (root.path / "run").mkdir()
    assert placed(found(search)) == {}
    (root.path / "tmp/of-somebody-else").touch()
    (root.path / "run/of-somebody-else").mkdir()
    search.files(VERSION)
    assert search.searches == 1
    (root.path / "tmp/nvidia-mps").mkdir()
    root.listen("run/nvidia-persistenced/socket")
    assert placed(found(search)) == {
        "/run/nvidia-persistenced/socket": "/run/nvidia-persistenced/socket",
        "/tmp/nvidia-mps": "/tmp/nvidia-mps",
    }
    (root.path / "tmp/nvidia-mps/control").touch()
    search.files(VERSION)
    assert search.searches == 2
    (root.path / "run/nvidia-persistenced/socket").unlink()
    (root.path / "tmp/nvidia-mps").rename(root.path / "tmp/former")
    assert placed(found(search)) == {}


def test_the_file_that_storage_reads_may_be_a_link_that_is_moved(root, search):
    root.driver("usr/lib64")
    root.write("usr/local/cuda-12.2/gds/cufile.json")
    root.write("usr/local/cuda-12.4/gds/cufile.json")
    root.link("etc/cufile.json", "/etc/alternatives/cufile.json")
    alternative = root.link("etc/alternatives/cufile.json", "/usr/local/cuda-12.2/gds/cufile.json")
    assert placed(found(search)) == {"/etc/cufile.json": "/usr/local/cuda-12.2/gds/cufile.json"}
    alternative.unlink()
    alternative.symlink_to("/usr/local/cuda-12.4/gds/cufile.json")
    assert placed(found(search)) == {"/etc/cufile.json": "/usr/local/cuda-12.4/gds/cufile.json"}


CUVID = f"libnvcuvid.so.{VERSION}"
REPLACE_DIRECTORY = "cp -a usr/lib64 usr/new && mv usr/lib64 usr/old && mv usr/new usr/lib64"
CHANGES = {
    "a library": f"cp data/library usr/lib64/{CUVID}",
    "no library": f"rm usr/lib64/libnvidia-ml.so.{VERSION}",
    "another directory of the same time": REPLACE_DIRECTORY,
    "a directory": f"mkdir -p opt/nvidia/lib64 && cp data/library opt/nvidia/lib64/{CUVID}",
    "a directory behind links": f"ln -s / opt; mkdir nvidia; ln -s /elsewhere nvidia/lib64; cp -r data elsewhere; "
    f"mv elsewhere/library elsewhere/{CUVID}",
    "a link's target": "touch data/nvidia-smi",
    "another target of a link": "mkdir new; touch new/tool; ln -sf /new/tool alternatives/tool",
    "a directory behind a link": "rm tools/tool",
    "a broken link's target": f"mkdir absent && cp data/library absent/{CUVID}",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_searched_again(root, search, change):
    root.driver("usr/lib64")
    root.library("data/library", "libnvcuvid.so.1")
    root.write("tools/tool")
    root.links(
        {
            "usr/bin/nvidia-smi": "/data/nvidia-smi",
            "usr/bin/nvidia-debugdump": "/alternatives/tool",
            "alternatives/tool": "/tools/tool",
            "usr/local/nvidia/lib64": "/absent",
        }
    )
    before = search.files(VERSION)
    search.files(VERSION)
    assert search.searches == 1
    subprocess.run(change, shell=True, check=True, cwd=root.path)
    after = search.files(VERSION)
    search.files(VERSION)
    assert search.searches == 2
    assert (after != before) == (change is not REPLACE_DIRECTORY)
    assert after == Search([(str(root), HOST)], KERNEL).files(VERSION)


def test_nothing_else_has_it_searched_again(root, search):
    root.driver("usr/lib64")
    search.files(VERSION)
    for path in ("etc/passwd", "data/file", "usr/lib64/xorg/other/file", "usr/local/lib/file", "opt/other/file"):
        root.write(path)
    root.link("usr/link", "nowhere")
    search.files(VERSION)
    assert search.searches == 2  # usr/lib64 has a new entry, xorg; and then no more
    root.write("usr/lib64/xorg/other/another")
    root.write(f"usr/lib64/libcuda.so.{VERSION}", b"written over where it stands")
    search.files(VERSION)
    assert search.searches == 2


@pytest.mark.parametrize("allocated", [False, True], ids=["cut short", "allocated in full"])
def test_a_library_that_was_being_copied_is_read_again(root, search, allocated):
    root.driver("usr/lib64")
    file = root.library(f"usr/lib64/libnvcuvid.so.{VERSION}", "libnvcuvid.so.1")
    content, status = file.read_bytes(), file.stat()
    whole = bound(found(search))
    for copied in range(0, len(content), 8):
        file.write_bytes(content[:copied] + bytes(len(content) - copied if allocated else 0))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        partly = Search([(str(root.path), HOST)])
        partly.files(VERSION)
        file.write_bytes(content)
        os.utime(
            file, ns=(status.st_atime_ns, status.st_mtime_ns)
        )  # the clock of a file system may not have ticked since
        assert bound(found(partly)) == whole, copied


def test_a_library_that_stays_incomplete_is_not_searched_again(root, search):
    root.driver("usr/lib64")
    file = root.library(f"usr/lib64/libnvcuvid.so.{VERSION}", "libnvcuvid.so.1")
    file.write_bytes(file.read_bytes()[:100])
    [complaint] = search.files(VERSION).complaints
    assert "libnvcuvid" in complaint
    search.files(VERSION)
    assert search.searches == 1


def test_another_driver_version_has_it_searched_again(root, search):
    root.driver("usr/lib64")
    root.driver("usr/lib64", "535.1.1")
    complaint = f"the driver root {HOST} has libraries of 535.1.1, {VERSION}; containers get "
    assert search.files("535.1.1").complaints == (f"{complaint}535.1.1, the version that the kernel runs",)
    files = search.files("")
    assert files.complaints == (
        f"{complaint}{VERSION}, the newest, since the version that the kernel runs is not known",
    )
    assert bound(files) == all_of("/usr/lib64")
    assert search.searches == 2


def test_a_root_without_a_driver_gives_way_to_the_next_and_takes_over_once_it_has_one(root, tmp_path):
    other = Root(tmp_path / "other")
    other.driver("usr/lib64")
    search = Search([(str(root), "/first"), (str(other), "/second")])
    assert search.host_root == "/first"
    assert (search.files(VERSION).fault, search.host_root) == ("", "/second")
    root.driver("usr/lib64")
    assert (search.files(VERSION).fault, search.host_root) == ("", "/first")
    for each in (root, other):
        (each.path / "usr").rename(each.path / "gone")
    fault = search.files(VERSION).fault
    assert fault.startswith("the driver root /first has no libcuda.so or libnvidia-ml.so with a version")
    assert search.host_root == "/first"


def test_a_kernel_and_libraries_of_different_versions(root, search):
    root.driver("usr/lib64")
    files = search.files("570.1.1")
    assert files.libraries == ()
    assert files.fault == (
        f"the kernel runs driver 570.1.1, and the driver root {HOST} has libraries of {VERSION}: reload the driver, or "
        "install its libraries"
    )


def spoil(root: Root, name: str, how: str) -> None:
    path = root.path / f"usr/lib64/{name}"
    if how == "dangling":
        path.symlink_to("nowhere")
    elif how == "circle":
        path.symlink_to(path.name)
    elif how == "outside":
        path.symlink_to("../../../outside")
    elif how == "text":
        path.write_text("no library")
    elif how == "empty":
        path.touch()
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "directory":
        path.mkdir()
    elif how == "socket":
        root.listen(f"usr/lib64/{name}")


WHY = {
    "dangling": "it is a broken link",
    "circle": "it is a broken link",
    "outside": "it is a broken link",
    "text": "it is not an ELF file (Magic number does not match)",
    "empty": "it is not an ELF file (Magic number does not match)",
    "fifo": "it is a FIFO, but only a regular file may be there",
    "directory": "it is a directory, but only a regular file may be there",
    "socket": "it is a socket, but only a regular file may be there",
}


@pytest.mark.parametrize("how", WHY)
def test_a_bad_library_is_said_in_one_sentence_and_takes_no_other_with_it(root, search, how):
    root.library(f"../outside/libbad.so.{VERSION}")
    root.driver("usr/lib64")
    spoil(root, f"libbad.so.{VERSION}", how)
    files = search.files(VERSION)
    assert bound(files) == all_of("/usr/lib64")
    assert (files.fault, files.complaints) == (
        "",
        (f"/usr/lib64/libbad.so.{VERSION} in the driver root {HOST} is left out: {WHY[how]}",),
    )


@pytest.mark.parametrize(
    ("make", "why"),
    [
        *((partial(spoil, name=f"libcuda.so.{VERSION}", how=how), why) for how, why in WHY.items()),
        (lambda root: None, "there is no such file"),
        (lambda root: root.library(f"usr/lib64/libcuda.so.{VERSION}", ""), "its SONAME is not libcuda.so.1"),
        (lambda root: root.library(f"usr/lib64/libcuda.so.{VERSION}", "libother.so"), "its SONAME is not libcuda.so.1"),
    ],
)
def test_without_a_usable_libcuda_no_container_could_use_a_gpu(root, search, make, why):
    root.driver("usr/lib64", names=("libnvidia-ml.so",))
    make(root)
    spoil(root, f"libzzz.so.{VERSION}", "text")
    fault = search.files(VERSION).fault
    assert fault == f"the driver root {HOST} has no libcuda.so.{VERSION} that programs can load: {why}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_library_is_left_out(root, search):
    root.driver("usr/lib64")
    root.library(f"usr/lib64/libbad.so.{VERSION}").chmod(0)
    (complaint,) = search.files(VERSION).complaints
    assert complaint.endswith("it cannot be read: Permission denied")


def test_a_search_that_fails_is_made_again_and_finds_what_came_meanwhile(root, search, monkeypatch):
    root.driver("usr/lib64")
    before = search.files(VERSION)
    root.library(f"usr/lib64/libnvidia-new.so.{VERSION}")
    with monkeypatch.context() as broken:

        def no_disk(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

        broken.setattr(os, "scandir", no_disk)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                search.files(VERSION)
    paths = {library.path for library in search.files(VERSION).libraries}
    assert paths - {library.path for library in before.libraries} == {f"/usr/lib64/libnvidia-new.so.{VERSION}"}
    assert (search.searches, search.host_root) == (4, HOST)


def test_names_that_no_specification_can_have_are_left_out_and_said_in_one_line(root, search):
    root.driver("usr/lib64")
    for name in (b"libstrange\xff", b"libnew\nline", b"libesc\x1b[31m"):
        Path(os.fsdecode(os.fsencode(root.path) + b"/usr/lib64/" + name + f".so.{VERSION}".encode())).write_bytes(b"")
    strange = os.fsdecode(os.fsencode(root.path) + b"/data/\xff")
    root.link("usr/bin/nvidia-smi", "/data/\udcff")
    Path(strange).parent.mkdir()
    Path(strange).touch()
    files = search.files(VERSION)
    assert bound(files) == all_of("/usr/lib64")
    assert placed(files) == {}
    assert files.fault == ""
    assert [each.split(" in the driver root")[0] for each in files.complaints] == [
        f"/usr/lib64/libesc\\x1b[31m.so.{VERSION}",
        f"/usr/lib64/libnew\\nline.so.{VERSION}",
        f"/usr/lib64/libstrange\\udcff.so.{VERSION}",
        "/usr/bin/nvidia-smi",
    ]
    assert all(each.isprintable() for each in files.complaints)


@pytest.mark.parametrize("directory", ["usr/lib/aarch64-linux-gnu/tegra", "usr/lib/wsl/lib"])
def test_libcuda_of_a_tegra_or_of_wsl_is_no_other_version_of_the_driver(root, search, directory):
    root.driver("usr/lib64")
    root.library(f"{directory}/libcuda.so.1.1", "libcuda.so.1")
    root.write("etc/ld.so.cache", ld_cache_of([f"/{directory}/libcuda.so.1.1"]))
    assert bound(found(search)) == bound(found(search, "")) == all_of("/usr/lib64")


def test_a_library_is_read_once_however_often_its_directory_changes(root, search, monkeypatch):
    from gpu_plugin.containers.driver_root import elf  # noqa: PLC0415

    read: list[str] = []
    real = elf.read

    def counted(file: str) -> elf.SharedLibrary:
        read.append(file)
        return real(file)

    monkeypatch.setattr(elf, "read", counted)
    root.driver("usr/lib64")
    search.files(VERSION)
    for at in range(3):
        root.write(f"usr/lib64/other{at}")
        search.files(VERSION)
    assert search.searches == 4
    assert sorted(read) == [f"{root}/usr/lib64/{name}.{VERSION}" for name in ("libcuda.so", "libnvidia-ml.so")]
    root.driver("usr/lib64", "560.1.1")
    search.files("560.1.1")
    assert len(read) == 4
    (tree,) = search._trees
    assert len(tree.libraries) == 2  # the data of removed libraries is dropped
