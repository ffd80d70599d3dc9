"""The names of this plugin's CDI specifications and their devices, the same as in NVIDIA's plugin (internal/cdi)."""

VENDOR = "k8s.device-plugin.nvidia.com"

GPU = "gpu"
IMEX = "imex-channel"
GDRCOPY = "gdrcopy"
GDS = "gds"
MOFED = "mofed"
CLASSES = (GPU, IMEX, GDRCOPY, GDS, MOFED)

CLASS_NODES = {
    GDRCOPY: ("/dev/gdrdrv",),
    GDS: ("/dev/nvidia-fs",),
    MOFED: ("/dev/infiniband/uverbs", "/dev/infiniband/rdma_cm"),
}
"""The prefixes of each class's device nodes (nvcdi: gdrcopy.go, gds.go, mofed.go)."""

ALL = "all"  # the name of a device that includes all devices of its class
INDEX = "0"  # the name of a node's only device, if devices are named by index


def kind(device_class: str) -> str:
    """Return the kind of a class, such as k8s.device-plugin.nvidia.com/gpu."""
    return f"{VENDOR}/{device_class}"


def file_name(device_class: str) -> str:
    """Return the file name of a class's specification, such as k8s.device-plugin.nvidia.com-gpu.json."""
    return f"{VENDOR}-{device_class}.json"


def qualified(device_class: str, name: str) -> str:
    """Return the name of a device for a runtime, such as k8s.device-plugin.nvidia.com/gpu=all."""
    return f"{kind(device_class)}={name}"
