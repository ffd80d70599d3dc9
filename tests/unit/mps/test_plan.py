import pytest
from msgspec.structs import replace

from gpu_plugin.config.sharing import MPS, TIME_SLICING, MpsLimits, SharedResource
from gpu_plugin.devices.device import Device, Resource, mig_device, whole_gpu
from gpu_plugin.devices.node import Gpu, MigDevice, Node
from gpu_plugin.mps.plan import MpsResource, mps_resources, plan_daemons

NAME = "nvidia.com/gpu"
MIB = 1024 * 1024
PASCAL, VOLTA, HOPPER = 4, 5, 9


def gpu(index, architecture=HOPPER, memory=80 * 1024 * MIB, **more):
    return Gpu(
        f"GPU-{index}", index, architecture=architecture, memory_bytes=memory, model=f"model {architecture}", **more
    )


def shared(device, replicas=2, strategy=MPS, **more):
    entry = SharedResource(NAME, NAME, replicas, strategy, **more)
    return [replace(device, id=f"{device.id}::{n}", sharing=entry) for n in range(replicas)]


def resource(devices, name=NAME):
    return Resource(name, tuple(devices))


def refused(mps_resource, root="/run/nvidia/mps"):
    planned = plan_daemons(root, [mps_resource])
    assert not planned.daemons
    return planned.refused[mps_resource.name]


def test_a_daemon_has_nvidias_directories_and_sees_its_own_gpus_alone():
    (daemon,) = plan_daemons("/run/nvidia/mps/", [MpsResource(NAME, (gpu(3), gpu(5)), 4)]).daemons
    assert daemon.pipe == "/run/nvidia/mps/nvidia.com/gpu/pipe"
    assert daemon.log == "/run/nvidia/mps/nvidia.com/gpu/log"
    assert daemon.environment == {
        "CUDA_MPS_PIPE_DIRECTORY": "/run/nvidia/mps/nvidia.com/gpu/pipe",
        "CUDA_MPS_LOG_DIRECTORY": "/run/nvidia/mps/nvidia.com/gpu/log",
        "CUDA_VISIBLE_DEVICES": "GPU-3,GPU-5",
    }
    assert (daemon.resource, daemon.gpus, daemon.replicas) == (NAME, ("GPU-3", "GPU-5"), 4)


@pytest.mark.parametrize(
    ("architecture", "most"), [(None, 16), (2, 16), (PASCAL, 16), (VOLTA, 48), (6, 48), (HOPPER, 48), (10, 48)]
)
def test_v100_and_later_take_48_clients_and_those_before_16(architecture, most):
    one = gpu(0, architecture)
    assert plan_daemons("/mps", [MpsResource(NAME, (one,), most)]).daemons
    why = refused(MpsResource(NAME, (one,), most + 1))
    assert f"{most + 1} replicas are more than the {most} MPS clients that GPU GPU-0" in why


def test_each_gpu_of_a_resource_is_served_once_whatever_its_replicas():
    node = Node((gpu(0), gpu(1)))
    devices = [*shared(whole_gpu(node.gpus[1]), 3), *shared(whole_gpu(node.gpus[0]), 3)]
    limits = MpsLimits(pinned_memory=7)
    assert mps_resources([resource(devices)], node) == (MpsResource(NAME, (node.gpus[1], node.gpus[0]), 3),)
    limited = [*shared(whole_gpu(node.gpus[1]), 2, limits=limits)]
    assert mps_resources([resource(limited)], node) == (MpsResource(NAME, (node.gpus[1],), 2, limits),)


def test_what_is_not_shared_by_mps_needs_no_daemon():
    node = Node((gpu(0), gpu(1), gpu(2)))
    alone = whole_gpu(node.gpus[0])
    sliced = shared(whole_gpu(node.gpus[1]), 2, TIME_SLICING)
    by_mps = shared(whole_gpu(node.gpus[2]))
    assert mps_resources([resource([alone]), resource(sliced, "nvidia.com/sliced")], node) == ()
    (found,) = mps_resources([resource([alone, *sliced, *by_mps])], node)
    assert found.gpus == (node.gpus[2],)
    retired = [replace(device, retired=True) for device in by_mps]
    assert mps_resources([resource(retired)], node) == ()


SLICED = gpu(0, mig_enabled=True)
PAIR = Node((gpu(0), gpu(1)))


@pytest.mark.parametrize(
    ("node", "devices", "why"),
    [
        (
            Node((SLICED, gpu(1))),
            [*shared(whole_gpu(gpu(1))), *shared(mig_device(SLICED, MigDevice("MIG-1", 0, 1, 0, "1g.10gb")))],
            "MIG-1 is a MIG device",
        ),
        (Node((SLICED,)), shared(whole_gpu(SLICED)), "GPU GPU-0 is in MIG mode"),
        (Node(), shared(Device("all", "all", "all", "0")), "all is not a GPU that NVML describes"),
        (
            PAIR,
            [*shared(whole_gpu(PAIR.gpus[0]), 2), *shared(whole_gpu(PAIR.gpus[1]), 4)],
            "different replicas or limits",
        ),
        (
            Node((gpu(0, PASCAL), gpu(1, VOLTA))),
            [*shared(whole_gpu(gpu(0, PASCAL))), *shared(whole_gpu(gpu(1, VOLTA)))],
            "older than Volta",
        ),
    ],
)
def test_devices_that_no_daemon_can_serve_are_refused(node, devices, why):
    (found,) = mps_resources([resource(devices)], node)
    assert why in refused(found)


def test_a_gpu_has_one_daemon():
    planned = plan_daemons("/mps", [MpsResource("a/one", (gpu(0),), 2), MpsResource("a/two", (gpu(1), gpu(0)), 2)])
    assert [daemon.resource for daemon in planned.daemons] == ["a/one"]
    assert planned.refused == {"a/two": "GPU GPU-0 is shared by the MPS daemon of a/one already; a GPU has one daemon"}


def test_a_path_too_long_for_the_daemons_sockets_is_refused():
    longest = 107 - len("/nvidia.com/gpu/pipe/control_privileged")
    assert plan_daemons("/" + "x" * (longest - 1), [MpsResource(NAME, (gpu(0),), 2)]).daemons
    assert "too long a path" in refused(MpsResource(NAME, (gpu(0),), 2), "/" + "x" * longest)


def test_an_unreadable_gpu_takes_no_other_with_it():
    lost = gpu(1, unreadable="the GPU is lost")
    planned = plan_daemons("/mps", [MpsResource(NAME, (gpu(0), lost, gpu(2)), 2)])
    (daemon,) = planned.daemons
    assert daemon.gpus == ("GPU-0", "GPU-2")
    assert [ordinal for ordinal, _ in daemon.limits.memory] == [0, 1]
    (warning,) = planned.warnings
    assert "GPU GPU-1 is left out" in warning
    assert "the GPU is lost" in warning
    assert refused(MpsResource(NAME, (lost,), 2)) == "none of its GPUs can be read"


def test_one_refused_resource_takes_no_other_with_it():
    planned = plan_daemons("/mps", [MpsResource("a/many", (gpu(0),), 49), MpsResource("a/few", (gpu(1),), 48)])
    assert [daemon.resource for daemon in planned.daemons] == ["a/few"]
    assert list(planned.refused) == ["a/many"]
