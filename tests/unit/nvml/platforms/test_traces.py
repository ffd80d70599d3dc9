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


def test_missing_files_directories_and_bytes_that_are_no_text_are_no_traces(tmp_path):
    assert look([]) == Traces()
    assert seen(tmp_path, tmp_path / "absent") == Traces()
    for path in ("usr/lib/wsl/lib/libdxcore.so", "dev/dxg", "etc/nv_tegra_release"):
        (tmp_path / path).mkdir(parents=True)
    file = tmp_path / "sys/devices/soc0/family"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\xff\xfe")
    assert seen(tmp_path) == Traces()


@pytest.mark.parametrize("directory", ["usr/lib/wsl/lib", "usr/lib/x86_64-linux-gnu", "lib64", "usr/lib"])
def test_the_dxcore_library_is_found_in_the_directories_of_the_loader(tmp_path, directory):
    library = put(tmp_path, f"{directory}/libdxcore.so")
    assert seen(tmp_path) == Traces(dxcore=library)


def test_a_link_into_its_own_root_counts_as_the_library(tmp_path):
    link = tmp_path / "usr/lib/wsl/lib/libdxcore.so"
    link.parent.mkdir(parents=True)
    link.symlink_to("/opt/elsewhere/libdxcore.so")
    assert seen(tmp_path) == Traces(dxcore=str(link))


def test_each_file_is_looked_for_under_every_root_and_the_first_counts(tmp_path):
    library = put(tmp_path / "driver", "usr/lib/wsl/lib/libdxcore.so")
    device = put(tmp_path / "host", "dev/dxg")
    put(tmp_path / "other", "dev/dxg")
    assert seen(tmp_path / "driver", tmp_path / "host", tmp_path / "other") == Traces(library, device)


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
def test_a_tegra_system_has_a_chip_of_that_family(tmp_path, family, found):
    file = put(tmp_path, "sys/devices/soc0/family", family)
    assert seen(tmp_path) == Traces(tegra=file if found else "")


def test_the_release_file_counts_before_a_family_of_any_root(tmp_path):
    put(tmp_path / "a", "sys/devices/soc0/family", "jep106:0426\n")
    family = put(tmp_path / "b", "sys/devices/soc0/family", "Tegra\n")
    assert seen(tmp_path / "a", tmp_path / "b") == Traces(tegra=family)
    release = put(tmp_path / "c", "etc/nv_tegra_release")
    assert seen(tmp_path / "b", tmp_path / "c") == Traces(tegra=release)
