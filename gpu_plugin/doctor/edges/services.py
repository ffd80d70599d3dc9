"""Traces of NVIDIA's services on the node: the fabric manager, and MPS daemons. Blocks."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from gpu_plugin.devices.mps_paths import CONTROL, PIPE
from gpu_plugin.doctor.edges.process import processes
from gpu_plugin.doctor.facts import FabricManager, Mps
from gpu_plugin.runtime.peer import listening

_FABRIC_MANAGER = "nv-fabricmanage"  # the first 15 characters of its name
_FABRIC_SOCKET = "run/nvidia-fabricmanager/socket"
_MPS = "nvidia-cuda-mps"

_MAX_DIRECTORIES = 64
"""Directories of MPS daemons that are looked at."""


def fabric_manager(roots: Iterable[str], proc: Path = Path("/proc")) -> FabricManager:
    """Traces of nvidia-fabricmanager: a process, or its socket under one of these roots."""
    running = tuple(pid for pid, _ in processes((_FABRIC_MANAGER,), proc))
    for root in roots:
        path = Path(root, _FABRIC_SOCKET)
        try:
            if stat.S_ISSOCK(path.stat().st_mode):
                return FabricManager(running, str(path))
        except OSError:
            continue
    return FabricManager(running)


def mps(root: str, proc: Path = Path("/proc")) -> Mps:
    """Traces of MPS daemons: their processes, and what is below the MPS root, empty for none."""
    controls = sorted(Path(root).glob(f"*.*/*/{PIPE}/{CONTROL}"))[:_MAX_DIRECTORIES] if root else ()
    found = {str(each.parent.parent): listening(os.fspath(each)) for each in controls}
    return Mps(processes((_MPS,), proc), found, root)
