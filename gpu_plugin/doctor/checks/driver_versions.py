"""Check that the driver's library and its kernel module have the same version."""

from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, Unknown, failed, ok, seen, skipped
from gpu_plugin.doctor.node import Node
from gpu_plugin.nvml.platforms.choice import Platform


@check("driver-versions")
def driver_versions(node: Node) -> Finding:
    """Fail if the module is not loaded, or the versions differ, as after an upgrade until the module is loaded again."""
    if node.simulated:
        return skipped("the node is simulated: it has no kernel module")
    module, driver = seen(node.module(), "the kernel module's version"), node.driver()
    if not isinstance(driver, Unknown) and driver.platform != Platform.NVML:
        return skipped(f"on {driver.platform} the driver is not a module of this kernel")
    if not module.loaded:
        if reason := node.no_gpu():
            return skipped(reason)
        nouveau = "; nouveau is loaded, which keeps it from the GPUs" if module.nouveau else ""
        return failed(
            f"the kernel module nvidia is not loaded{nouveau}",
            ("blacklist nouveau and reboot" if module.nouveau else "modprobe nvidia on the node")
            + "; if that fails, the kernel log has the reason (a module not built for this kernel, Secure Boot)",
        )
    if not module.version:
        return skipped("neither /proc/driver/nvidia/version nor /sys/module/nvidia/version says the module's version")
    if isinstance(driver, Unknown) or not driver.version:
        return ok(f"kernel module {module.version}; the library's version is not known")
    if driver.version != module.version:
        return failed(
            f"the library is of version {driver.version}, the kernel module of {module.version}",
            "the driver was upgraded and the old module is still loaded: drain the node and reboot it, or stop all that uses "
            "the GPUs and reload the module (rmmod nvidia_uvm nvidia_modeset nvidia, modprobe nvidia); in a container "
            "check that the library comes from the node's driver",
        )
    return ok(f"library and kernel module are both of version {module.version}")
