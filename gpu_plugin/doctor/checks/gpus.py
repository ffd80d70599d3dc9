"""Check that the driver lists every GPU on the PCI bus, each answers, and no GPU waits for a reset or a license."""

from collections.abc import Iterator

from gpu_plugin.devices.absent import held_for_guest
from gpu_plugin.devices.gpu_names import short_bus_id
from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.driver import Gpu
from gpu_plugin.doctor.finding import Finding, Unknown, failed, note, ok, skipped, warning
from gpu_plugin.doctor.node import Node
from gpu_plugin.health.notices import Notice, notices


@check("gpus")
def gpus(node: Node) -> Finding | list[Finding]:
    """Fail if there is no GPU, and with each GPU that does not answer. Warn of notices, and of GPUs that the driver lacks."""
    driver, bus = node.opened(), node.pci_gpus()
    on_bus = {} if isinstance(bus, Unknown) else bus
    if driver is None:
        if not on_bus:
            return skipped("the driver is not open, and sysfs lists no GPU of NVIDIA's")
        named = ", ".join(f"{bus_id} ({bound or 'no driver'})" for bus_id, bound in on_bus.items())
        return skipped(f"the driver is not open; on the PCI bus: {named}")
    if not driver.count and not driver.count_trouble and (reason := node.no_gpu()):
        return note(reason)
    found = [
        failed(
            f"GPU {gpu.index} does not answer: {gpu.trouble}",
            "drain the node; look for Xid lines in the kernel log; reset the GPU or reboot the node",
        )
        for gpu in driver.gpus
        if gpu.trouble
    ]
    if not driver.count and not driver.count_trouble:
        found.append(
            failed(
                "the driver finds no GPU",
                "is one there (lspci -d 10de:), and bound to the driver nvidia? In a container: is it given all GPUs "
                "(NVIDIA_VISIBLE_DEVICES=all)?",
            )
        )
    known = {short_bus_id(gpu.bus_id).lower() for gpu in driver.gpus if gpu.bus_id}
    complete = not any(gpu.trouble for gpu in driver.gpus)
    found += [
        warning(
            f"the GPU at {bus_id} is on the PCI bus and the driver does not have it"
            + (f": it is bound to {bound}" if bound not in ("", "nvidia") else ""),
            "that is right for GPUs hidden from this container, which selection.exclude may name; else look for NVRM lines in "
            "the kernel log",
        )
        for bus_id, bound in (on_bus.items() if complete else ())
        if bus_id.lower() not in known and not held_for_guest(bound)
    ]
    found += [
        warning(f"GPU {gpu.index}: {notice.found}", notice.action) for gpu in driver.gpus for notice in _notices(gpu)
    ]
    if found:
        return found
    models = sorted({gpu.model for gpu in driver.gpus if gpu.model})
    answer = "it answers" if driver.count == 1 else f"all {driver.count} answer"
    checked = "; sysfs does not list the PCI bus here" if isinstance(bus, Unknown) else ""
    return ok(f"{answer}: {', '.join(models) or 'of unknown model'}{checked}")


def _notices(gpu: Gpu) -> Iterator[Notice]:
    return notices(
        gpu.uuid, mig_pending=gpu.mig_pending, vgpu_licensed=gpu.vgpu_licensed, persistent=gpu.persistence is True
    )
