import ctypes
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from gpu_plugin.containers.cdi.host_files import LIBRARY_DIRECTORIES, WSL_LIBRARIES
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.driver import SONAME, Calls, load, unload
from gpu_plugin.nvml.port import NvmlError
from tests.unit.containers.driver_root.installed import ld_cache_of

GOOD = b"a library"


@pytest.fixture
def loads(monkeypatch):
    """The paths that the loader was called with. It loads any file with the content GOOD, and no bare name."""
    asked = []

    def cdll(path):
        asked.append(path)
        if "/" not in path:
            raise OSError(f"{path}: cannot open shared object file: No such file or directory")
        if Path(path).read_bytes() != GOOD:
            raise OSError(f"{path}: invalid ELF header")
        return path

    monkeypatch.setattr(ctypes, "CDLL", cdll)
    return asked


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "driver"
    path.mkdir()
    return path


def put(root, path, content=GOOD):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return str(file)


def link(root, path, target):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.symlink_to(target)


def refusal(roots):
    with pytest.raises(NvmlError) as caught:
        load(roots)
    return caught.value


@pytest.mark.parametrize("directory", [WSL_LIBRARIES, *LIBRARY_DIRECTORIES])
def test_every_place_under_a_root_is_looked_at(root, loads, directory):
    file = put(root, f"{directory}/{SONAME}")
    assert load([str(root)]) == file
    assert loads == [file]


def test_the_first_root_that_has_it_wins(tmp_path, loads):
    second = put(tmp_path, f"b/lib/{SONAME}")
    assert load([str(tmp_path / "a"), str(tmp_path / "b")]) == second
    first = put(tmp_path, f"a/opt/nvidia/lib64/{SONAME}")
    assert load([str(tmp_path / "a"), str(tmp_path / "b")]) == first


def test_on_wsl_its_own_library_goes_before_that_of_a_linux_driver(root, loads):
    put(root, f"usr/lib/x86_64-linux-gnu/{SONAME}")
    file = put(root, f"usr/lib/wsl/lib/{SONAME}")
    assert load([str(root)]) == file


def test_below_the_real_root_wsls_own_is_found_without_the_loaders_help(root, loads, monkeypatch):
    monkeypatch.setattr("gpu_plugin.nvml.driver.WSL_LIBRARIES", str(root).lstrip("/"))
    error = refusal([])
    assert f"below /: {str(root).lstrip('/')}" in str(error)
    assert loads == [SONAME]
    file = put(root, SONAME)
    assert load([]) == file
    assert loads == [SONAME, SONAME, file]


@pytest.mark.parametrize("roots", [[], ["/"], ["", "/"]])
def test_the_real_root_is_left_to_the_loader(roots, loads):
    refusal(roots)
    assert loads == [SONAME]


def test_the_error_lists_the_directories_that_were_searched(tmp_path, loads):
    roots = [str(tmp_path / "a"), "/", str(tmp_path / "b"), str(tmp_path / "a")]
    put(tmp_path / "b", "etc/ld.so.conf", b"/opt/site/lib")
    error = refusal(roots)
    assert error.code == Return.LIBRARY_NOT_FOUND
    known = ", ".join((WSL_LIBRARIES, *LIBRARY_DIRECTORIES))
    assert f"below {roots[0]}: {known};" in str(error)
    assert f"below {roots[2]}: {known}, opt/site/lib;" in str(error)
    assert f"{SONAME} ({SONAME}: cannot open shared object file" in str(error)
    assert str(error).count("\n") == 0


def test_a_library_is_found_where_the_roots_own_loader_finds_it(root, loads):
    file = put(root, f"opt/site/lib/{SONAME}")
    put(root, "etc/ld.so.conf", b"include /etc/site/*.conf")
    put(root, "etc/site/site.conf", b"/opt/site/lib")
    assert load([str(root)]) == file
    cached = put(root, f"srv/lib/{SONAME}")
    put(root, "etc/ld.so.cache", ld_cache_of([f"/srv/lib/{SONAME}"]))
    assert load([str(root)]) == cached


def test_a_file_that_is_no_library_is_said_so_and_passed_over(root, loads):
    bad = put(root, f"usr/lib64/{SONAME}", b"not an ELF file")
    good = put(root, f"lib/{SONAME}")
    assert load([str(root)]) == good
    assert loads == [bad, good]


def test_the_real_loader_refuses_a_file_that_is_no_library(root, monkeypatch):
    bad = put(root, f"usr/lib64/{SONAME}", b"not an ELF file")
    real = ctypes.CDLL

    def only_files(path):
        if path == SONAME:  # this machine may have the library
            raise OSError("none here")
        return real(path)

    monkeypatch.setattr(ctypes, "CDLL", only_files)
    error = refusal([str(root)])
    assert f"{bad} ({bad}: " in str(error)
    assert "none here" in str(error)


@pytest.mark.parametrize(
    ("file", "links"),
    [
        *[
            ("usr/lib64/libnvidia-ml.so.580.159.04", {f"{at}/{SONAME}": target})
            for at, target in (
                ("usr/lib64", "libnvidia-ml.so.580.159.04"),
                ("usr/lib64", "/usr/lib64/libnvidia-ml.so.580.159.04"),
                ("usr/lib64", "../lib64/./libnvidia-ml.so.580.159.04"),
                ("lib/x86_64-linux-gnu", "../../usr/lib64/libnvidia-ml.so.580.159.04"),
                ("usr/lib", "../../../../../../../../usr/lib64/libnvidia-ml.so.580.159.04"),
                ("lib", "{root}/usr/lib64/libnvidia-ml.so.580.159.04"),  # a mount of the root in a process
            )
        ],
        (
            "usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.535.1",
            {
                f"usr/lib/x86_64-linux-gnu/{SONAME}": f"/etc/alternatives/glx--{SONAME}",
                f"etc/alternatives/glx--{SONAME}": f"/usr/lib/x86_64-linux-gnu/nvidia/current/{SONAME}",
                f"usr/lib/x86_64-linux-gnu/nvidia/current/{SONAME}": "libnvidia-ml.so.535.1",
            },
        ),
        (
            f"opt/drivers/580/{SONAME}",
            {
                "usr/local/nvidia": "/opt/drivers/current",
                "opt/drivers/current": "580",
                f"opt/drivers/580/lib64/{SONAME}": f"/usr/local/nvidia/{SONAME}",
            },
        ),
    ],
)
@pytest.mark.parametrize("slash", ["", "/"])
def test_links_are_followed_within_the_root(root, loads, file, links, slash):
    library = put(root, file)
    for path, target in links.items():
        link(root, path, target.format(root=root))
    assert load([f"{root}{slash}"]) == library


@pytest.mark.parametrize("others", [["/"], [""]])
def test_a_link_stays_within_its_own_root_whatever_the_other_roots_are(tmp_path, root, loads, others):
    put(tmp_path, "elsewhere/lib")
    inside = put(root, f"{tmp_path}/elsewhere/lib".lstrip("/"))
    link(root, f"usr/lib64/{SONAME}", f"{tmp_path}/elsewhere/lib")
    assert load([*others, str(tmp_path / "empty"), str(root)]) == inside


def test_a_link_that_leads_to_nothing_in_the_root_is_passed_over(tmp_path, root, loads):
    outside = put(tmp_path, "outside")
    link(root, f"usr/lib64/{SONAME}", outside)
    link(root, f"lib64/{SONAME}", f"../../../{'../' * 20}{outside.lstrip('/')}")
    good = put(root, f"lib/{SONAME}")
    assert load([str(root)]) == good
    assert loads == [good]


def test_links_that_go_in_circles_are_passed_over(root, loads):
    link(root, f"usr/lib64/{SONAME}", "one")
    link(root, "usr/lib64/one", SONAME)
    link(root, "lib64", "/lib64")
    assert refusal([str(root)]).code == Return.LIBRARY_NOT_FOUND
    assert loads == [SONAME]


def mapped(path):
    """Return the inodes of code that this process loaded from this path."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return {line[4] for line in lines if line[5:6] == [path]}


def test_a_library_that_was_unloaded_is_taken_from_disk_anew(root):
    path = root / "usr/lib64" / SONAME
    path.parent.mkdir(parents=True)
    shutil.copyfile(msgspec._core.__file__, path)  # a shared object that this machine can load
    old = load([str(root)])
    before = mapped(str(path))
    upgraded = root / "upgraded"
    shutil.copyfile(msgspec._core.__file__, upgraded)
    upgraded.rename(path)
    unload(old)
    assert mapped(str(path)) == set()
    new = load([str(root)])
    assert new.PyInit__core
    after = mapped(str(path))
    unload(new)
    assert (len(before), len(after), before & after) == (1, 1, set())


def test_calls_under_way_are_counted_however_they_end():
    calls = Calls()
    with calls:
        assert calls.calls == 1
        with pytest.raises(ValueError, match="driver"), calls:
            raise ValueError(f"the driver had {calls.calls} calls")
        assert calls.calls == 1
    assert calls.calls == 0
    assert not calls.lock.locked()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("place", ["usr/lib64", f"usr/lib64/{SONAME}", ".."])
def test_a_library_that_a_user_could_replace_is_not_loaded(root, loads, place):
    file = put(root, f"usr/lib64/{SONAME}")
    (root / place).chmod(0o777)
    error = refusal([str(root)])
    assert loads == [SONAME], "the loader's own"
    assert file in str(error)
    assert "chmod" in str(error)
    (root / place).chmod(0o755)
    assert load([str(root)]) == file
