"""Check that the NVLink fabric of a node with NVSwitches is ready: before that, CUDA fails with error 802."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gpu_plugin.devices.nvml_h import FabricState
from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, Unknown, failed, note, ok, seen, skipped, warning
from gpu_plugin.doctor.node import Node
from gpu_plugin.doctor.process import processes
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.signals.fabric import GUEST, judge

# PCI code and ID assignment specification
_NVIDIA = 0x10DE  # vendor
_NVSWITCH = 0x0680  # class and subclass

_START = (
    "systemctl enable --now nvidia-fabricmanager on the node, of the very version of the driver; its log is "
    "/var/log/fabricmanager.log. Across nodes it is nvidia-imex and the subnet manager"
)


def count_switches(root: Path) -> int:
    """Return the number of NVSwitches in sysfs. Raises OSError if there is no PCI bus."""
    count = 0
    for device in (root / "sys/bus/pci/devices").iterdir():
        with suppress(OSError, ValueError):
            vendor, kind = (int((device / file).read_text(), 16) for file in ("vendor", "class"))
            count += vendor == _NVIDIA and kind >> 8 == _NVSWITCH
    return count


def read_trace(root: Path, roots: Iterable[str]) -> str:
    """Return a trace of nvidia-fabricmanager: its first process, or else its socket below a root; empty for none."""
    for pid, _ in processes(root, "nv-fabricmanage"):
        return f"process {pid}"
    for path in (Path(each, "run/nvidia-fabricmanager/socket") for each in roots):
        with suppress(OSError):
            if path.is_socket():
                return str(path)
    return ""


@check("fabric-manager")
def fabric_manager(node: Node) -> Finding | list[Finding]:
    """Fail with GPUs that have not joined their fabric. If no GPU reports a fabric, fail if there is no fabric manager."""
    driver = node.opened()
    known = 0 if node.simulated else node.known("switches", count_switches, node.root)
    switches = 0 if isinstance(known, Unknown) else known
    gpus = () if driver is None else driver.gpus
    if not switches and not any(gpu.nvswitch for gpu in gpus):
        if driver is None:
            return skipped("the driver is not open, and sysfs lists no NVSwitch")
        return ok("not needed: no GPU leads to an NVSwitch")
    reported = [
        (gpu, *judge(gpu.fabric))
        for gpu in gpus
        if gpu.fabric is not None and gpu.fabric.state != FabricState.NOT_SUPPORTED and not gpu.mig
    ]
    bad: dict[tuple[Verdict, str], list[str]] = {}
    for gpu, verdict, words in reported:
        if verdict is not Verdict.OK:
            bad.setdefault((verdict, words), []).append(str(gpu.index))
    start = _START if switches or node.simulated else f"{GUEST}. Elsewhere {_START}"
    found = [
        (failed if verdict is Verdict.FATAL else warning)(f"GPU {', '.join(indices)}: {words}", start)
        for (verdict, words), indices in bad.items()
    ]
    joined = [gpu for gpu, _, _ in reported if gpu.fabric is not None and gpu.fabric.state == FabricState.COMPLETED]
    models, reporting = {gpu.model for gpu in joined}, {gpu.index for gpu, _, _ in reported}
    silent = [str(gpu.index) for gpu in gpus if gpu.model in models and not gpu.mig and gpu.index not in reporting]
    if silent:
        words = f"no NVLink fabric is reported, while {len(joined)} other GPUs of the model have joined theirs"
        found.append(warning(f"GPU {', '.join(silent)}: {words}", start))
    if found:
        return found
    if reported:
        return ok("every GPU has joined its NVLink fabric")
    return _by_traces(node, f"{switches} NVSwitches" if switches else "GPUs that lead to NVSwitches")


def _by_traces(node: Node, there: str) -> Finding:
    if node.simulated:
        return skipped(f"the simulated node has {there}, and no fabric manager of its own")
    if trace := seen(node.known("fabric_manager", read_trace, node.root, node.roots), "the fabric manager"):
        return ok(f"it runs ({trace})")
    process = node.process()
    if isinstance(process, Unknown) or not process.host_processes:
        return note(
            f"the node has {there}; from this container it cannot be seen whether nvidia-fabricmanager runs",
            f"systemctl status nvidia-fabricmanager on the node. {_START}",
        )
    return failed(f"the node has {there}, and nvidia-fabricmanager does not run: CUDA fails with error 802", _START)
