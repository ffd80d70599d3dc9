"""Check that the device nodes that CUDA needs exist, have the right numbers, and can be opened."""

import errno

from msgspec.structs import replace

from gpu_plugin.config.words import counted
from gpu_plugin.doctor.check import Finding, check, failed, note, ok, seen, skipped, warning
from gpu_plugin.doctor.facts import DeviceNode, DeviceNodes, Facts, Unknown

_FRONTEND = 195
"""Major of /dev/nvidiaN and /dev/nvidiactl (devices.txt of the kernel's documentation)."""

_CTL = 255
_UVM = frozenset({"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"})

_SHARED = _UVM | {"/dev/nvidiactl"}
"""Nodes that all GPUs share."""

_MAKE = (
    "nvidia-modprobe -c 0 -u on the node makes them; in a container the runtime must add them, or it must be privileged"
)


@check("device-nodes")
def device_nodes(facts: Facts) -> Finding | list[Finding]:
    """Fail with each device node that is missing, wrong or cannot be opened. Without /dev/nvidia-uvm no CUDA program starts."""
    known = seen(facts.nodes, "device nodes", needed=True)
    if facts.simulated:
        return ok(f"the simulated node has {counted(len(known.nodes), 'device node')}, and they are not opened")
    if not isinstance(facts.driver, Unknown) and facts.driver.platform != "nvml":
        return skipped("this platform has no device node for each GPU")
    if facts.no_gpu:
        return skipped(facts.no_gpu)
    if isinstance(facts.released, Unknown):
        return skipped("whether GPUs are released for maintenance is not known: their device nodes are not opened")
    if not known.nodes:
        return skipped("GPUs are released for maintenance: their device nodes are not opened")
    troubles: dict[Finding, list[str]] = {}  # device nodes of several GPUs often have the same problem
    for path, node in known.nodes.items():
        if (trouble := _trouble(node, known, facts)) is not None:
            troubles.setdefault(trouble, []).append(path)
    if troubles:
        return [replace(each, found=f"{', '.join(paths)}: {each.found}") for each, paths in troubles.items()]
    shared = [path for path, node in known.nodes.items() if node.there and path in _SHARED]
    gpus = len(known.nodes.keys() - _SHARED)
    of_gpus = f" and the device {'node' if gpus == 1 else 'nodes'} of {counted(gpus, 'GPU')}" if gpus else ""
    return ok(f"{', '.join(shared)}{of_gpus} can be opened")


def _trouble(node: DeviceNode, known: DeviceNodes, facts: Facts) -> Finding | None:
    if not node.there and node.error is None:
        return _missing(node)
    if node.why:
        return failed(f"opening it: {node.why}", "its GPU hangs: look for Xid lines in the kernel log")
    if node.major is None and node.there:
        return failed("is not a character device", f"remove it; {_MAKE}")
    if wrong := _wrong_number(node, known):
        return failed(wrong, f"remove it; {_MAKE}")
    return _closed(node, facts) if node.error else None


def _missing(node: DeviceNode) -> Finding | None:
    if node.path == "/dev/nvidia-uvm-tools":
        return None  # only profilers need it
    if node.path == "/dev/nvidia-uvm":
        return warning("does not exist; without it no CUDA program starts", f"modprobe nvidia-uvm on the node; {_MAKE}")
    return failed("does not exist", _MAKE)


def _wrong_number(node: DeviceNode, known: DeviceNodes) -> str:
    """Return words about a device number that is not the driver's; empty if it is right, or the driver's is not known."""
    if node.path in _UVM:
        major, minor = known.majors.get("nvidia-uvm"), 1 if node.path.endswith("-tools") else 0
    else:
        major = known.majors.get("nvidia-frontend", known.majors.get("nvidia", _FRONTEND))
        minor = _CTL if node.path == "/dev/nvidiactl" else int(node.path.removeprefix("/dev/nvidia"))
    if major is None or node.major is None or (node.major, node.minor) == (major, minor):
        return ""
    return f"is device {node.major}:{node.minor}, and the driver's is {major}:{minor}"


def _closed(node: DeviceNode, facts: Facts) -> Finding:
    """Return the finding of a failed open: EPERM is of the device cgroup, EACCES of modes or of SELinux and AppArmor."""
    reason = f"cannot be opened: {node.reason}"
    process = facts.process
    if node.error == errno.EPERM:
        return failed(
            f"{reason}: the device cgroup denies it",
            "run the container with NVIDIA's runtime, or privileged; if it could be opened before, systemd or the kubelet's "
            "CPU manager has rewritten its cgroup: restart the pod",
        )
    if node.error == errno.EACCES and not isinstance(process, Unknown) and process.uid != 0:
        return note(
            f"{reason} by uid {process.uid} (mode {node.mode:04o})", "run doctor as root to see what the daemon may do"
        )
    if node.error == errno.EACCES:
        confined = not isinstance(process, Unknown) and process.selinux == "enforcing"
        hint = (
            "SELinux is enforcing: ausearch -m avc -ts recent on the node"
            if confined
            else "AppArmor? See the kernel log"
        )
        return failed(f"{reason} (mode {node.mode:04o})", hint)
    if node.error in (errno.ENXIO, errno.ENODEV):
        return failed(
            f"{reason}: no GPU or module is behind it",
            "is the kernel module loaded, and the GPU on the bus? Look for NVRM lines in the kernel log",
        )
    return failed(reason, "look for NVRM and Xid lines in the kernel log: the driver could not initialise the GPU")
