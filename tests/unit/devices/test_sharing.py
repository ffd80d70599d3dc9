import time

import pytest

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.sharing import MPS, TIME_SLICING, DeviceChoice, SharedResource
from gpu_plugin.devices.device import MIG, Device
from gpu_plugin.devices.sharing import Named, share

GPU = "nvidia.com/gpu"
SHARED = "nvidia.com/gpu.shared"


def gpus(count):
    return [Named(GPU, Device(f"GPU-{n}", f"GPU-{n}", f"GPU-{n}", str(n)), (str(n), f"GPU-{n}")) for n in range(count)]


def entry(replicas=2, *listed, count=0, offered_as=GPU, name=GPU, strategy=TIME_SLICING):
    return SharedResource(name, offered_as, replicas, strategy, DeviceChoice(count, tuple(listed)))


def ids(offered):
    return {name: [device.id for device in devices] for name, devices in offered.items()}


def test_nothing_shared_is_everything_once():
    offered, warnings = share({GPU: gpus(2)}, ())
    assert ids(offered) == {GPU: ["GPU-0", "GPU-1"]}
    assert warnings == []
    assert all(device.sharing is None and device.shared == "" and device.replicas == 1 for device in offered[GPU])


def test_replicas_are_numbered_and_see_the_same_hardware():
    asked = entry(3)
    offered, _ = share({GPU: gpus(2)}, (asked,))
    assert ids(offered) == {GPU: [f"GPU-{n}::{r}" for n in range(2) for r in range(3)]}
    assert {(d.gpu, d.visible_id, d.index) for d in offered[GPU][:3]} == {("GPU-0", "GPU-0", "0")}
    assert {d.sharing for d in offered[GPU]} == {asked}
    assert (offered[GPU][0].shared, offered[GPU][0].replicas) == (TIME_SLICING, 3)


def test_shared_and_exclusive_gpus_side_by_side():
    offered, _ = share({GPU: gpus(4)}, (entry(2, "0", "GPU-2", offered_as=SHARED),))
    assert ids(offered) == {SHARED: ["GPU-0::0", "GPU-0::1", "GPU-2::0", "GPU-2::1"], GPU: ["GPU-1", "GPU-3"]}


def test_an_entry_of_one_replica_keeps_its_devices_whole_and_from_the_others():
    offered, warnings = share({GPU: gpus(3)}, (entry(1, "0"), entry(1, "1", offered_as="nvidia.com/one"), entry(2)))
    assert ids(offered) == {GPU: ["GPU-0", "GPU-2::0", "GPU-2::1"], "nvidia.com/one": ["GPU-1"]}
    assert offered[GPU][0].sharing is None
    assert warnings == []


def test_entries_take_what_they_list_then_counts_then_the_rest():
    entries = (
        entry(2, offered_as="nvidia.com/rest"),
        entry(3, count=1, offered_as="nvidia.com/one"),
        entry(4, "0", offered_as="nvidia.com/first"),
    )
    offered, _ = share({GPU: gpus(3)}, entries)
    assert ids(offered) == {
        "nvidia.com/first": [f"GPU-0::{n}" for n in range(4)],
        "nvidia.com/one": [f"GPU-1::{n}" for n in range(3)],
        "nvidia.com/rest": ["GPU-2::0", "GPU-2::1"],
    }


def test_a_count_takes_the_first_and_leaves_the_others_alone():
    offered, warnings = share({GPU: gpus(3)}, (entry(2, count=2),))
    assert ids(offered) == {GPU: ["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1", "GPU-2"]}
    assert warnings == []


def test_more_than_there_are_is_said():
    offered, warnings = share({GPU: gpus(1)}, (entry(2, count=3),))
    assert ids(offered) == {GPU: ["GPU-0::0", "GPU-0::1"]}
    assert warnings == [f"sharing of {GPU}: 3 devices should be shared, but there are only 1"]


def test_a_device_that_is_not_there_is_said():
    offered, warnings = share({GPU: gpus(1)}, (entry(2, "0", "7"),))
    assert ids(offered) == {GPU: ["GPU-0::0", "GPU-0::1"]}
    assert warnings == [f"sharing of {GPU}: '7' is none of its devices on this node"]


def test_one_device_in_two_entries_is_refused_however_it_is_called():
    with pytest.raises(ConfigError, match="device GPU-1 is listed in two entries, here as GPU-1"):
        share({GPU: gpus(2)}, (entry(2, "1"), entry(3, "GPU-1")))


def test_a_resource_that_the_node_does_not_have_asks_for_nothing():
    offered, warnings = share({GPU: gpus(1)}, (entry(2, name="nvidia.com/mig-1g.5gb"),))
    assert ids(offered) == {GPU: ["GPU-0"]}
    assert warnings == ["sharing of nvidia.com/mig-1g.5gb: no device of this node is counted under that name"]


def test_mps_on_a_mig_device_is_held_back():
    slices = [Named(GPU, Device("MIG-a", "GPU-0", "MIG-a", "0:0", kind=MIG), ("0:0", "MIG-a"))]
    offered, _ = share({GPU: slices}, (entry(2, strategy=MPS),))
    assert {device.reason for device in offered[GPU]} == {"sharing using MPS is not supported for MIG devices"}


def test_what_is_held_back_stays_so_in_every_replica():
    held = [Named(GPU, Device("GPU-0", "GPU-0", "GPU-0", "0", withheld="lost", reason="lost"), ("0",))]
    offered, _ = share({GPU: held}, (entry(2),))
    assert [device.reason for device in offered[GPU]] == ["lost", "lost"]


def test_more_replicas_than_a_list_takes_are_refused_before_they_are_made():
    began = time.process_time()
    with pytest.raises(ConfigError, match=r"^nvidia.com/gpu: 1298290 devices make a list of at least \d+ bytes"):
        share({GPU: gpus(16)}, (entry(40_000, "0"), entry(83_886)))
    assert time.process_time() - began < 0.1


def test_devices_that_are_not_there_are_said_in_one_sentence():
    _, warnings = share({GPU: gpus(1)}, (entry(2, *map(str, range(4001))),))
    assert warnings == [
        "sharing of nvidia.com/gpu: '1', '2', '3', '4' and 3996 more are none of its devices on this node"
    ]
