"""What `gpu-plugin mps` leaves on a node, and its removal. Every call blocks for as long as the disk does."""

import ctypes
import os
import shutil
from pathlib import Path

from gpu_plugin.cli.uninstall.traces import Removal, remove_empty
from gpu_plugin.devices.mps_paths import CONTROL, LOG, PIPE, STARTED, shm_directory
from gpu_plugin.mps import compute_modes, readiness
from gpu_plugin.runtime.peer import listening

_PARTS = {PIPE, LOG, readiness.READY, readiness.DOWN, STARTED}
"""All that supervisors put into a resource's directory; the last one is NVIDIA's."""

_MNT_DETACH = 2  # umount2(2), sys/mount.h


def remove_mps_traces(root: Path) -> Removal:
    """Removes what a supervisor that runs no longer has left below the MPS root, and the root where it is empty then.

    The shared memory is unmounted, which takes the capability SYS_ADMIN. Directories of a control daemon
    that still listens, and all that is no resource's, stay.
    """
    try:
        if not root.is_dir():
            return Removal()
        if readiness.supervised(root):
            return Removal(left=[f"{root}: gpu-plugin mps is running with this MPS root: stop it first"])
        resources = _resources(root)
    except OSError as error:
        return Removal(left=[f"{error.filename}: {error.strerror}"])
    done = Removal()
    for directory in resources:
        if listening(str(directory / PIPE / CONTROL)):
            done.left.append(f"{directory}: an MPS control daemon is running there: stop it first")
        else:
            done.attempt(directory, shutil.rmtree)
            done.attempt(directory.parent, _remove_domain)
    for name in (readiness.SUPERVISOR, compute_modes.FILE):
        done.attempt(root / name, Path.unlink)
    shm = Path(shm_directory(str(root)))
    if trouble := _unmount(shm):
        done.left.append(trouble)
    done.attempt(shm, remove_empty)
    done.attempt(root, remove_empty)
    return done


def _remove_domain(directory: Path) -> bool:
    """Removes the directory of a domain, such as nvidia.com, once no resource of it is left. Returns whether it did."""
    if any(directory.iterdir()):
        return False
    directory.rmdir()
    return True


def _resources(root: Path) -> list[Path]:
    """The directories of resources, as ROOT/DOMAIN/NAME: those that have pipes, and nothing that is not a daemon's."""
    found = []
    for domain in _directories(root):
        if "." in domain.name:
            found += [each for each in _directories(domain) if {PIPE} <= set(os.listdir(each)) <= _PARTS]  # noqa: PTH208
    return found


def _directories(path: Path) -> list[Path]:
    with os.scandir(path) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))


def _unmount(shm: Path) -> str:
    """Unmounts the shared memory if it is mounted; clients that use it keep it. Returns why it could not be."""
    if not os.path.ismount(shm):
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(shm), _MNT_DETACH) != 0:
        why = os.strerror(ctypes.get_errno())
        return f"{shm}: cannot be unmounted: {why}; run it as root with the capability SYS_ADMIN"
    return ""
