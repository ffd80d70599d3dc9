"""Small specifications for tests."""

from gpu_plugin.containers import cdi_names
from gpu_plugin.containers.cdi.spec import DeviceNode, Edits, Mount, SpecDevice, made

GPU_FILE = cdi_names.file_name(cdi_names.GPU)
IMEX_FILE = cdi_names.file_name(cdi_names.IMEX)
MOFED_FILE = cdi_names.file_name(cdi_names.MOFED)


def spec(device_class=cdi_names.GPU, mount="/usr/lib64/libcuda.so.550", **devices):
    """A specification in which each device has these nodes: GPU_a=("/dev/nvidia0",) makes GPU-a."""
    made_of = tuple(
        SpecDevice(
            name=name.replace("_", "-").removeprefix("-"),
            container_edits=Edits(device_nodes=tuple(DeviceNode(path=node) for node in nodes)),
        )
        for name, nodes in devices.items()
    )
    mounts = (Mount(host_path=mount, container_path=mount, options=("ro", "rbind")),)
    return made(cdi_names.kind(device_class), made_of, Edits(mounts=mounts))
