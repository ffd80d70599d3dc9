"""The files that `gpu-plugin mps` leaves on a node, and their removal. Every call blocks as long as the disk does."""

import ctypes
import os
import shutil
from pathlib import Path

from gpu_plugin.cli.uninstall.traces import Removal, remove_empty
from gpu_plugin.devices.mps_paths import CONTROL, LOG, PIPE, STARTED, shm_directory
from gpu_plugin.mps import compute_modes, readiness
from gpu_plugin.runtime.peer import listening

# The names that supervisors write in a resource's directory. NVIDIA's supervisor writes STARTED.
_PARTS = {PIPE, LOG, STARTED}

_MNT_DETACH = 2  # umount2(2), sys/mount.h


def remove_mps_traces(root: Path) -> Removal:
    """Remove the files of an ended supervisor from the MPS root, and the root if it is then empty.

    The shared memory is unmounted, which needs the capability SYS_ADMIN. The directory of a control daemon that still
    listens stays, and so do other programs' files.
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
    for name in (readiness.FILE, compute_modes.FILE):
        done.attempt(root / name, Path.unlink)
    shm = Path(shm_directory(str(root)))
    if trouble := _unmount(shm):
        done.left.append(trouble)
    done.attempt(shm, remove_empty)
    done.attempt(root, remove_empty)
    return done


def _remove_domain(directory: Path) -> bool:
    """Remove the directory of a domain, such as nvidia.com, if it is empty. Return True if it was removed."""
    if any(directory.iterdir()):
        return False
    directory.rmdir()
    return True


def _resources(root: Path) -> list[Path]:
    """Return the directories of resources, ROOT/DOMAIN/NAME. Each has a pipe directory, and only a supervisor's files."""
    found = []
    for domain in _directories(root):
        if "." in domain.name:
            found += [each for each in _directories(domain) if {PIPE} <= set(os.listdir(each)) <= _PARTS]  # noqa: PTH208
    return found


def _directories(path: Path) -> list[Path]:
    with os.scandir(path) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))


def _unmount(shm: Path) -> str:
    """Unmount the shared memory if it is mounted. Clients that use it keep it. Return why it failed, or ""."""
    if not os.path.ismount(shm):
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(shm), _MNT_DETACH) != 0:
        why = os.strerror(ctypes.get_errno())
        return f"{shm}: cannot be unmounted: {why}; run it as root with the capability SYS_ADMIN"
    return ""
