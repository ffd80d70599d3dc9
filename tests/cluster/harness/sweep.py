"""Remove everything that a cluster leaves on the machine: processes, mounts, the bridge, cgroups, kernel settings, files.

Each of these is recognised by its mark or its path, never by a guess, and is searched at each call. So the same code works at the
end of a run and after a killed run.
"""

import contextlib
import os
import shutil
import signal
from pathlib import Path

from . import cgroups, tunables
from .layout import BRIDGE, CGROUP, DEVICE_PLUGINS, MARK, NETWORK, SERVICE_BRIDGE, Layout
from .process import run
from .wait import DeadlineError, expect, wait_until

ENDS_WITHIN = 20.0
"""Longest time in seconds until killed processes have ended."""

_CNI_RESULTS = Path("/var/lib/cni/results")
_LOG_LINKS = Path("/var/log/containers")


class LeftoverError(Exception):
    """A remainder of an earlier run cannot be removed. The text describes it."""


def sweep(layout: Layout) -> None:
    """End all processes of the cluster and remove everything that they created.

    Raises:
        LeftoverError: a process, mount or cgroup still exists.
        PieceError: a system tool failed.
    """
    try:
        _end_processes(layout)
        _unmount(layout)
        _remove_network()
        cgroups.remove()
        tunables.restore(layout)
    except DeadlineError as error:
        raise LeftoverError(f"left over from a run of the cluster tests: {error}") from error
    _remove_log_links(layout)
    _empty_device_plugins(layout)
    if layout.root.exists():
        shutil.rmtree(layout.root)


def _end_processes(layout: Layout) -> None:
    def none_left() -> None:
        processes = _processes(layout)
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        expect(holds=not processes, seen=f"processes {sorted(processes)}")

    wait_until(none_left, "no process of the cluster is left", within=ENDS_WITHIN)


def _processes(layout: Layout) -> set[int]:
    """Return the processes with the mark in their environment, their descendants, and the processes in containers' cgroups."""
    mark = f"{MARK}={layout.root}".encode()
    parents: dict[int, int] = {}
    ours: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            status = (entry / "stat").read_text()
            groups = (entry / "cgroup").read_text()
            environment = (entry / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process ended meanwhile
        except PermissionError:
            environment = []  # some processes refuse this even to root, but not the cluster's processes
        state, parent = status.rpartition(")")[2].split()[:2]
        if state == "Z":
            continue  # dead; its parent must collect it
        parents[int(entry.name)] = int(parent)
        if mark in environment or any(f":/{CGROUP}/" in line for line in groups.splitlines()):
            ours.add(int(entry.name))
    while heirs := {pid for pid, parent in parents.items() if parent in ours and pid not in ours}:
        ours |= heirs
    return ours


def _unmount(layout: Layout) -> None:
    for point in reversed(_mounts(layout)):
        run(["umount", "--lazy", point])
    if left := _mounts(layout):
        raise LeftoverError(f"still mounted below {layout.root}: {', '.join(left)}")


def _mounts(layout: Layout) -> list[str]:
    """Return the mount points below the cluster's directory, outer mounts first."""
    points = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return sorted(point for point in points if point.startswith(f"{layout.root}/"))


def _remove_network() -> None:
    for bridge in (BRIDGE, SERVICE_BRIDGE):
        if (Path("/sys/class/net") / bridge).exists():
            run(["ip", "link", "delete", bridge])
    for result in _CNI_RESULTS.glob(f"{NETWORK}-*"):
        result.unlink()
    _remove_empty(_CNI_RESULTS, _CNI_RESULTS.parent)


def _remove_log_links(layout: Layout) -> None:
    for link in _LOG_LINKS.glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(layout.pod_logs):
            link.unlink()


def _empty_device_plugins(layout: Layout) -> None:
    if not layout.owns_device_plugins.exists() or not DEVICE_PLUGINS.is_dir():
        return
    for entry in DEVICE_PLUGINS.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    _remove_empty(DEVICE_PLUGINS, DEVICE_PLUGINS.parent)


def _remove_empty(*directories: Path) -> None:
    for directory in directories:
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()
