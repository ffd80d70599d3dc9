"""Check that GPUs stay initialised while no process uses them."""

from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, ok, skipped, warning
from gpu_plugin.doctor.node import Node


@check("persistence-mode")
def persistence_mode(node: Node) -> Finding:
    """Warn of GPUs without persistence mode: the driver resets their error counts, and the next pod waits for them to wake."""
    driver = node.opened()
    if driver is None:
        return skipped("the driver is not open")
    known = [gpu for gpu in driver.gpus if gpu.persistence is not None]
    if not known:
        return skipped("no GPU reports its persistence mode")
    off = [str(gpu.index) for gpu in known if not gpu.persistence]
    if off:
        which = f"GPU {off[0]}" if len(off) == 1 else f"GPUs {', '.join(off)}"
        return warning(
            f"off on {which}: once nothing has them open the driver resets their error counts, and waking takes seconds",
            "systemctl enable --now nvidia-persistenced on the node (or nvidia-smi -pm 1, until the next boot)",
        )
    return ok("on")
