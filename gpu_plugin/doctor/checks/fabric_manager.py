"""Check that the NVLink fabric of a node with NVSwitches is ready: before that, CUDA fails with error 802."""

from gpu_plugin.devices.nvml_h import FabricState
from gpu_plugin.doctor.check import Finding, check, failed, note, ok, seen, skipped, warning
from gpu_plugin.doctor.facts import Facts, Unknown
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.signals.fabric import GUEST, judge

_START = (
    "systemctl enable --now nvidia-fabricmanager on the node, of the very version of the driver; its log is "
    "/var/log/fabricmanager.log. Across nodes it is nvidia-imex and the subnet manager"
)


@check("fabric-manager")
def fabric_manager(facts: Facts) -> Finding | list[Finding]:
    """Fail with GPUs that have not joined their fabric. If no GPU reports a fabric, fail if there is no fabric manager."""
    driver = facts.opened
    switches = () if facts.simulated or isinstance(facts.pci, Unknown) else facts.pci.switches
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
    start = _START if switches or facts.simulated else f"{GUEST}. Elsewhere {_START}"
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
    return _by_traces(facts, len(switches))


def _by_traces(facts: Facts, switches: int) -> Finding:
    there = f"{switches} NVSwitches" if switches else "GPUs that lead to NVSwitches"
    if facts.simulated:
        return skipped(f"the simulated node has {there}, and no fabric manager of its own")
    if trace := seen(facts.fabric_manager, "the fabric manager"):
        return ok(f"it runs ({trace})")
    if isinstance(facts.process, Unknown) or not facts.process.host_processes:
        return note(
            f"the node has {there}; from this container it cannot be seen whether nvidia-fabricmanager runs",
            f"systemctl status nvidia-fabricmanager on the node. {_START}",
        )
    return failed(f"the node has {there}, and nvidia-fabricmanager does not run: CUDA fails with error 802", _START)
