import json
from itertools import combinations_with_replacement
from uuid import UUID

import pytest

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices.node import Engines
from gpu_plugin.devices.nvml_h import ALL_INSTANCES, EventType, Return
from gpu_plugin.nvml.port import Field, Handle, MigAttributes, NvmlError
from gpu_plugin.simulation import mig, profile
from gpu_plugin.simulation.hardware import STATE_FILE, SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost

from .opened import code, described, make_node, opened

A100 = "a100-40gb"


def laid_out(*profiles, model=A100):
    return [(i.profile, i.gpu_instance, i.compute_instance) for i in mig.lay_out(model, profiles)]


def refused(*profiles, model=A100):
    with pytest.raises(ConfigError) as caught:
        mig.lay_out(model, profiles)
    return str(caught.value)


def slices(driver, gpu):
    return [handle for index in range(7) if (handle := at(driver, gpu, index)) is not None]


def at(driver, gpu, index):
    try:
        return driver.mig_handle(gpu, index)
    except NvmlError as error:
        return None if error.code == Return.NOT_FOUND else pytest.fail(str(error))


# What there is


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("a100-40gb", "1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb"),
        ("a100-80gb", "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
        ("h100-80gb", "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
        ("h200-141gb", "1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb"),
        ("b200-180gb", "1g.23gb 1g.23gb+me 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb"),
    ],
)
def test_the_profiles_of_the_user_guide(model, names):
    known = mig.gpu_instance_profiles(model)
    assert list(known) == names.split()
    assert [found.most for found in known.values()] == [7, 1, 4, 3, 2, 1, 1]
    for found in known.values():
        assert len(mig.lay_out(model, [found.name] * found.most)) == found.most


@pytest.mark.parametrize(
    ("profiles", "found"),
    [
        ((), []),
        (("7g.40gb",), [("7g.40gb", 0, 0)]),
        (("3g.20gb", "3g.20gb"), [("3g.20gb", 1, 0), ("3g.20gb", 2, 0)]),
        (("1g.5gb", "2g.10gb", "4g.20gb"), [("4g.20gb", 1, 0), ("2g.10gb", 3, 0), ("1g.5gb", 7, 0)]),
        (("1g.5gb",) * 7, [("1g.5gb", number, 0) for number in range(7, 14)]),
        (("1g.10gb",) * 4, [("1g.10gb", number, 0) for number in range(3, 7)]),
        (("1g.5gb+me", "1g.5gb"), [("1g.5gb+me", 7, 0), ("1g.5gb", 8, 0)]),
        (("1c.3g.20gb",), [("1c.3g.20gb", 1, 0)]),
        (("1c.3g.20gb",) * 3, [("1c.3g.20gb", 1, part) for part in range(3)]),
        (("1c.3g.20gb", "3g.20gb", "2c.3g.20gb"), [("1c.3g.20gb", 1, 0), ("2c.3g.20gb", 1, 1), ("3g.20gb", 2, 0)]),
        (
            ("2c.3g.20gb", "2c.3g.20gb", "1c.3g.20gb", "1c.3g.20gb"),
            [("2c.3g.20gb", 1, 0), ("1c.3g.20gb", 1, 1), ("2c.3g.20gb", 2, 0), ("1c.3g.20gb", 2, 1)],
        ),
        (("4c.7g.40gb", "3c.7g.40gb"), [("4c.7g.40gb", 0, 0), ("3c.7g.40gb", 0, 1)]),
        (("3g.20gb", "4g.20gb"), [("3g.20gb", 1, 0), ("4g.20gb", 2, 0)]),
        (
            ("2g.10gb", "2g.10gb", "2g.10gb", "1g.10gb"),
            [("2g.10gb", 3, 0), ("2g.10gb", 4, 0), ("2g.10gb", 5, 0), ("1g.10gb", 6, 0)],
        ),
    ],
)
def test_devices_are_numbered_as_drivers_do(profiles, found):
    assert laid_out(*profiles) == found


@pytest.mark.parametrize(
    ("profiles", "sentence"),
    [
        (("3g.40gb",), "3g.40gb: no such MIG profile; there are 1g.5gb, 1g.5gb+me, 1g.10gb, 2g.10gb, 3g.20gb, 4g."),
        *(((name,), f"{name}: no such MIG profile") for name in ("", "1g.5gb+gfx", "1c.1c.3g.20gb", "all")),
        (("3c.3g.20gb",), "3c.3g.20gb: 3g.20gb has parts of 1c, 2c"),
        (("3c.4g.20gb",), "3c.4g.20gb: 4g.20gb has parts of 1c, 2c"),
        (("0c.7g.40gb",), "0c.7g.40gb: 7g.40gb has parts of 1c, 2c, 3c, 4c"),
        (("1c.1g.5gb",), "1c.1g.5gb: 1g.5gb has no parts"),
        (("1g.5gb",) * 8, "1g.5gb: 8 of them: a GPU has room for 7"),
        (("7g.40gb", "1g.5gb"), "7g.40gb, 1g.5gb: 8 compute slices and 9 memory slices: a GPU has 7 and 8"),
        (("1c.3g.20gb",) * 3 + ("3g.20gb",) * 2, "3g.20gb: 3 of them: a GPU has room for 2"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(profiles, sentence):
    assert sentence in refused(*profiles)


# Memory slices at which the user guide lets an instance begin, by its compute and memory slices.
STARTS = {(1, 1): range(7), (1, 2): (0, 2, 4, 6), (2, 2): (0, 2, 4), (3, 4): (0, 4), (4, 4): (0,), (7, 8): (0,)}


def placed(profiles, taken=frozenset()):
    """Whether there is a place for each instance in the free memory slices."""
    if not profiles:
        return True
    first, rest = profiles[0], profiles[1:]
    places = (frozenset(range(start, start + first.memory)) for start in STARTS[first.compute, first.memory])
    return any(not place & taken and placed(rest, taken | place) for place in places)


def lays_out(names):
    try:
        mig.lay_out(A100, names)
    except ConfigError:
        return False
    return True


def test_whatever_is_accepted_has_a_place_on_the_hardware_and_only_that():
    known = mig.gpu_instance_profiles(A100)
    accepted = 0
    for count in range(9):
        for names in combinations_with_replacement(known, count):
            fits = placed(sorted((known[name] for name in names), key=lambda found: -found.memory))
            one_set_of_engines = names.count("1g.5gb+me") <= 1
            assert lays_out(names) == (fits and one_set_of_engines), names
            accepted += fits and one_set_of_engines
    assert accepted > 100


# The numbers of capabilities


def test_minors_are_those_of_the_recorded_host():
    first = mig.minors(0)
    assert len(first) == 15 * 9
    assert [first[name] for name in ("gpu0/gi0/access", "gpu0/gi0/ci0/access", "gpu0/gi0/ci7/access")] == [3, 4, 11]
    assert [first[name] for name in ("gpu0/gi1/access", "gpu0/gi1/ci0/access", "gpu0/gi2/ci6/access")] == [12, 13, 28]
    assert mig.minors(31)["gpu31/gi14/ci7/access"] == 4322  # the last one, as the user guide shows it
    assert sorted(minor for gpu in range(32) for minor in mig.minors(gpu).values()) == list(range(3, 4323))


def test_capability_nodes_are_those_of_the_instances():
    listed = mig.minors(3)
    wanted = ("gi1/access", "gi1/ci0/access", "gi1/ci1/access", "gi2/access", "gi2/ci0/access")
    found = mig.capability_nodes(3, mig.lay_out(A100, ["1c.3g.20gb", "1c.3g.20gb", "3g.20gb"]))
    assert found == {f"/dev/nvidia-caps/nvidia-cap{listed[f'gpu3/{name}']}" for name in wanted}
    assert mig.capability_nodes(3, ()) == frozenset()


def test_a_host_lists_every_instance_that_there_could_be():
    node = make_node("a100-mig-mixed")
    host = SimulatedHost(node)
    assert len(host.mig_minors()) == 8 * 135
    assert host.mig_minors() is host.mig_minors()
    assert SimulatedHost(make_node("t4-4")).mig_minors() == {}


def test_device_nodes_come_and_go_with_the_instances():
    node = make_node("h200")
    whole = node.device_nodes()
    assert whole == node.profile.device_nodes == SimulatedHost(node).device_roots().keys()
    node.partition(0, ["7g.141gb"])
    assert SimulatedHost(node).device_roots().keys() - whole == {
        "/dev/nvidia-caps/nvidia-cap3",
        "/dev/nvidia-caps/nvidia-cap4",
    }
    node.partition(0, None)
    assert node.device_nodes() == whole


# What the driver says


def test_mig_devices_answer_as_nvmls():
    node = make_node("a100-mig-mixed")
    driver = opened(node)
    gpu = driver.handle_by_index(7)
    assert (driver.mig_mode(gpu), driver.max_mig_devices(gpu)) == ((1, 1), 7)
    one, two, three = slices(driver, gpu)
    assert [driver.name(each) for each in (one, three)] == [
        "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    ]
    assert [(driver.gpu_instance_id(each), driver.compute_instance_id(each)) for each in (one, two, three)] == [
        (1, 0),
        (1, 1),
        (2, 0),
    ]
    assert driver.mig_attributes(two) == MigAttributes(3, 2, 19968, Engines(28, 3, 2))
    uuids = {driver.uuid(each) for each in (one, two, three)}
    assert len(uuids) == 3
    assert all(uuid.startswith("MIG-") and UUID(uuid[4:]).version == 5 for uuid in uuids)
    assert code(driver.mig_handle, gpu, 3) == code(driver.mig_handle, gpu, 6) == Return.NOT_FOUND
    assert code(driver.mig_handle, gpu, 7) == code(driver.mig_handle, gpu, -1) == Return.INVALID_ARGUMENT


def test_no_two_mig_devices_of_a_node_share_a_handle_or_a_uuid():
    node = make_node("h100-mig-single")
    driver = opened(node)
    gpus = [driver.handle_by_index(index) for index in range(8)]
    found = [each for gpu in gpus for each in slices(driver, gpu)]
    assert len({*found, *gpus}) == 56 + 8
    assert len({driver.uuid(each) for each in found}) == 56


def test_the_same_instance_made_again_has_its_uuid_and_a_new_handle():
    node = make_node("h200")
    driver = opened(node)
    gpu = driver.handle_by_index(0)
    node.partition(0, ["3g.71gb", "3g.71gb"])
    before = slices(driver, gpu)
    uuids = [driver.uuid(each) for each in before]
    node.partition(0, ["3g.71gb", "1g.18gb"])
    after = slices(driver, gpu)
    assert driver.uuid(after[0]) == uuids[0]
    assert driver.uuid(after[1]) not in uuids
    assert not {*before} & {*after}
    for call in (driver.uuid, driver.name, driver.gpu_instance_id, driver.compute_instance_id, driver.mig_attributes):
        assert code(call, before[0]) == Return.INVALID_ARGUMENT


@pytest.mark.parametrize("name", ["h200", "l40s-pcie-8"])
def test_outside_mig_mode_there_are_no_mig_devices(name):
    driver = opened(make_node(name))
    gpu = driver.handle_by_index(0)
    assert driver.max_mig_devices(gpu) == 0
    assert code(driver.mig_handle, gpu, 0) == Return.NOT_SUPPORTED


def test_a_whole_gpu_is_no_mig_device_and_a_mig_device_no_whole_gpu():
    driver = opened(make_node("h100-mig-single"))
    gpu = driver.handle_by_index(0)
    assert code(driver.remapped_rows, gpu) == Return.NOT_SUPPORTED  # NVML's word for a GPU with instances
    assert [each.code for each in driver.field_values(gpu, (Field(143), Field(144)))] == [Return.NOT_SUPPORTED] * 2
    for call in (driver.gpu_instance_id, driver.compute_instance_id, driver.mig_attributes):
        assert code(call, gpu) == Return.NOT_SUPPORTED
        assert code(call, Handle(1)) == Return.INVALID_ARGUMENT
        assert code(call, Handle(1 << 50)) == Return.INVALID_ARGUMENT
    for call in (driver.minor_number, driver.mig_mode, driver.max_mig_devices, driver.temperature):
        assert code(call, driver.mig_handle(gpu, 0)) == Return.INVALID_ARGUMENT


def test_slices_share_their_gpus_fate():
    node = make_node("h100-mig-single")
    driver = opened(node)
    first, other = (driver.mig_handle(driver.handle_by_index(gpu), 0) for gpu in (3, 4))
    node.lose(3)
    for call in (driver.uuid, driver.name, driver.gpu_instance_id, driver.mig_attributes):
        assert code(call, first) == Return.GPU_IS_LOST
        assert call(other) is not None
    node.heal(3)
    node.refuse("name", Return.UNKNOWN, gpu=3)
    assert code(driver.name, first) == Return.UNKNOWN
    assert driver.name(other)
    node.vanish(4)
    assert code(driver.uuid, other) == code(opened(node).uuid, other) == Return.GPU_IS_LOST


@pytest.mark.parametrize("mode", [(0, 0), (1, 1), (0, 1), (1, 0)])
def test_the_mode_is_the_profiles_until_the_gpu_is_cut_anew(mode):
    node = described(gpu={"name": "x", "mig_mode": list(mode), "mig_profiles": A100})
    driver = opened(node)
    handle = driver.handle_by_index(0)
    assert driver.mig_mode(handle) == mode
    node.partition(0, None if mode[0] else [])
    assert driver.mig_mode(handle) == (1 - mode[0], 1 - mode[0])
    node.partition(0, [] if mode[0] else None)
    assert driver.mig_mode(handle) == mode


def test_an_event_of_it_is_the_whole_gpus():
    node = make_node("h100-mig-single")
    driver = opened(node)
    gpu, events = driver.handle_by_index(2), driver.event_set()
    driver.register_events(gpu, EventType.MIG_CONFIG_CHANGE, events)
    assert node.post(2, EventType.MIG_CONFIG_CHANGE, 0) == 1
    event = driver.wait(events, 0)
    assert (event.handle, event.gpu_instance, event.compute_instance) == (gpu, ALL_INSTANCES, ALL_INSTANCES)


# What outlives the daemon


def test_a_partition_outlives_the_daemon_and_a_repair(tmp_path):
    built = profile.load("a100-mig-mixed")
    node = SimulatedNode(built, tmp_path)
    node.partition(0, ["4g.20gb"])
    node.partition(4, [])
    node.partition(5, None)
    node.heal(0)
    again = SimulatedNode(built, tmp_path)
    assert [again.condition(gpu).mig for gpu in range(8)] == [
        ("4g.20gb",),
        None,
        None,
        None,
        (),
        None,
        built.gpus[6].mig,
        built.gpus[7].mig,
    ]
    now, before = again.gpus[0].mig_devices, node.gpus[0].mig_devices
    assert now
    assert before
    assert now[0].uuid == before[0].uuid


def test_a_partition_that_is_refused_changes_nothing(tmp_path):
    node = make_node("a100-mig-mixed", tmp_path)
    content = (tmp_path / STATE_FILE).read_bytes()
    before = node.gpus[5].mig_devices
    with pytest.raises(ConfigError):
        node.partition(5, ["7g.40gb", "1g.5gb"])
    assert node.gpus[5].mig_devices is before
    assert (tmp_path / STATE_FILE).read_bytes() == content


def test_a_remembered_partition_that_cannot_be_starts_fresh_with_a_warning(tmp_path, caplog):
    built = profile.load("a100-mig-mixed")
    node = SimulatedNode(built, tmp_path)
    file = tmp_path / STATE_FILE
    saved = json.loads(file.read_bytes())
    saved["gpus"][0]["mig"] = ["9g.90gb"]
    file.write_text(json.dumps(saved))
    again = SimulatedNode(built, tmp_path)
    assert again.boot_id != node.boot_id
    assert again.gpus[0].mig_devices is None
    assert "9g.90gb: no such MIG profile" in caplog.text
    assert "starts fresh" in caplog.text
