"""The parent cgroup of all containers of the cluster, in cgroup v2 and in each hierarchy of v1."""

import contextlib
import os
from pathlib import Path

from .layout import CGROUP
from .wait import expect, wait_until

_MOUNT = Path("/sys/fs/cgroup")

GONE_WITHIN = 20.0
"""Longest time in seconds until the kernel allows the removal of a cgroup whose processes were killed."""


def _tops() -> list[Path]:
    hierarchies = [_MOUNT] if (_MOUNT / "cgroup.controllers").exists() else sorted(_MOUNT.iterdir())
    return [path / CGROUP for path in hierarchies if not path.is_symlink() and (path / "cgroup.procs").exists()]


def create() -> None:
    """Create the cgroup. It must exist before the kubelet starts."""
    for top in _tops():
        top.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):
            # In v1 a new cpuset is empty, and no process can enter it.
            if (top / setting).exists() and (top.parent / "cpuset.cpus").exists():
                (top / setting).write_text((top.parent / setting).read_text())
        # With the default weight, all containers together would have the weight of one process of the control plane, unlike on
        # a real node.
        for weight, value in (("cpu.shares", "8192"), ("cpu.weight", "800")):
            if (top / weight).exists():
                (top / weight).write_text(value)


def remove() -> None:
    """Remove the cgroup and all cgroups below it.

    Raises:
        DeadlineError: a process still runs in a cgroup.
    """

    def gone() -> None:
        left = [top for top in _tops() if top.exists()]
        for top in left:
            for directory, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):  # busy while the kernel still removes the killed processes
                    Path(directory).rmdir()
        expect(holds=not left, seen=", ".join(map(str, left)))

    wait_until(gone, "no cgroup of the cluster is left", within=GONE_WITHIN)
