"""The GPUs that an annotation names, with valid and invalid values."""

import pytest

from gpu_plugin.cluster.cordon_annotation import MAX_NAMES, cordoned
from gpu_plugin.devices.node import Gpu

GPUS = (Gpu("GPU-aaaa-1", 0, pci_bus_id="00000000:1B:00.0"), Gpu("GPU-aabb-2", 1, pci_bus_id="00000000:1C:00.0"))
FIRST, SECOND = (gpu.uuid for gpu in GPUS)


@pytest.mark.parametrize(("value", "uuids", "complains"), [
    (None, set(), ()),
    ("", set(), ()),
    (" , ,", set(), ()),
    ("1", {SECOND}, ()),
    ("0,gpu-aabb, 1c:00.0 ,0000:1B:00.0", {FIRST, SECOND}, ()),
    ("7,0", {FIRST}, ("7 is not a GPU of this node",)),
    ("GPU-aa", set(), ("it could be GPU 0",)),
    ("no such\x1b[2J", set(), (r"no such\x1b[2J is not a GPU",)),
    ("x" * 100_000, set(), ("more characters) is not a GPU",)),
])  # fmt: skip
def test_names_are_those_that_people_use(value, uuids, complains):
    found = cordoned(value, GPUS)
    assert found.uuids == uuids
    assert len(found.complaints) == len(complains)
    for words, complaint in zip(complains, found.complaints, strict=True):
        assert words in complaint
        assert len(complaint) < 400


def test_a_flood_of_names_is_bounded():
    found = cordoned(",".join(["0", *(f"name-{number}" for number in range(2 * MAX_NAMES))]), GPUS)
    assert found.uuids == {FIRST}
    assert len(found.complaints) == 8
