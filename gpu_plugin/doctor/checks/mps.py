"""Check that MPS daemons run if they are needed, and that none is left otherwise."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from gpu_plugin.config.sharing import MPS
from gpu_plugin.config.words import counted
from gpu_plugin.devices.mps_paths import CONTROL, PIPE
from gpu_plugin.devices.nvml_h import ComputeMode
from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, note, ok, seen, skipped, warning
from gpu_plugin.doctor.node import Node
from gpu_plugin.doctor.process import processes
from gpu_plugin.mps.directories import root_here
from gpu_plugin.runtime.peer import listening

_MAX_DIRECTORIES = 64  # of MPS daemons that are read


class Mps(msgspec.Struct, frozen=True):
    """Traces of MPS: the ids and names of visible processes, and the directories of resources below the MPS root.

    The value of a directory is True if a control daemon accepts connections there.
    """

    processes: tuple[tuple[int, str], ...] = ()
    directories: Mapping[str, bool] = msgspec.field(default_factory=dict)
    root: str = ""


def read_mps(mps_root: str, root: Path) -> Mps:
    """Return traces of MPS daemons: their processes, and their directories below the MPS root (empty: no root)."""
    mps_root = str(root_here(mps_root)) if mps_root else ""
    controls = sorted(Path(mps_root).glob(f"*.*/*/{PIPE}/{CONTROL}"))[:_MAX_DIRECTORIES] if mps_root else ()
    directories = {str(each.parent.parent): listening(str(each)) for each in controls}
    return Mps(processes(root, "nvidia-cuda-mps"), directories, mps_root)


@check("mps")
def mps(node: Node) -> Finding | list[Finding]:
    """Warn of missing daemons if resources are shared by MPS, else of daemons and exclusive compute modes."""
    known = seen(node.known("mps", read_mps, node.settings.mps_root, node.root), "MPS")
    if any(entry.strategy == MPS for entry in node.settings.sharing):
        return _wanted(known)
    found = []
    daemons = [f"process {pid} ({name})" for pid, name in known.processes]
    daemons += [path for path, listens in known.directories.items() if listens]
    if daemons:
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
    driver = node.opened()
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
