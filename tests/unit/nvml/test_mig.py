import pytest
from msgspec.structs import replace

from gpu_plugin.devices.node import Engines, Gpu, MigDevice
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml import traits
from gpu_plugin.nvml.mig import Partition, profile_of, read_partition, with_caps, with_partition
from gpu_plugin.nvml.port import NVML_FUNCTIONS, MigAttributes, NvmlError
from gpu_plugin.simulation import profile
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost

GIB = 1 << 30


class Machine:
    """An A100 with these MIG profiles, and its open driver. `refuse` lets a call about one MIG index fail."""

    def __init__(self, *profiles, mode=True, **gpu):
        content = {"name": "NVIDIA A100-SXM4-40GB", "memory_bytes": 40 * GIB, "mig_profiles": "a100-40gb"}
        content |= {"mig": list(profiles)} if mode else {"mig_mode": [0, 0]}
        self.node = SimulatedNode(profile.parse({"count": 1, "gpu": content | gpu}))
        self.driver = SimulatedDriver(self.node)
        self.driver.open()
        self.handle = self.driver.handle_by_index(0)

    def refuse(self, monkeypatch, call, index, code):
        real, mine = getattr(self.driver, call), self.driver.mig_handle(self.handle, index)

        def some(handle, *rest):
            if (handle, *rest) == ((self.handle, index) if call == "mig_handle" else (mine,)):
                raise NvmlError(code, NVML_FUNCTIONS[call])
            return real(handle, *rest)

        monkeypatch.setattr(self.driver, call, some)

    def read(self, known=()):
        return read_partition(self.driver, self.handle, memory_bytes=40 * GIB, known=known)

    def probe(self):
        return traits.probe_gpu(self.driver, SimulatedHost(self.node), 0)[1]


# Reading


def test_every_device_is_described():
    machine = Machine("3g.20gb", "1c.3g.20gb", "2c.3g.20gb")
    uuids = [machine.driver.uuid(machine.driver.mig_handle(machine.handle, index)) for index in range(3)]
    assert machine.read() == Partition(
        True,
        (
            MigDevice(uuids[0], 0, 1, 0, "3g.20gb", True, 19968 << 20, None, None, 3, 3, Engines(42, 3, 2)),
            MigDevice(uuids[1], 1, 2, 0, "1c.3g.20gb", False, 19968 << 20, None, None, 3, 1, Engines(14, 3, 2)),
            MigDevice(uuids[2], 2, 2, 1, "2c.3g.20gb", False, 19968 << 20, None, None, 3, 2, Engines(28, 3, 2)),
        ),
    )


@pytest.mark.parametrize(("mode", "asked"), [(True, True), (False, False)])
def test_outside_mig_mode_only_the_mode_is_read(mode, asked):
    machine = Machine(mode=mode)
    assert machine.read() == Partition(mode)
    assert bool(machine.driver.calls["max_mig_devices"]) is bool(machine.driver.calls["mig_handle"]) is asked


@pytest.mark.parametrize(
    ("mode", "pending"), [([0, 0], None), ([1, 1], None), ([0, 1], True), ([1, 0], False), ([1, 7], None)]
)
def test_a_mode_that_waits_for_a_reset_is_read(monkeypatch, mode, pending):
    machine = Machine(mode=False, mig_mode=[mode[0], min(mode[1], 1)])
    monkeypatch.setattr(machine.driver, "mig_mode", lambda _: (mode[0], mode[1]))
    assert machine.read().pending is pending
    assert machine.probe().mig_pending is pending


@pytest.mark.parametrize(
    ("call", "code", "found"),
    [
        *[("mig_mode", code, None) for code in (Return.NOT_SUPPORTED, Return.FUNCTION_NOT_FOUND, Return.NO_PERMISSION)],
        *[
            (call, code, Partition(True))
            for call in ("max_mig_devices", "mig_handle")
            for code in (Return.NOT_SUPPORTED, Return.FUNCTION_NOT_FOUND)
        ],
    ],
)
def test_without_support_for_mig_a_gpu_has_no_devices(call, code, found):
    machine = Machine("3g.20gb")
    machine.node.refuse(call, code)
    assert machine.read() == found


@pytest.mark.parametrize("call", ["mig_mode", "max_mig_devices"])
@pytest.mark.parametrize("code", [Return.UNKNOWN, Return.GPU_IS_LOST])
def test_any_other_refusal_to_report_the_partition_is_raised(call, code):
    machine = Machine("3g.20gb")
    machine.node.refuse(call, code)
    with pytest.raises(NvmlError) as caught:
        machine.read()
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("calls", "code", "named"),
    [
        *[
            ([call], code, NVML_FUNCTIONS[call])
            for call in ("mig_handle", "uuid", "gpu_instance_id", "compute_instance_id")
            for code in (Return.UNKNOWN, Return.INVALID_ARGUMENT)
        ],
        (["mig_handle"], Return.NOT_FOUND, None),  # there is no device at this index
        (["mig_attributes", "name"], Return.UNKNOWN, "nvmlDeviceGetAttributes_v2"),
    ],
)
def test_an_unreadable_device_does_not_hide_the_others(monkeypatch, calls, code, named):
    machine = Machine("1g.5gb", "1g.5gb", "1g.5gb")
    for call in calls:
        machine.refuse(monkeypatch, call, 1, code)
    found = machine.read()
    assert [device.index for device in found.devices] == [0, 2]
    assert list(found.unreadable) == ([1] if named else [])
    assert not named or named in found.unreadable[1]


@pytest.mark.parametrize("call", ["mig_handle", "uuid", "gpu_instance_id", "name", "mig_attributes"])
@pytest.mark.parametrize("code", [Return.GPU_IS_LOST, Return.RESET_REQUIRED])
def test_a_gpu_lost_midway_is_no_matter_of_one_device(monkeypatch, call, code):
    machine = Machine("1g.5gb", "1g.5gb")
    machine.refuse(monkeypatch, call, 1, code)
    with pytest.raises(NvmlError) as caught:
        machine.read()
    assert caught.value.code == code


def test_two_devices_with_one_uuid_count_once(monkeypatch):
    machine = Machine("1g.5gb", "1g.5gb")
    first = machine.driver.uuid(machine.driver.mig_handle(machine.handle, 0))
    monkeypatch.setattr(machine.driver, "uuid", lambda handle: first)
    found = machine.read()
    assert [device.index for device in found.devices] == [0]
    assert found.unreadable == {1: f"it claims the uuid of MIG device 0, {first}"}


@pytest.mark.parametrize("code", [Return.NOT_SUPPORTED, Return.FUNCTION_NOT_FOUND, Return.UNKNOWN])
def test_without_a_name_the_profile_is_computed(monkeypatch, code):
    machine = Machine("1g.10gb", "3g.20gb", "1c.2g.10gb")
    whole = machine.read()
    for index in range(3):
        machine.refuse(monkeypatch, "name", index, code)
    assert machine.read() == whole


def test_without_attributes_the_profile_comes_from_the_name(monkeypatch):
    machine = Machine("3g.20gb", "1c.3g.20gb")
    known = machine.read().devices
    for index in range(2):
        machine.refuse(monkeypatch, "mig_attributes", index, Return.FUNCTION_NOT_FOUND)
    unknown = {"memory_bytes": None, "gpu_slices": None, "compute_slices": None, "engines": None}
    assert machine.read().devices == tuple(replace(device, **unknown) for device in known)


def test_a_known_device_costs_a_handle_and_a_uuid():
    machine = Machine("3g.20gb", "3g.20gb")
    known = tuple(replace(device, gpu_instance_cap=12) for device in machine.read().devices)
    machine.driver.calls.clear()
    assert machine.read(known).devices == known
    assert machine.driver.calls == {"mig_mode": 1, "max_mig_devices": 1, "mig_handle": 7, "uuid": 2}


def test_a_known_device_at_another_index_is_described_again():
    machine = Machine("3g.20gb", "3g.20gb")
    first, second = machine.read().devices
    assert machine.read((replace(first, index=1, gpu_instance=9), second)).devices == (first, second)


# Names


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "1g.5gb"),
        ("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", "1c.3g.20gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "1g.10gb+me"),
        ("NVIDIA H100 80GB HBM3 MIG 2c.4g.40gb+me", "2c.4g.40gb+me"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb+gfx", "1g.24gb+gfx"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb+me.all", "1g.24gb+me.all"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb-me", "1g.24gb-me"),
        ("NVIDIA H200 MIG 7g.141gb", "7g.141gb"),
        ("NVIDIA H200", ""),
        ("NVIDIA H200 MIG", ""),
        ("NVIDIA H200 MIG large", ""),
        ("NVIDIA H200 MIG 1g.18gb too", ""),
        ("NVIDIA H200 MIG 1g.18gb+", ""),
        ("", ""),
    ],
)
def test_the_profile_in_a_name(name, word):
    assert profile_of(name, None, None) == word


@pytest.mark.parametrize(
    ("slices", "compute", "mebibytes", "gpu", "word"),
    [
        (1, 1, 4864, 40 * GIB, "1g.5gb"),
        (1, 1, 9856, 40 * GIB, "1g.10gb"),
        (3, 1, 19968, 40 * GIB, "1c.3g.20gb"),
        (7, 7, 40192, 40 * GIB, "7g.40gb"),
        (1, 1, 9984, 85520809984, "1g.10gb"),
        (7, 7, 81152, 85520809984, "7g.80gb"),
        (1, 1, 16384, 150754820096, "1g.18gb"),
        (2, 2, 33280, 150754820096, "2g.35gb"),
        (3, 3, 67072, 150754820096, "3g.71gb"),  # half of 141 is 70.5, which is rounded up
        (7, 7, 143360, 150754820096, "7g.141gb"),
        (7, 2, 143360, 150754820096, "2c.7g.141gb"),
        (1, 1, 4864, None, "1g.5gb"),
        (3, 3, 19968, 0, "3g.20gb"),
    ],
)
def test_the_profile_by_nvidias_rule(slices, compute, mebibytes, gpu, word):
    assert profile_of("", MigAttributes(slices, compute, mebibytes), gpu) == word


@pytest.mark.parametrize("name", ["a100-mig-mixed", "h100-mig-single"])
def test_the_rule_gives_the_names_that_devices_have_but_for_their_engines(name):
    node = SimulatedNode(profile.load(name))
    for index, built in enumerate(node.profile.gpus):
        for slice_ in node.gpus[index].mig_devices or ():
            made = slice_.instance
            attributes = MigAttributes(made.gpu_instance_slices, made.compute_slices, made.memory_mb)
            assert profile_of("", attributes, built.memory_bytes) == made.profile.removesuffix("+me")


# The GPU after a reading

GPU = Gpu("GPU-a", 0, minor=2, mig_capable=True)
ONE, TWO, THREE = (MigDevice(f"MIG-{index}", index, 7 + index, 0, "1g.5gb") for index in range(3))


WHOLE = replace(GPU, mig_enabled=True, mig_devices=(ONE, TWO, THREE))
MOVED = replace(TWO, index=0)


@pytest.mark.parametrize(
    ("gpu", "read", "hold", "devices"),
    [
        (WHOLE, Partition(True, (ONE, TWO, THREE)), False, (ONE, TWO, THREE)),
        (GPU, Partition(False), False, None),
        (GPU, Partition(True, (ONE,)), False, (ONE,)),
        (GPU, Partition(True), False, ()),
        (WHOLE, Partition(False), False, None),
        (WHOLE, Partition(True, (ONE, THREE), {1: "why"}), True, (ONE, TWO, THREE)),
        (WHOLE, Partition(True, (ONE, THREE), {1: "why"}), False, (ONE, THREE)),
        (WHOLE, Partition(True, (ONE,)), True, (ONE,)),  # the others are gone
        (WHOLE, Partition(True, (MOVED,), {1: "why"}), True, (MOVED,)),
        (WHOLE, Partition(False), True, None),
    ],
)
def test_a_gpu_has_the_partition_that_was_read_and_holds_unreadable_devices(gpu, read, hold, devices):
    expected = GPU if devices is None else replace(GPU, mig_enabled=True, mig_devices=devices)
    found = with_partition(gpu, read, hold=hold)
    assert found == expected
    assert found is gpu or expected != gpu


def test_capability_minors_are_looked_up_by_the_gpus_minor_and_the_instances():
    gpu = replace(GPU, mig_enabled=True, mig_devices=(ONE, replace(TWO, compute_instance=3)))
    listed = {"gpu2/gi7/access": 336, "gpu2/gi7/ci0/access": 337, "gpu2/gi8/access": 345, "gpu2/gi8/ci3/access": 349}
    found = with_caps(gpu, listed | {"gpu0/gi7/access": 1, "gpu2/gi8/ci0/access": 2})
    assert [(d.gpu_instance_cap, d.compute_instance_cap) for d in found.mig_devices] == [(336, 337), (345, 349)]
    assert with_caps(found, listed) is found
    without = with_caps(found, {"gpu2/gi7/access": 336})
    assert [(d.gpu_instance_cap, d.compute_instance_cap) for d in without.mig_devices] == [(336, None), (None, None)]
    assert with_caps(GPU, listed) is GPU


def test_without_the_gpus_minor_nothing_is_known_of_capabilities():
    gpu = replace(GPU, minor=None, mig_enabled=True, mig_devices=(ONE,))
    assert with_caps(gpu, {"gpu0/gi7/access": 66}) is gpu


# The probe


def test_a_probe_describes_devices_with_their_capabilities():
    found = Machine("3g.20gb", "1g.5gb+me", minor=1, numa_node=1, pci_bus_id="00000000:07:00.0").probe()
    assert (found.mig_enabled, found.numa_node) == (True, 1)
    assert [(d.profile, d.gpu_instance_cap, d.compute_instance_cap) for d in found.mig_devices] == [
        ("3g.20gb", 147, 148),
        ("1g.5gb+me", 201, 202),
    ]


def test_one_unreadable_device_hides_neither_the_others_nor_the_gpu(monkeypatch, caplog):
    machine = Machine("1g.5gb", "1g.5gb", "1g.5gb")
    machine.refuse(monkeypatch, "gpu_instance_id", 1, Return.UNKNOWN)
    found = machine.probe()
    assert found.unreadable is None
    assert [device.index for device in found.mig_devices] == [0, 2]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "MIG device 1 cannot be read" in caplog.text


@pytest.mark.parametrize("call", ["mig_mode", "max_mig_devices"])
def test_a_gpu_that_does_not_report_its_partition_is_still_a_gpu(call, caplog):
    machine = Machine("3g.20gb")
    machine.node.refuse(call, Return.UNKNOWN)
    found = machine.probe()
    assert (found.unreadable, found.mig_enabled, found.mig_devices) == (None, False, ())
    assert "its MIG devices cannot be read now" in caplog.text


@pytest.mark.parametrize("call", ["max_mig_devices", "mig_handle", "compute_instance_id"])
def test_a_gpu_lost_while_its_devices_are_read_is_unreadable(call):
    machine = Machine("3g.20gb")
    machine.node.refuse(call, Return.GPU_IS_LOST)
    found = machine.probe()
    assert found.unreadable is not None
    assert NVML_FUNCTIONS[call] in found.unreadable


def test_outside_mig_mode_the_host_is_not_asked_for_capabilities(monkeypatch):
    machine = Machine(mode=False)
    monkeypatch.setattr(SimulatedHost, "mig_minors", lambda self: pytest.fail("asked"))
    assert machine.probe().mig_devices == ()
