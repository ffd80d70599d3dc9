"""What CDI specifications of this plugin and their devices are called: as NVIDIA's plugin calls them (internal/cdi)."""

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
"""How the device nodes of each class begin (nvcdi: gdrcopy.go, gds.go, mofed.go)."""

ALL = "all"  # the device that stands for all of its class
INDEX = "0"  # what the only device of a node is called where devices go by index


def kind(device_class: str) -> str:
    """The kind of a class, such as k8s.device-plugin.nvidia.com/gpu."""
    return f"{VENDOR}/{device_class}"


def file_name(device_class: str) -> str:
    """The file that has a class, such as k8s.device-plugin.nvidia.com-gpu.json."""
    return f"{VENDOR}-{device_class}.json"


def qualified(device_class: str, name: str) -> str:
    """What a runtime is told a device is called, such as k8s.device-plugin.nvidia.com/gpu=all."""
    return f"{kind(device_class)}={name}"
