"""The directories of a driver root's dynamic loader, from caches and configuration files made here, and of this machine."""

import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_plugin.containers.driver_root.loader import MAX_DIRECTORIES, cached_directories, loader_directories
from gpu_plugin.containers.driver_root.tree import Tree
from tests.unit.containers.driver_root.installed import Root, ld_cache_of, old_ld_cache_of

LIBRARIES = ("/usr/lib64/nvidia/libcuda.so.1", "/lib/libc.so.6", "/usr/lib64/nvidia/libnvidia-ml.so.1", "/a b/libx.so")
DIRECTORIES = ("/usr/lib64/nvidia", "/lib", "/a b")


@pytest.fixture
def root(tmp_path):
    return Root(tmp_path / "root")


def found(root):
    return loader_directories(Tree(str(root)))


@pytest.mark.parametrize(
    "content",
    [
        ld_cache_of(LIBRARIES),
        old_ld_cache_of(LIBRARIES),
        old_ld_cache_of(LIBRARIES[:1], both=LIBRARIES),
        old_ld_cache_of(LIBRARIES[:2], both=LIBRARIES),  # the new header is aligned after the old entries
    ],
)
def test_each_format_of_the_cache(content):
    assert cached_directories(content) == DIRECTORIES


@pytest.mark.skipif(not Path("/etc/ld.so.cache").exists() or not shutil.which("ldconfig"), reason="no glibc here")
def test_the_cache_of_this_machine_is_read_as_ldconfig_reads_it():
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    expected = {os.path.dirname(path) for path in re.findall(r" => (/.*)$", listed, re.MULTILINE)}  # noqa: PTH120
    assert expected
    assert set(cached_directories(Path("/etc/ld.so.cache").read_bytes())) == expected


def with_count(content: bytes, count: int) -> bytes:
    return content[:20] + struct.pack("<I", count) + content[24:]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"ld.so-1.7.0\0",
        b"glibc-ld.so.cache1.1",
        b"glibc-ld.so.cache1.2" + ld_cache_of(LIBRARIES)[20:],
        with_count(ld_cache_of(LIBRARIES), 0xFFFFFFFF),
        b"ld.so-1.7.0\0" + b"\xff" * 40,
        ld_cache_of(LIBRARIES)[:60],
    ],
)
def test_a_file_that_is_no_whole_cache_is_refused(content):
    with pytest.raises(ValueError, match=r"^it "):
        cached_directories(content)


def test_paths_outside_of_the_cache_do_not_count():
    content = bytearray(ld_cache_of(LIBRARIES[:2]))
    struct.pack_into("<I", content, 48 + 8, 0xFFFFFFF0)
    assert cached_directories(bytes(content)) == ("/lib",)
    assert cached_directories(ld_cache_of(LIBRARIES[:2])[:-1]) == DIRECTORIES[:1]  # the last path has no end


def test_a_path_that_is_longer_than_linux_has_them_does_not_count():
    longest = f"/{'a/' * 2040}{'b' * 6}/libx.so"
    assert len(longest) == 4095
    assert len(cached_directories(ld_cache_of([longest, f"/c{longest}", "/lib/libx.so"]))) == 2


@given(st.binary(max_size=200), st.integers(0, 200), st.sampled_from([ld_cache_of, old_ld_cache_of]))
def test_no_damage_to_a_cache_raises_anything_else(damage, at, make):
    content = make(LIBRARIES)
    try:
        directories = cached_directories(content[:at] + damage + content[at + len(damage) :])
    except ValueError:
        return
    assert all(path.startswith("/") for path in directories)


def test_a_cache_of_many_directories_is_read_up_to_a_bound():
    content = ld_cache_of([f"/{at}/libx.so" for at in range(10_000)])
    assert len(cached_directories(content)) == MAX_DIRECTORIES


def test_names_that_are_not_utf8_cost_no_other_directory(root):
    root.write("etc/ld.so.cache", ld_cache_of([os.fsdecode(b"/\xff\xfe/libx.so"), "/usr/lib/ok/libx.so"]))
    assert found(root) == ("usr/lib/ok",)


def test_without_a_cache_the_configuration_counts_with_all_that_it_includes(root):
    root.write(
        "etc/ld.so.conf",
        b"# comment\ninclude ld.so.conf.d/*.conf /opt/more.conf\n  /opt/x/lib  \n/usr/lib=libc5\nhwcap 1 x\nrelative\n",
    )
    root.write("etc/ld.so.conf.d/b.conf", b"/b\ninclude /etc/ld.so.conf\n/../../escape\n")
    root.write("etc/ld.so.conf.d/a.conf", b"/a # comment\n\xff\n/\xff\n")
    root.write("etc/ld.so.conf.d/ignored", b"/ignored\n")
    root.write("opt/more.conf", b"/more\n")
    expected = ("opt/x/lib", "usr/lib", "a", "b", "escape", "more")
    assert found(root) == expected
    root.write("etc/ld.so.cache", b"no cache")
    assert found(root) == expected
    root.write("etc/ld.so.cache", ld_cache_of(["/from/the/cache/libx.so"]))
    assert found(root) == ("from/the/cache",)


def test_no_file_outside_of_the_root_is_read(root):
    outside = root.path.parent / "outside.conf"
    outside.write_text("/outside\n")
    root.link("etc/ld.so.cache", str(root.path.parent / "cache"))
    (root.path.parent / "cache").write_bytes(ld_cache_of(["/outside/libx.so"]))
    root.write("etc/ld.so.conf", f"include ../../outside.conf {outside}\n/inside\n".encode())
    assert found(root) == ("inside",)


def test_a_configuration_that_others_can_write_does_not_count(root):
    root.write("etc/ld.so.conf", b"/configured\n").chmod(0o666)
    assert found(root) == ()


def test_patterns_that_multiply_end_after_a_bounded_number_of_directories(root, monkeypatch):
    root.write("etc/ld.so.conf", b"include /etc/x/*.conf\n")
    for at in range(60):
        patterns = " ".join(f"*/{'?' * length}/*.conf" for length in range(10 * at, 10 * at + 10))
        root.write(f"etc/x/{at:03}.conf", f"/d{at:03}\ninclude {patterns}\n".encode())
    listed = []
    listdir = os.listdir

    def counted(path):
        listed.append(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", counted)
    assert len(found(root)) == 60
    assert len(listed) < 10_000  # and not 36,000


def test_a_file_that_is_included_many_times_keeps_no_other_out(root):
    patterns = " ".join(f"/etc/x/*{'?' * more}.conf" for more in range(10))
    root.write("etc/ld.so.conf", f"include {patterns} /opt/last.conf\n".encode())
    for at in range(20):
        root.write(f"etc/x/directory-{at:03}.conf", f"/d{at:03}\n".encode())
    root.write("opt/last.conf", b"/last\n")
    assert found(root) == (*(f"d{at:03}" for at in range(20)), "last")
