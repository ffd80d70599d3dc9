import ctypes
import errno
import os
import resource
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu_plugin.containers.driver_root.inside import MAX_LINKS, resolve, walk
from tests.unit.containers.driver_root.installed import Root


@pytest.fixture
def root(tmp_path):
    """A root, and a file outside of it."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/outside").write_text("not ours")
    made = Root(tmp_path / "root")
    made.write("usr/lib64/real")
    made.write("etc/inside")
    return made


def resolved(root: Root, path: str) -> str | None:
    found = resolve(str(root), f"{root}{path}")
    return found if found is None else found.removeprefix(str(root))


@pytest.mark.parametrize(
    ("target", "leads_to"),
    [
        ("real", "/usr/lib64/real"),
        ("./real", "/usr/lib64/real"),
        ("/usr/lib64/real", "/usr/lib64/real"),
        ("//usr///lib64/./real", "/usr/lib64/real"),
        ("../lib64/../../etc/inside", "/etc/inside"),
        ("../../../../../../etc/inside", "/etc/inside"),  # the root is its own parent
        ("../../../etc/outside", None),
        ("/etc/outside", None),
        ("/usr", "/usr"),
        ("/", ""),
        ("real/further", None),
        ("nothing", None),
        ("nothing/../real", None),  # as the kernel has it
        ("link", None),  # itself
        ("a" * 300, None),  # longer than any name can be
        ("x/" * 1000, None),
    ],
)
def test_where_a_link_leads_below_a_root(root, target, leads_to):
    root.link("usr/lib64/link", target)
    assert resolved(root, "/usr/lib64/link") == leads_to


def test_a_link_may_be_written_as_whoever_mounted_the_root_sees_it(root):
    root.link("usr/lib64/link", f"{root}/usr/lib64/real")
    root.link("top", str(root))
    assert resolved(root, "/usr/lib64/link") == resolved(root, "/top/usr/lib64/real") == "/usr/lib64/real"


def test_as_many_links_as_the_kernel_follows_and_no_circle(root):
    for at in range(MAX_LINKS):
        root.link(f"chain{at}", f"chain{at + 1}" if at + 1 < MAX_LINKS else "usr/lib64/real")
    assert resolved(root, "/chain0") == "/usr/lib64/real"
    root.link("chain", "chain0")
    assert resolved(root, "/chain") is None
    root.links({"a": "b", "b": "/c", "c": "../a"})
    assert resolved(root, "/a") is None
    root.links({"into": "into/into"})
    assert resolved(root, "/into") is None


def test_the_real_root_has_an_empty_name(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("/" + "../" * 3 + str(tmp_path)[1:] + "/file")
    up = "../" * (str(tmp_path).count("/") - 1)
    (tmp_path / "up").symlink_to(f"{up}../{str(tmp_path)[1:]}/file")
    assert resolve("", f"{tmp_path}/link") == resolve("", f"{tmp_path}/up") == f"{tmp_path}/file"
    assert resolve("", "/") == ""


def test_a_root_that_is_not_there_has_nothing(tmp_path):
    assert resolve(f"{tmp_path}/gone", f"{tmp_path}/gone") is None
    assert resolve(f"{tmp_path}/gone", f"{tmp_path}/gone/usr") is None


def names(root: Root, path: str) -> list[tuple[str, bool]]:
    """Each name on the way by its path, and whether it is a link."""
    way = walk(str(root), f"{root}{path}")
    assert all(name.path.rpartition("/")[0] == name.directory for name in way.names)
    return [(name.path.removeprefix(str(root)), name.link) for name in way.names]


def test_the_way_has_every_name_and_link_that_was_followed(root):
    root.links({"lib64": "usr/lib64", "usr/lib64/link": "/etc/alternatives/link", "etc/alternatives/link": "../inside"})
    assert names(root, "/lib64/link") == [
        ("/lib64", True),
        ("/usr", False),
        ("/usr/lib64", False),
        ("/usr/lib64/link", True),
        ("/etc", False),
        ("/etc/alternatives", False),
        ("/etc/alternatives/link", True),
        ("/etc/inside", False),
    ]
    assert names(root, "/etc/inside") == [("/etc", False), ("/etc/inside", False)]
    assert names(root, "/etc/nothing/more") == [("/etc", False)]
    assert names(root, "/") == []


@pytest.mark.parametrize(
    ("path", "link"),
    [
        ("/lib64/real", False),
        ("/lib64", True),
        ("/lib64/", False),
        ("/usr/lib64/link", True),
        ("/chain", True),
        ("/etc/inside", False),
    ],
)
def test_whether_the_path_itself_is_a_link(root, path, link):
    root.links({"lib64": "usr/lib64", "usr/lib64/link": "real", "chain": "lib64/link"})
    assert walk(str(root), f"{root}{path}").link is link


def test_no_descriptor_stays_open_whatever_the_way_ends_in(root):
    root.links({"a": "/usr/lib64/real", "b": "c", "c": "b", "d": "/usr/../etc/inside/x", "e": "nothing/x"})
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in ("/a", "/b", "/d", "/e", "/usr/lib64/real", "/usr/lib64/../../..", "/nul\0", "/" + "x" * 300, "/"):
        walk(str(root), f"{root}{path}")
    walk(f"{root}/none", f"{root}/none/x")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.fixture
def few_files():
    """This process may have few files open, as many programs of a node."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def deep(root, monkeypatch):
    """A root in which the directory d has another d in it, and so on."""
    monkeypatch.chdir(root.path)
    for _ in range(500):  # one by one: no path is that long
        Path("d").mkdir()
        os.chdir("d")
    os.chdir(root.path)
    yield root
    subprocess.run(["rm", "-rf", "d"], cwd=root.path, check=True)  # shutil calls itself for each directory


@pytest.mark.usefixtures("few_files")
def test_a_way_of_very_many_directories_leads_nowhere(deep):
    deep.links({"down": "d/" * 500, "down and up": "d/../" * 500})
    assert resolve(str(deep), f"{deep}/down") is resolve(str(deep), f"{deep}/down and up") is None
    assert resolve(str(deep), f"{deep}{'/d' * 100}") == f"{deep}{'/d' * 100}"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_no_room_for_another_open_file_is_said_and_not_taken_for_a_file_that_is_gone(root, monkeypatch, number):
    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match=os.strerror(number)):
        resolve(str(root), f"{root}/etc/inside")


OPENAT2, RESOLVE_IN_ROOT = 437, 0x10  # openat2(2)
libc = ctypes.CDLL(None, use_errno=True)


def kernels_answer(root: Root, path: str) -> str | None:
    """The result of the kernel for a process with this root."""
    base = os.open(root.path, os.O_PATH)
    try:
        how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, RESOLVE_IN_ROOT)
        opened = libc.syscall(OPENAT2, base, os.fsencode(path), how, len(how))
        if opened < 0:
            if ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
                pytest.skip("this kernel has no openat2(2), or forbids it")
            return None
        try:
            return str(Path(f"/proc/self/fd/{opened}").readlink())
        finally:
            os.close(opened)
    finally:
        os.close(base)


parts = st.sampled_from(["a", "b", "c", "d", "file", "..", "."])
targets = st.tuples(st.booleans(), st.lists(parts, min_size=1, max_size=6), st.booleans()).map(
    lambda parts: ("/" if parts[0] else "") + "/".join(parts[1]) + ("/" if parts[2] else "")
)


@settings(max_examples=300)
@example(links={}, path="d/file/..")
@example(links={}, path="d/file/.")
@example(links={"a": "d/file/"}, path="a")
@example(links={"a": "b/../d", "b": "c"}, path="a/file")
@given(
    links=st.dictionaries(st.sampled_from(["a", "b", "c", "d/a", "d/b", "d/c"]), targets, max_size=6),
    path=st.lists(parts, min_size=1, max_size=5).map("/".join),
)
def test_what_is_found_is_what_the_kernel_finds_for_whom_the_root_is_the_root(tmp_path_factory, links, path):
    root = Root(tmp_path_factory.mktemp("root"))
    root.write("d/file")
    root.links(links)
    assert resolve(str(root), f"{root}/{path}") == kernels_answer(root, path)
