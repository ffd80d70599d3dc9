import os
import stat
from pathlib import Path

import pytest

from gpu_plugin.containers.cdi.host_files import DeviceFile, Kind, Seen
from gpu_plugin.containers.cdi.options import CdiOptions
from gpu_plugin.containers.driver_root import tegra
from gpu_plugin.containers.driver_root import tree as tree_module
from gpu_plugin.containers.driver_root.tegra import DIRECTORY, TegraSearch, device_file, tegra_specs
from gpu_plugin.containers.driver_root.tree import Tree
from gpu_plugin.simulation.driver_files import shared_library
from tests.unit.containers.driver_root.installed import link, put

NVIDIA = "usr/lib/aarch64-linux-gnu/nvidia"

DEVICES = "dev, /dev/nvmap\ndev, /dev/dri/card*\n"
DRIVERS = f"""\
lib, /{NVIDIA}/libcuda.so.1.1
sym, /usr/lib/aarch64-linux-gnu/libcuda.so
lib, /lib/firmware/tegra23x/*.bin
dir, /usr/share/drirc.d
lib, /{NVIDIA}/libabsent.so
"""


def jetson(root):
    """A Jetson's files; its device nodes are links to some of this machine's, which to make takes no privilege."""
    put(root, f"{DIRECTORY}/devices.csv", DEVICES)
    put(root, f"{DIRECTORY}/drivers.csv", DRIVERS)
    put(root, f"{DIRECTORY}/cudnn.csv", "lib, /usr/lib/libcudnn.so.8\n")
    put(root, f"{NVIDIA}/libcuda.so.1.1", shared_library("libcuda.so.1", "aarch64"))
    link(root, "usr/lib/aarch64-linux-gnu/libcuda.so", "nvidia/libcuda.so.1.1")
    put(root, "usr/lib/firmware/tegra23x/a.bin")
    put(root, "usr/lib/firmware/tegra23x/b.bin")
    put(root, "usr/lib/firmware/tegra23x/.hidden.bin")
    put(root, "usr/lib/firmware/tegra23x/README")
    link(root, "lib", "usr/lib")
    (root / "usr/share/drirc.d").mkdir(parents=True)
    put(root, "etc/nv_tegra_release", "# R36 (release)")


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def nodes(monkeypatch):
    """Device nodes by their path as this process sees it."""
    found: dict[str, DeviceFile] = {}

    def device_file(root: str, path: str) -> tuple[Seen, DeviceFile | None]:
        node = found.get(f"{root}{path}")
        return (Seen(path, Kind.MISSING) if node is None else Seen(path, Kind.DEVICE, path)), node

    monkeypatch.setattr(tegra, "device_file", device_file)
    return found


def search(*roots):
    return TegraSearch([(str(root), f"/host/{root.name}") for root in roots])


def found_of(files):
    return {each.line.path: (each.seen.kind, each.seen.target, each.seen.link) for each in files.looked}


def test_what_the_lists_name_is_found_below_the_root(root, nodes):
    jetson(root)
    nodes[f"{root}/dev/nvmap"] = DeviceFile(10, 124)
    (root / "dev/dri").mkdir(parents=True)
    for name in ("card0", "card1", "renderD128"):
        put(root, f"dev/dri/{name}")
        nodes[f"{root}/dev/dri/{name}"] = DeviceFile(226, 0)
    looking = search(root)
    files = looking.files()
    file, missing, directory = Kind.FILE, Kind.MISSING, Kind.DIRECTORY
    assert found_of(files) == {
        "/dev/nvmap": (Kind.DEVICE, "/dev/nvmap", False),
        "/dev/dri/card0": (Kind.DEVICE, "/dev/dri/card0", False),
        "/dev/dri/card1": (Kind.DEVICE, "/dev/dri/card1", False),
        f"/{NVIDIA}/libcuda.so.1.1": (file, f"/{NVIDIA}/libcuda.so.1.1", False),
        "/usr/lib/aarch64-linux-gnu/libcuda.so": (file, f"/{NVIDIA}/libcuda.so.1.1", True),
        "/lib/firmware/tegra23x/a.bin": (file, "/usr/lib/firmware/tegra23x/a.bin", False),
        "/lib/firmware/tegra23x/b.bin": (file, "/usr/lib/firmware/tegra23x/b.bin", False),
        "/usr/share/drirc.d": (directory, "/usr/share/drirc.d", False),
        f"/{NVIDIA}/libabsent.so": (missing, "", False),
        "/etc/nv_tegra_release": (file, "/etc/nv_tegra_release", False),
    }
    assert set(files.nodes) == {"/dev/nvmap", "/dev/dri/card0", "/dev/dri/card1"}
    assert [each.library.soname for each in files.looked if each.library] == ["libcuda.so.1", "libcuda.so.1"]
    assert looking.host_root == "/host/root"
    built = tegra_specs(files, CdiOptions(driver_root=looking.host_root))
    (spec,) = built.specs.values()
    mounts = {mount.container_path: mount.host_path for mount in spec.container_edits.mounts}
    assert mounts["/usr/lib64/libcuda.so.1"] == f"/host/root/{NVIDIA}/libcuda.so.1.1"
    assert mounts["/etc/nv_tegra_release"] == "/host/root/etc/nv_tegra_release"
    assert [complaint.partition(" paths")[0] for complaint in built.complaints] == ["1 of 10"]


def test_a_device_node_here_goes_before_that_below_a_root(root, nodes):
    jetson(root)
    nodes["/dev/nvmap"] = DeviceFile(1, 1)
    nodes[f"{root}/dev/nvmap"] = DeviceFile(2, 2)
    assert search(root).files().nodes == {"/dev/nvmap": DeviceFile(1, 1)}


def test_nothing_of_this_machine_is_in_what_another_has(tmp_path, root, nodes, monkeypatch):
    here = tmp_path / "here"
    jetson(here)
    for module in (tegra, tree_module):
        monkeypatch.setattr(module, "Tree", lambda at, *more: Tree(at or str(here), *more))
    nodes["/dev/nvmap"] = DeviceFile(1, 1)
    roots = [(str(root), "")]
    assert TegraSearch(roots).files().nodes == nodes
    assert TegraSearch(roots, own=False).files().fault
    jetson(root)
    assert TegraSearch(roots).files().nodes == nodes
    assert TegraSearch(roots, own=False).files().nodes == {}


def test_device_nodes_that_come_are_seen_without_another_search(root, nodes):
    jetson(root)
    looking = search(root)
    assert looking.files().nodes == {}
    nodes[f"{root}/dev/nvmap"] = DeviceFile(10, 124)
    assert list(looking.files().nodes) == ["/dev/nvmap"]
    assert looking.searches == 1


def test_lists_of_the_driver_root_go_before_others(tmp_path, nodes):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    jetson(second)
    put(first, f"{NVIDIA}/libcuda.so.1.1", shared_library("libcuda.so.1", "aarch64"))
    looking = search(first, second)
    files = looking.files()  # the lists of the second root, and files of the first
    assert found_of(files)[f"/{NVIDIA}/libcuda.so.1.1"][0] is Kind.FILE
    assert found_of(files)["/usr/share/drirc.d"][0] is Kind.MISSING
    assert looking.host_root == "/host/first"
    put(first, f"{DIRECTORY}/l4t.csv", "lib, /etc/only\n")
    assert list(found_of(looking.files())) == ["/etc/only"]


def test_a_root_that_is_not_there_gives_way_to_the_next(tmp_path, nodes):
    second = tmp_path / "second"
    jetson(second)
    looking = search(tmp_path / "absent", second)
    assert found_of(looking.files())["/usr/share/drirc.d"][0] is Kind.DIRECTORY
    assert looking.host_root == "/host/second"


def test_without_lists_it_says_where_they_should_be(root, nodes):
    put(root, f"{DIRECTORY}/cudnn.csv", "lib, /usr/lib/libcudnn.so.8\n")
    files = search(root).files()
    assert files.looked == ()
    assert f"none of devices.csv, drivers.csv, l4t.csv is in /{DIRECTORY}" in files.fault
    assert "in the driver root /host/root" in files.fault


def test_lists_that_are_no_lists_are_said(root, nodes):
    directory = root / DIRECTORY
    put(root, f"{DIRECTORY}/drivers.csv", "junk\nlib, /etc/hostname\n")
    os.mkfifo(directory / "devices.csv")
    link(root, f"{DIRECTORY}/l4t.csv", "/nowhere")
    files = search(root).files()
    assert files.complaints == (
        f"/{DIRECTORY}/devices.csv is left out: it is a FIFO, but only a regular file may be there",
        f"/{DIRECTORY}/drivers.csv:1 is left out: 'junk' is not of the form `kind, path`",
        f"/{DIRECTORY}/l4t.csv is left out: it is a broken link",
    )
    assert list(found_of(files)) == ["/etc/hostname"]


def test_a_list_that_is_too_large_is_left_out_whole(root, nodes):
    file = put(root, f"{DIRECTORY}/drivers.csv", "lib, /etc/hostname\n".ljust(1024 * 1024, "#"))
    assert list(found_of(search(root).files())) == ["/etc/hostname"]
    file.write_bytes(file.read_bytes() + b"#")
    files = search(root).files()
    assert files.looked == ()
    assert files.complaints == (f"/{DIRECTORY}/drivers.csv is left out: it has more than 1,048,576 bytes",)


def test_a_file_that_is_no_elf_says_so(root, nodes):
    put(root, "usr/lib/libscript.so", "INPUT(libreal.so)")
    put(root, f"{DIRECTORY}/drivers.csv", "lib, /usr/lib/libscript.so\n")
    (looked,) = search(root).files().looked
    assert "not an ELF file" in looked.library.fault


@pytest.mark.parametrize(
    "change",
    [
        lambda root: put(root, f"{NVIDIA}/libabsent.so", shared_library("libabsent.so", "aarch64")),
        lambda root: (root / "usr/share/drirc.d").rmdir(),
        lambda root: put(root, f"{DIRECTORY}/drivers.csv", "lib, /etc/other\n"),
        lambda root: put(root, f"{DIRECTORY}/l4t.csv", "lib, /etc/other\n"),
        lambda root: (root / f"{DIRECTORY}/drivers.csv").unlink(),
        lambda root: put(root, "usr/lib/firmware/tegra23x/c.bin"),
        lambda root: (root / "etc/nv_tegra_release").unlink(),
    ],
    ids=["library", "directory", "list", "new list", "list gone", "match", "release"],
)
def test_it_is_searched_again_only_where_something_changed(root, nodes, change):
    jetson(root)
    looking = search(root)
    before = looking.files()
    assert looking.files() == before
    assert looking.searches == 1
    change(root)
    assert looking.files() != before
    assert looking.searches == 2


def test_a_directory_that_comes_to_match_wildcards_is_noticed(root, nodes):
    put(root, f"{DIRECTORY}/drivers.csv", "lib, /opt/*/libnv.so\n")
    put(root, "opt/a/other")
    looking = search(root)
    assert list(found_of(looking.files())) == ["/opt/a/libnv.so"]
    put(root, "opt/b/libnv.so")
    assert list(found_of(looking.files())) == ["/opt/a/libnv.so", "/opt/b/libnv.so"]


def test_wildcards_are_those_of_a_shell_and_bounded(root, monkeypatch):
    for path in ("a1/x", "a1/y", "a2/x", "a2/.x", "b/x"):
        put(root, path)
    link(root, "a3", "/b")
    link(root, "a4", "/nowhere")
    tree = Tree(str(root))
    assert list(tree.expand("/a?/[xz]")) == ["/a1/x", "/a2/x", "/a3/x"]
    assert list(tree.expand("/a2/.*")) == ["/a2/.x"]
    assert list(tree.expand("/a*/x/*")) == []
    assert list(tree.expand("/none")) == ["/none"]
    monkeypatch.setattr(tree_module, "MAX_MATCHES", 2)
    assert list(tree.expand("/a?/*")) == ["/a1/x", "/a1/y"]


def test_more_paths_than_any_tegra_has_are_cut_short(root, nodes, monkeypatch):
    monkeypatch.setattr(tegra, "MAX_PATHS", 3)
    put(root, f"{DIRECTORY}/drivers.csv", "".join(f"lib, /a{number}\n" for number in range(4)))
    files = search(root).files()
    assert list(found_of(files)) == ["/a0", "/a1", "/a2"]
    assert files.complaints == ("the lists of Linux for Tegra name more than 3 paths; the rest is left out",)
    put(root, f"{DIRECTORY}/drivers.csv", "".join(f"lib, /a{number}\n" for number in range(3)))
    assert search(root).files().complaints == ()


def test_a_device_is_what_its_path_leads_to_below_the_root(root):
    null = Path("/dev/null").stat()
    expected = DeviceFile(
        os.major(null.st_rdev), os.minor(null.st_rdev), stat.S_IMODE(null.st_mode) & 0o777, null.st_gid
    )
    assert device_file("", "/dev/null") == (Seen("/dev/null", Kind.DEVICE, "/dev/null"), expected)
    put(root, "dev/file")
    link(root, "dev/null", "/dev/null")  # below the root, where it does not exist
    for path in ("/dev/file", "/dev/absent", "/dev/null", "/dev"):
        assert device_file(str(root), path)[1] is None


@pytest.mark.skipif(os.geteuid() != 0, reason="making device nodes takes a privilege")
def test_device_nodes_of_both_types_are_found(root):
    put(root, f"{DIRECTORY}/devices.csv", "dev, /dev/nv*\n")
    (root / "dev").mkdir()
    try:
        os.mknod(root / "dev/nvchar", 0o640 | stat.S_IFCHR, os.makedev(1, 3))
        os.mknod(root / "dev/nvblock", 0o600 | stat.S_IFBLK, os.makedev(7, 200))
    except PermissionError:
        pytest.skip("this machine lets nobody make device nodes")
    os.mkfifo(root / "dev/nvfifo")
    (root / "dev/nvlink").symlink_to("nvchar")
    for name, mode in (("nvchar", 0o640), ("nvblock", 0o600)):
        (root / "dev" / name).chmod(mode)
    # A machine with NVIDIA's driver also has this node in its own /dev.
    nodes = {path: node for path, node in search(root).files().nodes.items() if path != "/dev/nvidiactl"}
    group = (root / "dev/nvchar").stat().st_gid
    assert nodes == {
        "/dev/nvchar": DeviceFile(1, 3, 0o640, group, root="/host/root"),
        "/dev/nvlink": DeviceFile(1, 3, 0o640, group, root="/host/root"),
        "/dev/nvblock": DeviceFile(7, 200, 0o600, group, "b", root="/host/root"),
    }
