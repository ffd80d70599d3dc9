"""Whether MPS daemons run where they are needed, and none is left where they are not."""

from gpu_plugin.config.sharing import MPS
from gpu_plugin.config.words import counted
from gpu_plugin.devices.nvml_h import ComputeMode
from gpu_plugin.doctor.check import Finding, check, note, ok, seen, skipped, warning
from gpu_plugin.doctor.facts import Facts, Mps


@check("mps")
def mps(facts: Facts) -> Finding | list[Finding]:
    """Warns of daemons that are wanted and do not listen, and of daemons and compute modes that nobody asks for."""
    known = seen(facts.mps, "MPS")
    if any(entry.strategy == MPS for entry in facts.settings.sharing):
        return _wanted(known)
    found = []
    listening = [path for path, listens in known.directories.items() if listens]
    if known.processes or listening:
        what = [f"process {pid} ({name})" for pid, name in known.processes] + listening
        found.append(
            warning(
                f"no resource is shared by MPS, and MPS runs: {', '.join(what)}",
                "another program's daemon, or one that was left behind: echo quit | nvidia-cuda-mps-control, or end "
                "`gpu-plugin mps`",
            )
        )
    elif known.directories:
        found.append(
            note(
                f"no resource is shared by MPS, and {known.root} has what is left of it",
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
                f"GPU {', '.join(exclusive)}: the compute mode lets one process use it, or none, as MPS leaves it: a second "
                "process in a pod fails",
                "nvidia-smi -c DEFAULT on the node, unless that is meant so",
            )
        )
    return found or skipped("no resource is shared by MPS, and nothing of it is seen")


def _wanted(known: Mps) -> Finding:
    silent = [path for path, listens in known.directories.items() if not listens]
    if not known.directories:
        return warning(
            f"resources are shared by MPS, and there is no daemon's directory below {known.root}",
            "run `gpu-plugin mps` on this node (the chart's value mps.enabled), with the same --mps-root",
        )
    if silent:
        return warning(
            f"no MPS daemon listens in {', '.join(silent)}",
            "the log of `gpu-plugin mps`; a directory that is of no resource any more goes with gpu-plugin cleanup --mps",
        )
    return ok(f"{counted(len(known.directories), 'MPS daemon')} below {known.root}")
