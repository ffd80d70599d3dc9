"""CDI specifications of driver roots where an ordinary user has made files or may change some."""

import json
import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu_plugin.containers.cdi.host_files import DeviceFile, HostDevices
from gpu_plugin.containers.cdi.options import CdiOptions
from gpu_plugin.containers.cdi.spec import Edits, Hook, Mount, SpecDevice, made, mounted
from gpu_plugin.containers.cdi_files.directory import SpecDirectory
from gpu_plugin.containers.cdi_files.source import Request, SpecSource, UnsafeSpecError
from gpu_plugin.containers.driver_root.search import Search
from gpu_plugin.devices.node import Gpu
from gpu_plugin.simulation import driver_files
from tests.short_paths import short_directory
from tests.unit.containers.cdi_files.specs import GPU_FILE
from tests.unit.containers.driver_root.installed import Root

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")

VERSION = "550.54.15"
USER = 1000  # the uid of an ordinary user
MPS = "tmp/nvidia-mps"


class Host:
    def devices(self, pci_bus_ids: object) -> HostDevices:
        del pci_bus_ids
        return HostDevices({path: DeviceFile(195, at) for at, path in enumerate(("/dev/nvidiactl", "/dev/nvidia0"))})


def source(root: Path) -> SpecSource:
    return SpecSource(Host(), lambda: [(str(root), "")])  # type: ignore[arg-type]


def request(**options: object) -> Request:
    return Request((Gpu("GPU-a", 0, minor=0),), VERSION, CdiOptions(**options))  # type: ignore[arg-type]


def node(root: Path) -> Path:
    """A root with a driver, an MPS directory of root's, and the home of a user."""
    driver_files.make(root, VERSION)
    for directory in ("tmp", MPS, "run/nvidia-persistenced", "run/udev", "etc/vulkan/icd.d", "home/user/lib"):
        (root / directory).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    for file in ("etc/cufile.json", "etc/vulkan/icd.d/nvidia_icd.json", "etc/shadow", "usr/bin/nvidia-cdi-hook"):
        (root / file).write_text("root's")
    for name in ("libcuda.so", "libnvcuvid.so", "libuser.so"):
        (root / f"home/user/lib/{name}.{VERSION}").write_bytes(driver_files.shared_library(f"{name}.1"))
    for path in (root / "home/user", *(root / "home/user").rglob("*")):
        os.chown(path, USER, USER)
    return root


@pytest.fixture
def root(tmp_path) -> Path:
    return node(tmp_path / "root")


def given_files(made_by: SpecSource, **options: object) -> set[str]:
    built = made_by.build(request(**options))
    assert built.trouble == ""
    return {path for spec in built.specs.values() for path in mounted(spec)}


# Between the search and the specification


def test_files_that_change_during_every_search_are_an_error_and_the_next_look_heals(root, monkeypatch):
    searching = source(root)
    real = Search.files

    def files(self: Search, running: str = "") -> object:
        (root / MPS).unlink() if (root / MPS).is_symlink() else None
        (root / MPS).mkdir(exist_ok=True)
        found = real(self, running)
        (root / MPS).rmdir()
        (root / MPS).symlink_to("/etc")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Search, "files", files)
        for _ in range(2):
            with pytest.raises(UnsafeSpecError, match=f"/{MPS} must not be given to containers"):
                searching.build(request())
    assert f"/{MPS}" not in given_files(searching)
    (root / MPS).unlink()
    (root / MPS).mkdir()
    assert f"/{MPS}" in given_files(searching)


# The driver root itself


def do(root: Path, change: str) -> None:
    """Run this command in the driver root, as root."""
    subprocess.run(change, shell=True, check=True, cwd=root)


@pytest.mark.parametrize("change", ["chmod 775 ..", f"chown {USER} ..", "chmod 1777 ."])
def test_a_root_that_users_could_replace_serves_nobody_until_it_is_safe_again(root, change):
    searching = source(root)
    mounts = (Mount(host_path="/etc/cufile.json", container_path="/x", options=("ro",)),)
    left = made("a.b/gpu", (SpecDevice(name="a", container_edits=Edits()),), Edits(mounts=mounts))
    built = searching.build(request())
    assert searching.holds(left)
    do(root, change)
    for _ in range(2):
        with pytest.raises(UnsafeSpecError, match=r"the driver root .*(chmod go-w|chown)"):
            searching.build(request())
    assert not searching.holds(left)
    for path in (root, root.parent):
        path.chmod(0o755)
        os.chown(path, 0, 0)
    assert searching.build(request()) is built
    assert searching.holds(left)


@pytest.mark.parametrize("uid", [0, USER])
def test_a_root_may_be_a_link_of_root_s_only(root, uid):
    link = root.with_name("current")
    link.symlink_to(root)
    os.lchown(link, uid, uid)
    if uid:
        with pytest.raises(UnsafeSpecError, match="link"):
            source(link).build(request())
    else:
        assert given_files(source(link))


# NVIDIA's hook, and the file of an earlier process


GIVE_AWAY = f"chown {USER} usr/bin/nvidia-cdi-hook"


@pytest.mark.parametrize("change", [GIVE_AWAY, "chmod 757 usr/bin/nvidia-cdi-hook", "chmod 777 usr/bin"])
def test_a_hook_that_a_user_could_replace_is_not_run(root, change):
    searching, hook = source(root), "/usr/bin/nvidia-cdi-hook"
    (root / hook[1:]).chmod(0o755)
    assert searching.build(request(hook=hook)).specs[GPU_FILE].container_edits.hooks
    do(root, change)
    built = searching.build(request(hook=hook))
    assert built.specs[GPU_FILE].container_edits.hooks == ()
    (sentence,) = [each for each in built.complaints if "--nvidia-cdi-hook-path" in each]
    assert hook in sentence
    assert "run in the driver root: ch" in sentence
    (root / "usr/bin").chmod(0o755)
    os.chown(root / hook[1:], 0, 0)
    (root / hook[1:]).chmod(0o755)
    assert searching.build(request(hook=hook)).specs[GPU_FILE].container_edits.hooks


def test_a_specification_that_an_earlier_process_left_does_not_hold_with_unsafe_files(root):
    searching = source(root)

    def left(path: str, hook: str = "") -> bool:
        common = Edits(
            mounts=(Mount(host_path=path, container_path="/x", options=("ro",)),),
            hooks=(Hook(hook_name="createContainer", path=hook),) if hook else (),
        )
        return searching.holds(made("a.b/gpu", (SpecDevice(name="a", container_edits=Edits()),), common))

    (root / "usr/link").symlink_to("/etc")
    assert left("/etc/cufile.json")
    assert not left("/usr/link/cufile.json")
    assert left("/etc/cufile.json", "/usr/bin/nvidia-cdi-hook")
    do(root, GIVE_AWAY)
    assert not left("/etc/cufile.json", "/usr/bin/nvidia-cdi-hook")
    assert not left("/home/user/lib")
    assert not left("/")
    assert not left(f"/home/user/lib/libuser.so.{VERSION}")


# Random trees

PLACES = [
    *(MPS, "tmp", "run", "run/udev", "run/opengl-driver", "run/nvidia-persistenced", "run/nvidia-persistenced/socket"),
    *("run/nvidia-fabricmanager/socket", "usr", "usr/lib64", "usr/lib64/vdpau", "usr/bin", "usr/bin/nvidia-smi"),
    *("etc/cufile.json", "etc/vulkan/icd.d", "etc/vulkan/icd.d/nvidia_icd.json", "etc/alternatives/x", "lib64"),
    *("opt/nvidia/lib64", f"lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"),
    *(f"usr/lib64/lib{name}.so.{VERSION}" for name in ("cuda", "nvidia-ml", "nvcuvid", 'q"uo', "new\nline", "\udcff")),
    f"usr/lib64/lib{'x' * 236}.so.{VERSION}",
]
TARGETS = [
    *("/etc", "/", "..", "../../../../../etc/shadow", "/tmp", "/home/user", "/home/user/lib", "nowhere", "/run/udev"),
    *(f"/home/user/lib/libcuda.so.{VERSION}", f"/usr/lib64/libcuda.so.{VERSION}", f"../usr/lib64/libcuda.so.{VERSION}"),
    *(
        "/etc/alternatives/x",
        "/run/nvidia-persistenced/socket",
        "/usr/lib64",
        "/tmp/nvidia-mps",
        "x" * 300,
        "a/" * 1000,
    ),
]


def put(path: Path, what: str, target: str) -> None:
    """Replace the file at a path; `leave` keeps it."""
    if what == "leave":
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if what == "link":
        path.symlink_to(target)
    elif what == "file":
        path.write_bytes(driver_files.shared_library("libcuda.so.1"))
    elif what == "directory":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        Root(path.parent).listen(path.name)


changes = st.tuples(
    st.sampled_from(PLACES),
    st.sampled_from(["leave", "link", "link", "file", "directory", "pipe", "socket"]),
    st.sampled_from(TARGETS),
    st.sampled_from([0, 0, USER]),
    st.sampled_from([None, None, 0o755, 0o775, 0o757, 0o777, 0o1777, 0o644, 0o666, 0o000]),
)


@pytest.fixture(scope="module")
def user() -> Iterator[socket.SocketIO]:
    """A stream to a process of an ordinary user, which tries to change the paths in each line, and then answers."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        ours.close()
        try:
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
            with theirs.makefile("rwb", buffering=0) as stream:
                while line := stream.readline():
                    tamper(json.loads(line))
                    stream.write(b"done\n")
        finally:
            os._exit(0)
    theirs.close()
    with ours, ours.makefile("rwb", buffering=0) as stream:
        yield stream
    os.waitpid(child, 0)


def tamper(paths: list[str]) -> None:
    """Try to change or replace these paths and the directories above them."""
    for place in (place for path in paths for place in prefixes(path)):
        with suppress(OSError):
            Path(place).chmod(0o777)
        for flags in (os.O_TRUNC, os.O_CREAT):
            with suppress(OSError):
                opened = os.open(place, os.O_WRONLY | os.O_NONBLOCK | flags)
                os.write(opened, b"the user's")
                os.close(opened)
        with suppress(OSError):
            Path(place, "new").write_text("the user's")
        with suppress(OSError):
            Path(place).rename(f"{place}.moved")
            Path(place).symlink_to("/etc")


def prefixes(path: str) -> Iterator[str]:
    parts = path.split("/")
    return ("/".join(parts[:end]) for end in range(len(parts), 2, -1))


def state(path: str) -> tuple[object, ...]:
    """The identity and content of a file as containers see it; any process may connect to a socket."""
    status = os.lstat(path)
    if stat.S_ISSOCK(status.st_mode):
        return (status.st_ino,)  # a socket may have any owner and mode: its owner may change the mode
    names = sorted(Path(path).iterdir()) if stat.S_ISDIR(status.st_mode) else []
    content = Path(path).read_bytes() if stat.S_ISREG(status.st_mode) else b""
    return status.st_ino, status.st_mode, status.st_uid, names, content


@settings(max_examples=80)
@example([(MPS, "link", "/etc", USER, None)], 0)
@example([(MPS, "link", "/", 0, None)], 0)
@example([("tmp", "leave", "", 0, 0o777)], 0)
@example([("run/nvidia-persistenced/socket", "link", "/etc", 0, None)], 0)
@example([("usr/lib64", "link", "/home/user/lib", 0, None)], 0)
@example([("lib64", "link", "/home/user/lib", 0, None)], 0)
@example([("usr/bin", "leave", "", USER, None)], 0)
@example([("run", "link", "x" * 300, 0, None), ("run/nvidia-persistenced/socket", "leave", "", 0, None)], 0)
@example([("run/nvidia-persistenced/socket", "socket", "", USER, None)], 0)
@given(st.lists(changes, min_size=1, max_size=6), st.sampled_from([0, 0o1777, 0o777]))
def test_no_user_can_change_anything_that_a_container_is_given(user, hostile, top):
    with short_directory() as directory:
        directory.chmod(0o755)
        root = node(directory / "root")
        if top:
            root.chmod(top)
        for place, what, target, uid, mode in hostile:
            path = root / place
            # `Path.is_symlink` raises OSError for very long paths.
            if any(os.path.islink(above) for above in path.parents if above.is_relative_to(root)):  # noqa: PTH114
                continue  # the change would be made where an earlier link leads, which may be a directory of this machine
            with suppress(OSError):
                put(path, what, target)
                os.lchown(path, uid, uid)
                if mode is not None and not path.is_symlink():
                    path.chmod(mode)
        if top:
            with pytest.raises(UnsafeSpecError):
                source(root).build(request())
            return
        built = source(root).build(request())
        outcome = SpecDirectory(directory / "cdi").write(built.specs)
        assert (dict(outcome.refused), dict(outcome.invalid)) == ({}, {})
        assert all(each.isprintable() for each in built.complaints)
        paths = [f"{root}{path}" for spec in built.specs.values() for path in mounted(spec)]
        assert all(
            os.path.realpath(path) == path != str(root) for path in paths
        )  # below the root, and no link on the way
        before = {path: state(path) for path in paths}
        user.write(json.dumps(paths).encode() + b"\n")
        assert user.readline() == b"done\n"
        assert {path: state(path) for path in paths} == before
