"""Containers get no file of a driver root that an ordinary user made or could change."""

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpu_plugin.containers.cdi import spec as spec_module
from gpu_plugin.containers.cdi.build import Built
from gpu_plugin.containers.cdi.host_files import DeviceFile, HostDevices, Kind, Seen
from gpu_plugin.containers.cdi.options import CdiOptions
from gpu_plugin.containers.driver_root import tegra, wsl
from gpu_plugin.containers.driver_root.safe import judge
from gpu_plugin.containers.driver_root.search import Search
from gpu_plugin.containers.driver_root.tegra import TegraSearch
from gpu_plugin.containers.driver_root.wsl import WslSearch
from gpu_plugin.simulation.driver_files import shared_library
from tests.device_nodes import device
from tests.unit.containers.driver_root.installed import VERSION, Root

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")

USER = 1000  # the uid of an ordinary user

MPS = "/tmp/nvidia-mps"
PERSISTENCED = "/run/nvidia-persistenced/socket"
LIBCUDA = f"/usr/lib64/libcuda.so.{VERSION}"


@pytest.fixture
def root(tmp_path) -> Root:
    """The root of a node with a driver: everything belongs to root, and every user may write to /tmp."""
    made = Root(tmp_path / "root")
    made.driver("usr/lib64")
    made.write("usr/bin/nvidia-smi")
    made.write("etc/shadow")
    for directory in ("tmp", "run/nvidia-persistenced", "run/udev"):
        (made.path / directory).mkdir(parents=True)
    (made.path / "tmp").chmod(0o1777)
    return made


@pytest.fixture
def search(root) -> Search:
    return Search([(str(root), "")])


def owned(path: Path, uid: int = USER) -> Path:
    """The file or link, after it was given to that user."""
    os.lchown(path, uid, uid)
    return path


def given(search: Search) -> set[str]:
    """The paths below the root that containers get."""
    files = search.files(VERSION)
    assert files.fault == ""
    return {each.target for each in files.libraries} | {each.target for each in files.files}


def refused(search: Search, path: str) -> str:
    """The only complaint: it is about that path, which no container gets, and everything else is given."""
    assert given(search) == {LIBCUDA, f"/usr/lib64/libnvidia-ml.so.{VERSION}", "/usr/bin/nvidia-smi", "/run/udev"} - {
        path
    }
    (complaint,) = search.files(VERSION).complaints
    assert complaint.startswith(f"{path} in the driver root / is left out: ")
    assert any(remedy in complaint for remedy in ("chown", "chmod", "remove", "unmount", "only a", "keep it in"))
    return complaint


def test_everything_that_belongs_to_root_is_given(root, search):
    (root.path / MPS[1:]).mkdir()
    root.listen(PERSISTENCED[1:])
    (root.path / PERSISTENCED[1:]).chmod(0o666)  # the mode of daemons' sockets: every user may connect
    assert {MPS, PERSISTENCED, LIBCUDA} < given(search)
    assert search.files(VERSION).complaints == ()


@pytest.mark.parametrize("target", ["/etc", "/", "..", "/run/udev", "/tmp"])
@pytest.mark.parametrize("uid", [0, USER])
def test_a_link_in_the_place_of_the_mps_directory_is_not_followed(root, search, target, uid):
    owned(root.link(MPS[1:], target), uid)
    refused(search, MPS)


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_an_mps_directory_that_others_may_write_to_is_no_containers(root, search, mode):
    (root.path / MPS[1:]).mkdir()
    (root.path / MPS[1:]).chmod(mode)
    refused(search, MPS)


def test_an_mps_directory_is_no_containers_where_others_can_replace_it(root, search):
    (root.path / MPS[1:]).mkdir()
    assert MPS in given(search)
    (root.path / "tmp").chmod(0o777)  # without the sticky bit every user may rename it
    refused(search, MPS)
    (root.path / "tmp").chmod(0o1777)
    assert MPS in given(search)
    owned(root.path / "tmp")  # the sticky bit does not bind the directory's owner
    refused(search, MPS)


@pytest.mark.parametrize("make", [Root.write, Root.listen])
def test_only_a_directory_is_one_of_mps(root, search, make):
    make(root, MPS[1:])
    refused(search, MPS)


def do(root: Root, change: str) -> None:
    """Run these commands in the driver root, as root."""
    subprocess.run(change, shell=True, check=True, cwd=root.path)


BIND = "import socket; socket.socket(socket.AF_UNIX).bind('socket')"
LISTEN = f'cd run/nvidia-persistenced && {sys.executable} -c "{BIND}"'
LINK_TO_DIRECTORY = "ln -s /etc run/nvidia-persistenced/socket"
REGULAR_FILE = "touch run/nvidia-persistenced/socket"
USERS_DIRECTORY = f"({LISTEN}) && chown {USER}:{USER} run/nvidia-persistenced"
SHARED_DIRECTORY = f"({LISTEN}) && chmod 1777 run/nvidia-persistenced"


@pytest.mark.parametrize(
    "change",
    [
        LINK_TO_DIRECTORY,
        "mkdir run/nvidia-persistenced/socket",
        f"({LISTEN}) && mv run/nvidia-persistenced/socket run/other && ln -s ../other run/nvidia-persistenced/socket",
        REGULAR_FILE,
        USERS_DIRECTORY,
        SHARED_DIRECTORY,
    ],
)
def test_a_daemons_socket_is_a_socket_that_root_alone_can_have_put_there(root, search, change):
    do(root, change)
    refused(search, PERSISTENCED)


GIVE_A_FILE_AWAY = f"chown {USER}:{USER} usr/bin/nvidia-smi"
OPEN_A_FILE = "chmod 775 usr/bin/nvidia-smi"
GIVE_A_DIRECTORY_AWAY = f"chown {USER}:{USER} usr/bin"
OPEN_A_DIRECTORY = "chmod 777 usr/bin"
SHARE_A_DIRECTORY = "chmod 1777 usr/bin"  # a user may move a file of root's that lies in another directory here
CHANGES = [
    GIVE_A_FILE_AWAY,
    OPEN_A_FILE,
    GIVE_A_DIRECTORY_AWAY,
    OPEN_A_DIRECTORY,
    SHARE_A_DIRECTORY,
    f"ln -sf /etc/shadow usr/bin/nvidia-smi && chown -h {USER} usr/bin/nvidia-smi",
    f"mkdir -p home/user && mv usr/bin/nvidia-smi home/user && chown {USER} home/user && ln -s /home/user/nvidia-smi usr/bin",
    f"mkdir -p home/u && chown {USER} home/u && ln -s /etc home/u/l && ln -sf /home/u/l/shadow usr/bin/nvidia-smi",
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_program_that_a_user_could_replace_is_left_out(root, search, change):
    do(root, change)
    refused(search, "/usr/bin/nvidia-smi")


@pytest.mark.parametrize("change", CHANGES[:5])
def test_a_change_of_owner_or_mode_is_noticed_at_the_next_look_and_so_is_its_end(root, search, change):
    assert "/usr/bin/nvidia-smi" in given(search)
    do(root, change)
    refused(search, "/usr/bin/nvidia-smi")
    for path in ("usr/bin", "usr/bin/nvidia-smi"):
        owned(root.path / path, 0).chmod(0o755)
    assert "/usr/bin/nvidia-smi" in given(search)


def proposed(complaint: str) -> str:
    """The command at the end of a complaint."""
    return complaint.rpartition(": ")[2]


@pytest.mark.parametrize("change", [*CHANGES, LINK_TO_DIRECTORY, REGULAR_FILE, USERS_DIRECTORY, SHARED_DIRECTORY])
def test_only_links_and_files_in_tmp_are_to_be_removed(root, search, change):
    do(root, change)
    (complaint,) = search.files(VERSION).complaints
    for removed in re.findall(r"remove (?:the link )?(\S+?)(?:,|$)", complaint):
        assert (root.path / removed[1:]).is_symlink()
    assert complaint.count("remove") == len(re.findall("remove (?:the link )?/", complaint))


@pytest.mark.parametrize(
    "change", [GIVE_A_FILE_AWAY, OPEN_A_FILE, GIVE_A_DIRECTORY_AWAY, OPEN_A_DIRECTORY, USERS_DIRECTORY]
)
def test_the_command_of_a_complaint_repairs_the_file_when_it_is_run_in_the_driver_root(root, search, change):
    do(root, change)
    [complaint] = search.files(VERSION).complaints
    assert "run in the driver root: ch" in complaint
    do(root, proposed(complaint))
    while again := search.files(VERSION).complaints:
        assert again[0] != complaint  # the owner may be one fault, and the mode another
        complaint = again[0]
        do(root, proposed(complaint))
    assert "/usr/bin/nvidia-smi" in given(search)


@pytest.mark.parametrize("name", ["a b", "$(reboot)", "a;b", "it's"])
def test_the_command_of_a_complaint_names_any_path_and_runs_nothing_else(tmp_path, name):
    directory = tmp_path / name
    directory.mkdir()
    directory.chmod(0o757)
    fault = judge("", str(directory), (Kind.DIRECTORY,)).seen.fault
    command = fault[fault.index("run: ") :].removeprefix("run: ")
    assert shlex.split(command) == ["chmod", "go-w", str(directory)]
    owned(directory)
    fault = judge("", str(directory), (Kind.DIRECTORY,)).seen.fault
    assert str(directory) in shlex.split(fault)


def test_the_root_directory_is_never_to_be_removed():
    fault = judge("", "/", (Kind.DIRECTORY,)).seen.fault
    assert fault
    assert "remove" not in fault


@pytest.mark.parametrize("path", ["", "usr", "usr/lib64", LIBCUDA[1:]])
def test_without_a_safe_libcuda_no_container_could_use_a_gpu(root, search, path):
    assert search.files(VERSION).fault == ""
    changed = root.path / path
    changed.chmod(stat.S_IMODE(changed.stat().st_mode) | 0o002)
    fault = search.files(VERSION).fault
    assert f"libcuda.so.{VERSION}" in fault
    assert "chmod" in fault
    changed.chmod(0o755)
    assert search.files(VERSION).fault == ""


def test_a_sticky_directory_that_root_alone_may_write_to_is_as_good_as_any(root, search):
    (root.path / "usr/bin").chmod(0o1755)
    assert "/usr/bin/nvidia-smi" in given(search)


def test_a_directory_of_root_in_a_sticky_one_is_safe_as_nixos_has_its_store(root, search):
    root.library(f"nix/store/abc/lib/libnvcuvid.so.{VERSION}", "libnvcuvid.so.1")
    (root.path / "nix/store").chmod(0o1775)
    os.chown(root.path / "nix/store", 0, 30000)
    root.link("run/opengl-driver", "/nix/store/abc")
    assert f"/nix/store/abc/lib/libnvcuvid.so.{VERSION}" in given(search)


# Linux for Tegra and WSL


def jetson(root: Root) -> TegraSearch:
    root.write(f"{tegra.DIRECTORY}/drivers.csv", b"lib, /opt/a\nlib, /opt/b\ndir, /opt/c\nsym, /opt/d\n")
    for name in ("a", "b", "c/file"):
        root.write(f"opt/{name}")
    root.link("opt/d", "/opt/b")
    return TegraSearch([(str(root), "")], own=False)


def mounts(search: TegraSearch) -> tuple[set[str], str]:
    """The paths that containers get, and all complaints."""
    node = DeviceFile(10, 124)
    device = tegra.Looked(tegra.Line(tegra.Entry.DEVICE, "/dev/nvmap"), Seen("/dev/nvmap", Kind.DEVICE, "/dev/nvmap"))
    files = search.files()
    with_device = replace(files, looked=(*files.looked, device), nodes={"/dev/nvmap": node}, fault="")
    built = tegra.tegra_specs(with_device, CdiOptions())
    return {path for spec in built.specs.values() for path in spec_module.mounted(spec)}, "\n".join(built.complaints)


def test_a_list_that_a_user_could_change_is_not_read(root):
    search = jetson(root)
    assert mounts(search) == ({"/opt/a", "/opt/b", "/opt/c"}, "")
    listed = root.path / tegra.DIRECTORY / "drivers.csv"
    owned(listed)
    paths, complaints = mounts(search)
    assert paths == set()
    assert "drivers.csv is left out: it belongs to uid 1000" in complaints
    owned(listed, 0)
    listed.parent.chmod(0o777)
    assert mounts(search)[0] == set()
    listed.parent.chmod(0o755)
    assert mounts(search)[0] == {"/opt/a", "/opt/b", "/opt/c"}


def test_a_device_node_of_lists_that_a_user_could_replace_is_left_out(root):
    jetson(root)
    root.write(f"{tegra.DIRECTORY}/devices.csv", b"dev, /dev/nvmap\n")
    device(root.path / "dev/nvmap")
    search = TegraSearch([(str(root), "")], own=False)
    assert "/dev/nvmap" in search.files().nodes
    (root.path / "dev").chmod(0o777)
    assert search.files().nodes == {}
    (root.path / "dev").chmod(0o755)
    assert "/dev/nvmap" in search.files().nodes


def test_a_driver_of_windows_that_a_user_could_change_is_left_out(root):
    store = "usr/lib/wsl/drivers/nv_dispi.inf_amd64_1"
    for name, soname in (("libcuda.so.1.1", "libcuda.so.1"), ("libcuda_loader.so", "libcuda.so.1")):
        root.write(f"{store}/{name}", shared_library(soname, "x86_64"))
    root.write(f"{store}/nvidia-smi")
    root.write("usr/lib/wsl/lib/libdxcore.so", shared_library("libdxcore.so", "x86_64"))
    search = WslSearch([(str(root), "")])
    host = HostDevices({"/dev/dxg": DeviceFile(10, 125)})

    def built() -> Built:
        return wsl.wsl_specs(search.files(), host, CdiOptions())

    def paths() -> set[str]:
        return {path for spec in built().specs.values() for path in spec_module.mounted(spec)}

    assert f"/{store}/nvidia-smi" in paths()
    owned(root.path / store / "nvidia-smi")
    assert paths()
    assert f"/{store}/nvidia-smi" not in paths()
    assert any(f"/{store}/nvidia-smi is left out: it belongs to uid 1000" in each for each in built().complaints)
    (root.path / store).chmod(0o777)
    assert paths() == set()
    assert "chmod" in built().trouble


@pytest.mark.parametrize(
    "loader", ["usr/lib/wsl/lib/libcuda.so.1", "usr/lib/wsl/drivers/nv_old.inf_amd64_1/libcuda_loader.so"]
)
def test_a_user_has_no_say_in_which_driver_of_windows_is_in_use(root, loader):
    old, new = (f"usr/lib/wsl/drivers/nv_{age}.inf_amd64_1" for age in ("old", "new"))
    for store, version in ((old, b"1"), (new, b"2")):
        for name, soname in (("libcuda.so.1.1", "libcuda.so.1"), ("libcuda_loader.so", "libcuda.so.1")):
            root.write(f"{store}/{name}", shared_library(soname, "x86_64") + version)
    os.utime(root.path / old / "libcuda.so.1.1", (1, 1))
    root.write("usr/lib/wsl/lib/libcuda.so.1", (root.path / old / "libcuda_loader.so").read_bytes())
    search = WslSearch([(str(root), "")])

    def in_use() -> str:
        return search.files().libraries[0].seen.path.rpartition("/")[0].strip("/")

    assert in_use() == old
    owned(root.path / loader)
    assert in_use() == new


# Mounts


def test_a_file_system_that_a_user_can_have_mounted_in_a_shared_directory_is_no_containers(root, search):
    # A user may mount a FUSE file system over a directory of theirs, and that says that its files are root's.
    mps = root.path / MPS[1:]
    mps.mkdir()
    assert MPS in given(search)
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "mode=0755", "none", mps], check=False, capture_output=True
    ).returncode:
        pytest.skip("this machine lets no file system be mounted")
    try:
        assert "mount" in refused(search, MPS)
    finally:
        subprocess.run(["umount", mps], check=True)
    assert MPS in given(search)
