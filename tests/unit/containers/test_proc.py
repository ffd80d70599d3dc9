import os

import pytest

from gpu_plugin.containers import host_view
from tests.unit.containers.driver_root.installed import Root

INFORMATION = """\
Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 18
GPU UUID: \t {uuid}
Bus Location: \t {bus}
Device Minor: \t {minor}
GPU Excluded:\t No
"""


def add(root: Root, directory: str, uuid: str = "GPU-1", bus: str = "0000:1b:00.0", minor: str = "0") -> None:
    text = INFORMATION.format(uuid=uuid, bus=bus, minor=minor)
    root.write(f"driver/nvidia/gpus/{directory}/information", text.encode())


@pytest.fixture
def root(tmp_path):
    return Root(tmp_path / "proc")


def test_gpus_in_the_order_of_their_bus_ids(root):
    add(root, "10000:01:00.0", "GPU-c", "10000:01:00.0", "0")
    add(root, "0000:af:00.0", "GPU-b", "0000:af:00.0", "7")
    add(root, "0000:1b:00.0", "GPU-a")
    found = host_view.listed_gpus(root.path)
    assert [(each.uuid, each.index, each.minor, each.pci_bus_id) for each in found] == [
        ("GPU-a", 0, 0, "00000000:1B:00.0"),
        ("GPU-b", 1, 7, "00000000:AF:00.0"),
        ("GPU-c", 2, 0, "00010000:01:00.0"),
    ]
    assert found[0].model == "NVIDIA H100 80GB HBM3"


def test_a_directory_that_says_nothing_of_use_takes_no_other_with_it(root):
    add(root, "0000:1b:00.0")
    add(root, "0000:1c:00.0", "????????")  # as the driver has it of a GPU that fell off the bus
    add(root, "0000:1d:00.0", minor="none")
    add(root, "0000:1f:00.0", minor="²")
    add(root, "0000:1e:00.0", "GPU-2", "xyz:00:00.0")
    root.write("driver/nvidia/gpus/0000:20:00.0/information", b"\xff\xfe")
    (root.path / "driver/nvidia/gpus/0000:21:00.0").mkdir()
    root.write("driver/nvidia/gpus/file")
    assert [(each.uuid, each.pci_bus_id) for each in host_view.listed_gpus(root.path)] == [
        ("GPU-1", "00000000:1B:00.0"),
        ("GPU-2", ""),
    ]


STRANGE = [
    b"",
    b"GPU UUID: GPU-2",
    b"GPU UUID:\nDevice Minor: 1\n",
    b"GPU UUID: GPU-2 x\nDevice Minor: 1\n",
    b"GPU UUID: GPU-\x1b[31m\nDevice Minor: 1\n",
    b"GPU UUID: GPU-2\nDevice Minor: -1\n",
    b"GPU UUID: GPU-2\nDevice Minor: " + b"9" * 3000,
    b"GPU UUID: GPU-2\nDevice Minor: " + b" " * 60_000 + b"1",
    b"GPU UUID: GPU-2" + b" " * 60_000 + b"x\nDevice Minor: 1\n",
    b":" * 60_000,
    b"\n" * 60_000,
    bytes(range(256)),
]


@pytest.mark.parametrize("content", STRANGE, ids=range(len(STRANGE)))
@pytest.mark.timeout(5)
def test_a_strange_file_is_no_gpu_and_no_error(root, content):
    add(root, "0000:1b:00.0")
    root.write("driver/nvidia/gpus/0000:1c:00.0/information", content)
    assert [each.uuid for each in host_view.listed_gpus(root.path)] == ["GPU-1"]


@pytest.mark.parametrize(
    "bus", ["", "xyz", "0000:1g:00.0", "0000:1b:00.8", "0000:1b:00", "000000000:1b:00.0", "\N{ARABIC-INDIC DIGIT ONE}"]
)
def test_a_bus_location_that_is_none_is_left_out(root, bus):
    add(root, "0000:1b:00.0", bus=bus)
    assert [each.pci_bus_id for each in host_view.listed_gpus(root.path)] == [""]


@pytest.mark.timeout(5)
def test_nothing_is_waited_for(root):
    (root.path / "driver/nvidia/gpus/0000:1c:00.0").mkdir(parents=True)
    os.mkfifo(root.path / "driver/nvidia/gpus/0000:1c:00.0/information")
    os.mkfifo(root.path / "driver/nvidia/version")
    assert host_view.listed_gpus(root.path) == []
    assert host_view.kernel_driver_version(root.path) == ""


def test_gpus_are_partitioned_where_instances_exist_not_where_they_could(root):
    assert not host_view.any_partitioned(root.path)
    root.write("driver/nvidia-caps/mig-minors", b"config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\n")
    for name in ("mig/config", "mig/monitor", "gpu0/mig/config", "gpu0/fabric-mgmt"):
        root.write(f"driver/nvidia/capabilities/{name}")
    assert not host_view.any_partitioned(root.path)
    root.write("driver/nvidia/capabilities/gpu3/mig/gi1/access")
    assert host_view.any_partitioned(root.path)


def test_without_the_directory_there_is_an_error(root):
    with pytest.raises(FileNotFoundError):
        host_view.listed_gpus(root.path)


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@host)\n",
            "580.65.06",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.133  Release Build\nGCC version:  gcc 12.2.0\n",
            "570.133",
        ),
        ("GCC version:  gcc version 12.2.0 (Debian)\n", ""),
        ("", ""),
    ],
)
def test_the_version_of_the_kernels_half(root, said, version):
    assert host_view.kernel_driver_version(root.path) == ""
    root.write("driver/nvidia/version", said.encode())
    assert host_view.kernel_driver_version(root.path) == version
