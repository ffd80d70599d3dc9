"""What a kubelet does in its device plugin directory besides listening: it removes sockets, and writes a checkpoint.

Sources: pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go (cleanup) and devicemanager/manager.go (writeCheckpoint).
"""

import json
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpu_plugin.simulation.stand_in_kubelet.device_table import ResourceState
from gpu_plugin.simulation.stand_in_kubelet.pods import Pod

CHECKPOINT = "kubelet_internal_checkpoint"


def write_checkpoint(directory: Path, pods: Iterable[Pod], tables: Mapping[str, ResourceState]) -> None:
    """Writes the file a kubelet writes on every list and allocation, by renaming; for people and watchers to see."""
    entries: list[dict[str, Any]] = [
        {"PodUID": pod.name, "ContainerName": name, "ResourceName": resource, "DeviceIDs": list(each.ids)}
        for pod in pods
        for name, held in pod.held.items()
        for resource, each in held.items()
    ]
    registered = {name: sorted(state.healthy) for name, state in tables.items()}
    fresh = directory / f".{CHECKPOINT}"
    fresh.touch(mode=0o600)
    fresh.write_text(json.dumps({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": registered}}))
    fresh.replace(directory / CHECKPOINT)


def clean(directory: Path) -> None:
    """Removes the sockets directly in `directory`, also through links; files, pipes and folders stay."""
    for entry in list(directory.iterdir()):
        try:
            is_socket = stat.S_ISSOCK(entry.stat().st_mode)
        except OSError:  # a link to nowhere, or gone meanwhile: neither is a socket
            continue
        if is_socket:
            entry.unlink(missing_ok=True)
