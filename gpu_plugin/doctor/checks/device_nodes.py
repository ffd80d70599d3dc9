"""Check that the device nodes that CUDA needs exist, have the right numbers, and can be opened."""

import errno
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from gpu_plugin.config.words import counted
from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, Status, Unknown, failed, note, ok, seen, skipped, warning
from gpu_plugin.doctor.node import Node
from gpu_plugin.nvml.platforms.choice import Platform

_UVM = "/dev/nvidia-uvm"
_UVM_TOOLS = "/dev/nvidia-uvm-tools"
_CTL = "/dev/nvidiactl"

SHARED = (_CTL, _UVM, _UVM_TOOLS)  # device nodes that CUDA opens in addition to a node for each GPU

# Major of /dev/nvidiaN, and minor of /dev/nvidiactl (devices.txt of the kernel's documentation)
_FRONTEND_MAJOR = 195
_CTL_MINOR = 255

UNNEEDED = ok("does not exist, and only profilers need it")

_MAJOR = re.compile(r"^\s*(\d+) (\S+)$", re.MULTILINE)

_MAKE = (
    "nvidia-modprobe -c 0 -u on the node makes them; in a container the runtime must add them, or it must be privileged"
)


def read_majors(root: Path) -> dict[str, int]:
    """Return the majors of character devices by driver. Raises OSError."""
    characters = (root / "proc/devices").read_text().partition("Block devices:")[0]
    return {name: int(number) for number, name in _MAJOR.findall(characters)}


@check("device-nodes")
def device_nodes(node: Node) -> Finding | list[Finding]:
    """Fail with each device node that is missing, wrong or cannot be opened. Without /dev/nvidia-uvm no CUDA program starts."""
    if node.simulated:
        count = len(seen(node.device_roots(), "device nodes", needed=True))
        return ok(f"the simulated node has {counted(count, 'device node')}, and they are not opened")
    driver = node.driver()
    if not isinstance(driver, Unknown) and driver.platform != Platform.NVML:
        return skipped("this platform has no device node for each GPU")
    if reason := node.no_gpu():
        return skipped(reason)
    released = node.released()
    if isinstance(released, Unknown):
        return skipped("whether GPUs are released for maintenance is not known: their device nodes are not opened")
    if released:
        return skipped("GPUs are released for maintenance: their device nodes are not opened")
    majors = node.known("majors", read_majors, node.root)
    # The node of a GPU is opened only if the driver answered for the GPU: else it would hang as well
    gpus = () if isinstance(driver, Unknown) else driver.gpus
    paths = [*SHARED, *(f"/dev/nvidia{gpu.minor}" for gpu in gpus if gpu.minor is not None)]
    reads = {path: node.begin(path, look, path, node, {} if isinstance(majors, Unknown) else majors) for path in paths}
    troubles: dict[Finding, list[str]] = {}  # device nodes of several GPUs often have the same problem
    fine = []
    for path, read in reads.items():
        found = read.found()
        if isinstance(found, Unknown):
            found = failed(f"opening it: {found.why}", "its GPU hangs: look for Xid lines in the kernel log")
        if found.status is not Status.OK:
            troubles.setdefault(found, []).append(path)
        elif found is not UNNEEDED:
            fine.append(path)
    if troubles:
        return [replace(each, found=f"{', '.join(paths)}: {each.found}") for each, paths in troubles.items()]
    count = len(paths) - len(SHARED)
    of_gpus = f" and the device {'node' if count == 1 else 'nodes'} of {counted(count, 'GPU')}" if count else ""
    return ok(f"{', '.join(path for path in fine if path in SHARED)}{of_gpus} can be opened")


def look(path: str, node: Node, majors: Mapping[str, int]) -> Finding:
    """Return the finding of a device node, which is opened as CUDA does, to read and write. Its text does not name the path.

    Opening a GPU's device node wakes the GPU, which can take seconds.
    """
    file = node.root / path.lstrip("/")
    try:
        there = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return _missing(path)
    except OSError as error:
        return _refused(error, 0, node)
    if not stat.S_ISCHR(there.st_mode):
        return failed("is not a character device", f"remove it; {_MAKE}")
    number, right = (os.major(there.st_rdev), os.minor(there.st_rdev)), _number(path, majors)
    if right is not None and number != right:
        return failed(
            f"is device {number[0]}:{number[1]}, and the driver's is {right[0]}:{right[1]}", f"remove it; {_MAKE}"
        )
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return _refused(error, stat.S_IMODE(there.st_mode), node)
    return ok("can be opened")


def _missing(path: str) -> Finding:
    if path == _UVM_TOOLS:
        return UNNEEDED
    if path == _UVM:
        return warning("does not exist; without it no CUDA program starts", f"modprobe nvidia-uvm on the node; {_MAKE}")
    return failed("does not exist", _MAKE)


def _number(path: str, majors: Mapping[str, int]) -> tuple[int, int] | None:
    """Return the driver's device number of a path, None if it is not known."""
    if path not in (_UVM, _UVM_TOOLS):
        major = majors.get("nvidia-frontend", majors.get("nvidia", _FRONTEND_MAJOR))
        return major, _CTL_MINOR if path == _CTL else int(path.removeprefix("/dev/nvidia"))
    return (majors["nvidia-uvm"], int(path == _UVM_TOOLS)) if "nvidia-uvm" in majors else None


def _refused(error: OSError, mode: int, node: Node) -> Finding:
    """Return the finding of a failed open: EPERM is of the device cgroup, EACCES of modes or of SELinux and AppArmor."""
    reason = f"cannot be opened: {error.strerror}"
    if error.errno == errno.EPERM:
        return failed(
            f"{reason}: the device cgroup denies it",
            "run the container with NVIDIA's runtime, or privileged; if it could be opened before, systemd or the kubelet's "
            "CPU manager has rewritten its cgroup: restart the pod",
        )
    if error.errno == errno.EACCES:
        process = node.process()
        if uid := node.uid():
            return note(f"{reason} by uid {uid} (mode {mode:04o})", "run doctor as root to see what the daemon may do")
        confined = not isinstance(process, Unknown) and process.selinux == "enforcing"
        hint = "SELinux is enforcing: ausearch -m avc -ts recent on the node"
        return failed(f"{reason} (mode {mode:04o})", hint if confined else "AppArmor? See the kernel log")
    if error.errno in (errno.ENXIO, errno.ENODEV):
        return failed(
            f"{reason}: no GPU or module is behind it",
            "is the kernel module loaded, and the GPU on the bus? Look for NVRM lines in the kernel log",
        )
    return failed(reason, "look for NVRM and Xid lines in the kernel log: the driver could not initialise the GPU")
