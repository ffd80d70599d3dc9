"""The kubelet's own record of which pod has which devices, beside its socket: a second witness to PodResources.

PodResources leaves out what plain init containers were given, and may be empty for a moment after the kubelet's start, or
not be mounted for us at all; the file has all of it, and may for a while hold on to pods that have ended (it is written at
the next allocation or list). Source: pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

NAME = "kubelet_internal_checkpoint"

MAX_BYTES = 64 * 1024 * 1024
"""More than a node with 110 pods and tens of thousands of device ids has."""


def held(directory: Path) -> frozenset[tuple[str, str]] | None:
    """(resource, device id) of every device that the kubelet has given to a pod; None where it has not written that down.

    Blocks for as long as the disk does. A file that cannot be understood is no witness: None.
    """
    try:
        descriptor = os.open(directory / NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            return None
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return _entries(json.loads(file.read(MAX_BYTES)))
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError):
        return None
    finally:
        os.close(descriptor)


def _entries(content: Any) -> frozenset[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for entry in content["Data"]["PodDeviceEntries"] or ():
        ids = entry["DeviceIDs"] or ()
        # Since 1.20 ids are kept by NUMA node; before, as one list.
        for some in ids.values() if isinstance(ids, dict) else [ids]:
            found |= {(str(entry["ResourceName"]), str(identifier)) for identifier in some or ()}
    return frozenset(found)
