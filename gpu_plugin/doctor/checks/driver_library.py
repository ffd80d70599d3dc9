"""Check that the driver's library is found, and opens."""

from gpu_plugin.config.settings import Settings
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.doctor.check import Finding, check, failed, note, ok, skipped
from gpu_plugin.doctor.facts import Driver, Facts, Unknown
from gpu_plugin.nvml.opening_remedies import IN_THE_LOG, opening_remedy


@check("driver-library")
def driver_library(facts: Facts) -> Finding:
    """Fail if the library is missing, hangs, or cannot be opened. A node without a GPU needs no library."""
    known = facts.driver
    if isinstance(known, Unknown):
        if known.hung:
            return failed(
                f"the driver does not open: {known.why}",
                "a GPU or the driver hangs: look for Xid and NVRM lines in the kernel log; if nothing else helps, "
                "reboot the node",
            )
        if isinstance(facts.released, Unknown):
            return skipped(known.why, "run doctor as root, or as the daemon's user, while a daemon answers")
        return skipped(known.why, "gpu-plugin resume, once the work on them is done")
    if known.platform != "nvml":
        return note(f"this node is {_PLATFORMS[known.platform]}, where the driver reports nothing else about its GPUs")
    if facts.no_gpu and known.code in (Return.LIBRARY_NOT_FOUND, Return.DRIVER_NOT_LOADED):
        return note(f"{facts.no_gpu}, so it needs no driver")
    if known.trouble:
        return _unusable(known, facts.settings)
    if known.count_trouble:
        return failed(f"the driver does not say how many GPUs there are: {known.count_trouble}", IN_THE_LOG)
    return ok(f"{known.library or 'libnvidia-ml.so.1'}, version {known.version or 'unknown'}")


_PLATFORMS = {"wsl": "WSL", "tegra": "a Tegra"}


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
