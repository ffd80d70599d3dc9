"""A GPU is written one way, and may be named in each way that people know it by."""

import pytest

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices.gpu_names import called, named, short_bus_id
from gpu_plugin.devices.node import Gpu, MigDevice

GPUS = (
    Gpu("GPU-6f1c0000-0000-0000-0000-000000000000", 0, pci_bus_id="00000000:1B:00.0"),
    Gpu("GPU-6f2d0000-0000-0000-0000-000000000000", 1, pci_bus_id="00000001:1B:00.0"),
    Gpu("GPU-77aa0000-0000-0000-0000-000000000000", 2, pci_bus_id="00000000:3B:00.0"),
    Gpu("GPU-index-3", 3, unreadable="gone", mig_devices=(MigDevice("MIG-11", 0, 1, 0, "1g.10gb"),)),
)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        (0, 0),
        ("2", 2),
        (" 2 ", 2),
        (GPUS[1].uuid, 1),
        (GPUS[1].uuid.upper(), 1),
        ("GPU-77", 2),
        ("gpu-6F1", 0),
        ("77aa", 2),
        ("00000000:1B:00.0", 0),
        ("0000:1b:00.0", 0),
        ("0001:1b:00", 1),
        ("3b:00.0", 2),
        ("3b:00", 2),
        ("GPU-index-3", 3),
        ("9", None),
        ("GPU-88", None),
        ("GPU-", None),
        ("", None),
        ("00:00.0", None),
        ("NVIDIA H100", None),
    ],
)
def test_a_gpu_goes_by_its_index_its_uuid_and_its_bus_id(name, index):
    found = named(name, GPUS)
    assert (found.index if found else None) == index


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("GPU-6f", "it could be GPU 0 (0000:1b:00.0, GPU-6f1c"),
        ("1b:00.0", "and GPU 1 (0001:1b:00.0, GPU-6f2d0000-0000-0000-0000-000000000000): give its whole uuid"),
        ("MIG-11", "MIG-11 is a MIG device of GPU 3 (GPU-index-3): name the GPU"),
    ],
)
def test_a_name_of_several_or_of_a_part_is_refused(name, words):
    with pytest.raises(ConfigError) as refused:
        named(name, GPUS)
    assert words in str(refused.value)


def test_a_gpu_is_written_with_all_three():
    assert called(GPUS[1]) == "GPU 1 (0001:1b:00.0, GPU-6f2d0000-0000-0000-0000-000000000000)"
    assert called(GPUS[3]) == "GPU 3 (GPU-index-3)"


@pytest.mark.parametrize(
    ("given", "shown"),
    [("00000000:3B:00.0", "0000:3b:00.0"), ("00010000:3B:00.0", "10000:3b:00.0"), ("tegra", "tegra"), ("", "")],
)
def test_a_bus_id_is_shown_as_sysfs_spells_it(given, shown):
    assert short_bus_id(given) == shown
