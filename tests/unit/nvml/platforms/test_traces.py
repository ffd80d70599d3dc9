import pytest

from gpu_plugin.nvml.platforms.choice import Traces
from gpu_plugin.nvml.platforms.driver import look


def put(root, path, content=""):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return str(file)


def seen(*roots):
    return look([str(root) for root in roots])


def test_nothing_is_found_where_nothing_is(tmp_path):
    assert seen(tmp_path, tmp_path / "absent") == Traces()
    assert look([]) == Traces()


@pytest.mark.parametrize("directory", ["usr/lib/wsl/lib", "usr/lib/x86_64-linux-gnu", "lib64", "usr/lib"])
def test_the_dxcore_library_is_looked_for_where_the_loader_would(tmp_path, directory):
    library = put(tmp_path, f"{directory}/libdxcore.so")
    assert seen(tmp_path) == Traces(dxcore=library)


def test_a_library_that_is_a_link_into_its_own_root_is_there(tmp_path):
    link = tmp_path / "usr/lib/wsl/lib/libdxcore.so"
    link.parent.mkdir(parents=True)
    link.symlink_to("/opt/elsewhere/libdxcore.so")
    assert seen(tmp_path) == Traces(dxcore=str(link))


def test_the_dxg_device_is_looked_for_under_every_root(tmp_path):
    library = put(tmp_path / "driver", "usr/lib/wsl/lib/libdxcore.so")
    device = put(tmp_path / "host", "dev/dxg")
    assert seen(tmp_path / "driver", tmp_path / "host") == Traces(library, device)


def test_the_first_root_counts(tmp_path):
    first = put(tmp_path / "a", "dev/dxg")
    put(tmp_path / "b", "dev/dxg")
    assert seen(tmp_path / "a", tmp_path / "b") == Traces(dxg=first)


def test_a_tegra_system_has_a_release_file(tmp_path):
    assert seen(tmp_path / "empty", tmp_path) == Traces()
    release = put(tmp_path, "etc/nv_tegra_release", "# R36 (release), REVISION: 4.3")
    assert seen(tmp_path / "empty", tmp_path) == Traces(tegra=release)


@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("Tegra\n", True),
        ("tegra234", True),
        ("TEGRA", True),
        ("jep106:0426\n", False),
        ("not tegra", False),
        ("", False),
    ],
)
def test_or_a_chip_of_that_family(tmp_path, family, found):
    file = put(tmp_path, "sys/devices/soc0/family", family)
    assert seen(tmp_path) == Traces(tegra=file if found else "")


def test_a_family_that_is_no_tegra_hides_no_other_root(tmp_path):
    put(tmp_path / "a", "sys/devices/soc0/family", "jep106:0426\n")
    file = put(tmp_path / "b", "sys/devices/soc0/family", "Tegra\n")
    assert seen(tmp_path / "a", tmp_path / "b") == Traces(tegra=file)


def test_the_release_file_goes_before_the_family(tmp_path):
    put(tmp_path / "a", "sys/devices/soc0/family", "Tegra\n")
    release = put(tmp_path / "b", "etc/nv_tegra_release")
    assert seen(tmp_path / "a", tmp_path / "b") == Traces(tegra=release)


def test_a_directory_is_no_file(tmp_path):
    for path in ("usr/lib/wsl/lib/libdxcore.so", "dev/dxg", "etc/nv_tegra_release", "sys/devices/soc0/family"):
        (tmp_path / path).mkdir(parents=True)
    assert seen(tmp_path) == Traces()


def test_a_family_that_is_no_text_is_no_tegra(tmp_path):
    file = tmp_path / "sys/devices/soc0/family"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\xff\xfe")
    assert seen(tmp_path) == Traces()
