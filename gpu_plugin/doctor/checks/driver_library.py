"""Whether the driver's library is found, and opens."""

from gpu_plugin.config.settings import Settings
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.doctor.check import Finding, check, failed, note, ok, skipped
from gpu_plugin.doctor.facts import Driver, Facts, Unknown

_INSTALL = (
    "install the NVIDIA driver on the node; in a container have NVIDIA's runtime add it (its runtime class, "
    "NVIDIA_VISIBLE_DEVICES=all), or mount the driver's root at --driver-root-ctr-path"
)


@check("driver-library")
def driver_library(facts: Facts) -> Finding:
    """Fails where there is none, where it hangs, or where it cannot be opened."""
    known = facts.driver
    if isinstance(known, Unknown):
        if known.hung:
            return failed(
                f"the driver does not open: {known.why}",
                "a GPU or the driver hangs: look for Xid and NVRM lines in the kernel log; where nothing else helps, "
                "reboot the node",
            )
        if isinstance(facts.released, Unknown):
            return skipped(known.why, "run doctor as root, or as the daemon's user, beside a daemon that answers")
        return skipped(known.why, "gpu-plugin resume, once the work on them is done")
    if known.platform != "nvml":
        return note(f"this node is {_PLATFORMS[known.platform]}, whose GPUs the driver tells nothing else of")
    if known.trouble:
        return _unusable(known, facts.settings)
    if known.count_trouble:
        return failed(f"the driver does not say how many GPUs there are: {known.count_trouble}", _LOG)
    return ok(f"{known.library or 'libnvidia-ml.so.1'}, version {known.version or 'unknown'}")


_PLATFORMS = {"wsl": "WSL", "tegra": "a Tegra"}

_LOG = "look for NVRM and Xid lines in the kernel log, and try nvidia-smi on the node"


def _unusable(known: Driver, settings: Settings) -> Finding:
    if known.code == Return.LIBRARY_NOT_FOUND:
        places = ", ".join(dict.fromkeys((settings.driver_root_ctr_path, settings.driver_root)))
        return failed(f"there is no libnvidia-ml.so.1 below {places}, nor where the loader looks", _INSTALL)
    where = f"{known.trouble}, by {known.library or 'the library that the loader found'}"
    if known.code == Return.DRIVER_NOT_LOADED:
        return failed(
            f"the kernel module is not loaded, or /dev/nvidiactl cannot be opened: {where}",
            "modprobe nvidia on the node; where nvidia-smi works there, this container lacks the device nodes: run it "
            "with NVIDIA's runtime, or privileged",
        )
    if known.code == Return.LIB_RM_VERSION_MISMATCH:
        return failed(where, "see `driver-versions`")
    if known.code == Return.NO_PERMISSION:
        return failed(where, "run as root, or as a user that may open /dev/nvidia*")
    return failed(where, _LOG)
