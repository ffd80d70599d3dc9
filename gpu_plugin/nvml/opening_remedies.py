"""The remedies for each way in which the driver cannot be opened (nvmlInit_v2). Pure."""

from gpu_plugin.devices.nvml_h import Return

IN_THE_LOG = "look for NVRM and Xid lines in the kernel log, and try nvidia-smi on the node"

_REMEDIES = {
    Return.LIBRARY_NOT_FOUND: "install the NVIDIA driver on the node; in a container have NVIDIA's runtime add it (its runtime "
    "class, NVIDIA_VISIBLE_DEVICES=all), or mount the driver's root at --driver-root-ctr-path",
    Return.DRIVER_NOT_LOADED: "modprobe nvidia on the node; where nvidia-smi works there, this container lacks the device nodes: "
    "run it with NVIDIA's runtime, or privileged",
    Return.LIB_RM_VERSION_MISMATCH: "the library and the kernel module are of different versions: load the module of the "
    "library's version, or reboot the node; gpu-plugin doctor names both (`driver-versions`)",
    Return.NO_PERMISSION: "run as root, or as a user that may open /dev/nvidia*",
    Return.NOT_SUPPORTED: "set --device-discovery-strategy to auto or nvml",  # a platform that the machine does not have
}


def opening_remedy(code: int) -> str:
    """The remedy for this nvmlReturn_t of nvmlInit_v2."""
    return next((remedy for known, remedy in _REMEDIES.items() if known == code), IN_THE_LOG)
