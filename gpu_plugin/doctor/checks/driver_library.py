"""Check that the driver's library is found, and opens."""

from gpu_plugin.config.settings import Settings
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.driver import Driver
from gpu_plugin.doctor.finding import Finding, Unknown, failed, note, ok, skipped
from gpu_plugin.doctor.node import Node
from gpu_plugin.nvml.opening_remedies import IN_THE_LOG, opening_remedy
from gpu_plugin.nvml.platforms.choice import Platform

_PLATFORMS = {Platform.WSL: "WSL", Platform.TEGRA: "a Tegra"}


@check("driver-library")
def driver_library(node: Node) -> Finding:
    """Fail if the library is missing, hangs, or cannot be opened. A node without a GPU needs no library."""
    known = node.driver()
    if isinstance(known, Unknown):
        if known.hung:
            return failed(
                f"the driver does not open: {known.why}",
                "a GPU or the driver hangs: look for Xid and NVRM lines in the kernel log; if nothing else helps, "
                "reboot the node",
            )
        if isinstance(node.released(), Unknown):
            return skipped(known.why, "run doctor as root, or as the daemon's user, while a daemon answers")
        return skipped(known.why, "gpu-plugin resume, once the work on them is done")
    if known.platform != Platform.NVML:
        return note(f"this node is {_PLATFORMS[known.platform]}, where the driver reports nothing else about its GPUs")
    if known.code in (Return.LIBRARY_NOT_FOUND, Return.DRIVER_NOT_LOADED) and (reason := node.no_gpu()):
        return note(f"{reason}, so it needs no driver")
    if known.trouble:
        return _unusable(known, node.settings)
    if known.count_trouble:
        return failed(f"the driver does not say how many GPUs there are: {known.count_trouble}", IN_THE_LOG)
    return ok(f"{known.library or 'libnvidia-ml.so.1'}, version {known.version or 'unknown'}")


def _unusable(known: Driver, settings: Settings) -> Finding:
    remedy = opening_remedy(known.code)
    if known.code == Return.LIBRARY_NOT_FOUND:
        places = ", ".join(dict.fromkeys((settings.driver_root_ctr_path, settings.driver_root)))
        return failed(
            f"there is no libnvidia-ml.so.1 below {places}, nor in the loader's directories: {known.trouble}", remedy
        )
    where = f"{known.trouble}, by {known.library or 'the library that the loader found'}"
    if known.code == Return.DRIVER_NOT_LOADED:
        where = f"the kernel module is not loaded, or /dev/nvidiactl cannot be opened: {where}"
    return failed(where, remedy)
