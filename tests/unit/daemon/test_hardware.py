import pytest

from gpu_plugin.config.resolve import resolve
from gpu_plugin.daemon.hardware import hardware_for, loaded_library


def roots(**asked):
    return list(hardware_for(resolve(asked, {})).driver_roots())


@pytest.fixture
def outside(monkeypatch):
    """This process is in no container."""
    monkeypatch.setattr("gpu_plugin.containers.node_files.evidence.contained", lambda: False)


def test_where_the_driver_root_is_mounted_nothing_else_counts(tmp_path, outside):
    assert roots(driver_root_ctr_path=str(tmp_path)) == [(str(tmp_path), "")]
    assert roots(driver_root_ctr_path=f"{tmp_path}/", driver_root="/run/nvidia/driver/") == [
        (str(tmp_path), "/run/nvidia/driver")
    ]


def test_on_the_host_itself_the_driver_root_is_where_it_is(tmp_path, outside):
    absent = str(tmp_path / "absent")
    assert roots(driver_root_ctr_path=absent) == [("", "")]
    assert roots(driver_root_ctr_path=absent, driver_root="/opt/driver") == [("/opt/driver", "/opt/driver")]


def test_in_a_container_a_driver_that_is_not_mounted_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    absent = str(tmp_path / "absent")
    assert roots(driver_root_ctr_path=absent) == [(absent, "")]


def test_a_simulated_node_has_a_driver_of_its_own_unless_one_is_named(tmp_path, outside):
    (made,) = roots(simulate="t4-4", state_dir=str(tmp_path))
    assert made == (f"{tmp_path}/driver-root", f"{tmp_path}/driver-root")
    (library,) = (tmp_path / "driver-root/usr/lib64").glob("libcuda.so.*.*")
    assert library.read_bytes().startswith(b"\x7fELF")
    named = roots(simulate="t4-4", state_dir=str(tmp_path), driver_root="/opt/driver", driver_root_ctr_path="/absent")
    assert named == [("/opt/driver", "/opt/driver")]


def test_the_library_in_use_is_the_file_that_is_mapped(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(
        "55d0-55d1 r--p 00000000 08:01 1    /usr/bin/python3.11\n"
        "7f00-7f01 rw-p 00000000 00:00 0 \n"
        "7f02-7f03 r-xp 00000000 08:01 9    /usr/lib/x86 64/libnvidia-ml.so.550.54.15\n"
    )
    assert loaded_library(maps) == "/usr/lib/x86 64/libnvidia-ml.so.550.54.15"
    assert loaded_library(tmp_path / "absent") == ""
    assert loaded_library() == ""
    assert hardware_for(resolve({"simulate": "t4-4", "state_dir": str(tmp_path)}, {})).library() == "simulated"
