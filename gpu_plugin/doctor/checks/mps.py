"""Check that MPS daemons run if they are needed, and that none is left otherwise."""

from gpu_plugin.config.sharing import MPS
from gpu_plugin.config.words import counted
from gpu_plugin.devices.nvml_h import ComputeMode
from gpu_plugin.doctor.check import Finding, check, note, ok, seen, skipped, warning
from gpu_plugin.doctor.facts import Facts, Mps


@check("mps")
def mps(facts: Facts) -> Finding | list[Finding]:
    """Warn of missing daemons if resources are shared by MPS, else of daemons and exclusive compute modes."""
    known = seen(facts.mps, "MPS")
    if any(entry.strategy == MPS for entry in facts.settings.sharing):
        return _wanted(known)
    found = []
    listening = [path for path, listens in known.directories.items() if listens]
    if known.processes or listening:
        daemons = [f"process {pid} ({name})" for pid, name in known.processes] + listening
        found.append(
            warning(
                f"no resource is shared by MPS, but MPS runs: {', '.join(daemons)}",
                "a daemon of another program, or a leftover daemon: echo quit | nvidia-cuda-mps-control, or end "
                "`gpu-plugin mps`",
            )
        )
    elif known.directories:
        found.append(
            note(
                f"no resource is shared by MPS, but {known.root} has leftover directories of it",
                f"gpu-plugin cleanup --mps --mps-root {known.root}",
            )
        )
    driver = facts.opened
    exclusive = (
        [str(gpu.index) for gpu in driver.gpus if gpu.compute_mode not in (None, ComputeMode.DEFAULT)] if driver else []
    )
    if exclusive:
        found.append(
            warning(
                f"GPU {', '.join(exclusive)}: the compute mode allows at most one process, as after MPS: a second process in "
                "a pod fails",
                "nvidia-smi -c DEFAULT on the node, unless that is intended",
            )
        )
    return found or skipped("no resource is shared by MPS, and there is no trace of MPS")


def _wanted(known: Mps) -> Finding:
    silent = [path for path, listens in known.directories.items() if not listens]
    if not known.directories:
        return warning(
            f"resources are shared by MPS, but there is no directory of a daemon below {known.root}",
            "run `gpu-plugin mps` on this node (the chart's value mps.enabled), with the same --mps-root",
        )
    if silent:
        return warning(
            f"no MPS daemon listens in {', '.join(silent)}",
            "see the log of `gpu-plugin mps`; gpu-plugin cleanup --mps removes directories of former resources",
        )
    return ok(f"{counted(len(known.directories), 'MPS daemon')} below {known.root}")
