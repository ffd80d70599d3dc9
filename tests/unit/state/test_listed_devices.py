"""Damaged entries in the memory of listed devices: each costs itself alone, is said, and its hardware stays withheld."""

import pytest

from gpu_plugin.devices.device import Device, Resource
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.health.latch import Health
from gpu_plugin.kubelet.inventory import Inventory
from gpu_plugin.kubelet.snapshot import SnapshotStore
from gpu_plugin.state.directory import StateDirectory
from gpu_plugin.state.log import DEVICES, GPUS, HEALTH
from gpu_plugin.state.memory import Memory

GPU = "nvidia.com/gpu"
A, B = (f"GPU-{number:08}-0000-0000-0000-000000000000" for number in (1, 2))
SLICE = "MIG-00000003-0000-0000-0000-000000000000"
GOOD = {"id": A, "gpu": A, "visible_id": A, "index": "0", "kind": "gpu", "numa": [0]}
OTHER = GOOD | {"id": B, "gpu": B, "visible_id": B}
PART = {"id": SLICE, "gpu": B, "visible_id": SLICE, "index": "1:0", "kind": "mig"}


@pytest.fixture
def memory(tmp_path):
    return Memory(StateDirectory(tmp_path), "one")


@pytest.fixture
def remembered(memory):
    def read(resources, foreign=None):
        written = {"boot_id": "one", "resources": resources, "foreign": foreign or {}}
        memory.log.write(DEVICES, written)
        return memory.devices()

    return read


def ids(resources):
    return {resource.name: [device.id for device in resource.devices] for resource in resources}


@pytest.mark.parametrize(
    ("damaged", "foreign"),
    [
        pytest.param({"id": ""}, B, id="empty id"),
        pytest.param({"id": f"{B}::{'0' * 300}"}, f"{B}::{'0' * 300}", id="300 characters"),
        pytest.param({"id": f"{B}::{'0' * 22}"}, f"{B}::{'0' * 22}", id="64 characters"),
        pytest.param({"id": f"{B}::\n"}, f"{B}::\n", id="not printable"),
        pytest.param({"id": "other"}, B, id="another id than its hardware's"),
        pytest.param({"id": 5}, B, id="a number for an id"),
        pytest.param({"visible_id": None}, B, id="null for what containers see"),
        pytest.param({"kind": "cpu"}, B, id="unknown kind"),
        pytest.param({"gpu": ""}, B, id="no GPU"),
        pytest.param({"numa": ["0"]}, B, id="text for a NUMA node"),
        pytest.param({"shared": {}}, B, id="sharing of a wrong type"),
    ],
)
def test_a_damaged_entry_is_left_out_and_said_and_its_hardware_counts_as_held(remembered, caplog, damaged, foreign):
    found = remembered({GPU: [GOOD, OTHER | damaged]})
    assert ids(found.listed) == {GPU: [A]}
    assert ids(found.foreign) == {GPU: [foreign]}
    assert found.foreign[0].devices[0].gpu == B
    [record] = caplog.records
    assert f"entry 1 of '{GPU}'" in record.getMessage()
    assert len(record.getMessage()) < 600
    assert record.getMessage().isprintable()


@pytest.mark.parametrize("entry", [5, None, [], "x", {}, {"id": 5, "gpu": [], "visible_id": {}}])
def test_an_entry_that_names_nothing_is_left_out(remembered, caplog, entry):
    found = remembered({GPU: [entry, GOOD]})
    assert (ids(found.listed), found.foreign) == ({GPU: [A]}, ())
    assert len(caplog.records) == 1


@pytest.mark.parametrize("devices", [None, 5, {}, "x", {"id": 5}])
def test_devices_that_are_no_list_cost_no_other_resource(remembered, caplog, devices):
    found = remembered({"nvidia.com/x": devices, GPU: [GOOD]}, {"example.com/x": devices, "example.com/gpu": [OTHER]})
    assert ids(found.listed) == {GPU: [A]}
    assert ids(found.foreign) == {"example.com/gpu": [B]}
    assert "and 1 more fault" in caplog.text


@pytest.mark.parametrize("name", ["gpu", "", "kubernetes.io/gpu", "nvidia.com/" + "x" * 300, "nvidia.com/\n"])
def test_a_resource_name_that_no_kubelet_takes_is_left_out(remembered, caplog, name):
    found = remembered({name: [GOOD], GPU: [OTHER]}, {name: [GOOD]})
    assert (ids(found.listed), found.foreign) == ({GPU: [B]}, ())
    [record] = caplog.records
    assert len(record.getMessage()) < 600
    assert record.getMessage().isprintable()


@pytest.mark.parametrize("node", [-1, 2**31, 2**63, 2**200])
def test_a_numa_node_that_cannot_be_costs_nothing_but_the_numa_node(remembered, caplog, node):
    found = remembered({GPU: [GOOD | {"numa": [node]}]})
    assert found.listed[0].devices[0].numa == ()
    assert len(caplog.records) == 1


def test_the_same_entry_twice_is_one_device(remembered, caplog):
    found = remembered({GPU: [GOOD, OTHER, GOOD]})
    assert ids(found.listed) == {GPU: [A, B]}
    assert found.listed[0].devices[0].numa == (0,)
    assert "its id occurs twice" in caplog.text


@pytest.mark.parametrize(
    ("first", "second", "parent"),
    [(PART, PART | {"gpu": A}, SLICE), (GOOD | {"shared": "time-slicing"}, GOOD, A), (GOOD, GOOD | {"gpu": B}, A)],
    ids=["two parents", "shared and not", "another GPU"],
)
def test_of_two_different_entries_with_one_id_only_the_name_is_taken_for_true(remembered, first, second, parent):
    [resource] = remembered({GPU: [first, second]}).listed
    [device] = resource.devices
    assert (device.id, device.gpu, device.shared) == (first["id"], parent, "")


def test_an_undamaged_file_is_read_without_a_word(remembered, caplog):
    found = remembered({GPU: [GOOD, OTHER], "nvidia.com/mig": [PART]}, {GPU: [GOOD | {"id": f"{A}::{'0' * 300}"}]})
    assert ids(found.listed) == {GPU: [A, B], "nvidia.com/mig": [SLICE]}
    assert ids(found.foreign) == {GPU: [f"{A}::{'0' * 300}"]}
    assert not caplog.records


def test_what_cannot_be_listed_is_written_down_and_read_again(memory, tmp_path):
    inventory = Inventory(SnapshotStore(), lambda _gpu, _visible: Health())
    odd = Resource(GPU, (Device(f"{A}::{'0' * 300}", A, A, "0"),))
    inventory.remember((), (odd,))
    assert memory.write_hardware(Node((Gpu(A, 0),)), inventory.listed, inventory.foreign)
    again = Memory(StateDirectory(tmp_path), "one")
    again.log.load()
    assert ids(again.devices().foreign) == ids((odd,))


@pytest.mark.parametrize(
    "entry",
    [
        *(5, None, [], {}, {"uuid": 5, "index": 0}, {"uuid": A, "index": "x"}, {"uuid": A}),
        *({"uuid": uuid, "index": 0} for uuid in ("", "\n\0", A + "x" * 300)),
        *({"uuid": A, "index": index} for index in (-1, 1.5)),
        {"uuid": A, "index": 0, "mig_devices": [{}]},
    ],
)
def test_a_damaged_gpu_costs_no_other(memory, caplog, entry):
    memory.log.write(GPUS, {"boot_id": "one", "gpus": [entry, {"uuid": B, "index": 1}]})
    assert [gpu.uuid for gpu in memory.gpus()] == [B]
    assert "entry 0 of 'gpus'" in caplog.text


@pytest.mark.parametrize("boot_id", ["one", "zero"])
def test_a_damaged_gpu_costs_no_other_that_the_node_had_before(memory, caplog, boot_id):
    written = {"boot_id": boot_id, "absent": [{"uuid": A}, {"uuid": B, "index": 1}]}
    memory.log.write(GPUS, written)
    assert [gpu.uuid for gpu in memory.before()] == [B]
    assert "entry 0 of 'absent'" in caplog.text


def test_of_two_gpus_with_one_uuid_the_first_counts(memory, caplog):
    written = [{"uuid": A, "index": 0}, {"uuid": B, "index": 1}, {"uuid": A, "index": 2}]
    memory.log.write(GPUS, {"boot_id": "one", "gpus": written})
    assert [(gpu.uuid, gpu.index) for gpu in memory.gpus()] == [(A, 0), (B, 1)]
    assert "entry 2 of 'gpus'" in caplog.text


@pytest.mark.parametrize("name", ["evidence", "gpus"])
def test_a_thousand_damaged_entries_are_one_line(memory, caplog, name):
    memory.log.write({"evidence": HEALTH, "gpus": GPUS}[name], {"boot_id": "one", name: [{"uuid": ""}] * 1000})
    assert memory.evidence() == memory.gpus() == ()
    [record] = caplog.records
    assert "999 more" in record.getMessage()
