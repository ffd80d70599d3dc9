"""Check whether SELinux or AppArmor may deny this process's access."""

from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, note, ok, seen
from gpu_plugin.doctor.node import Node

# SELinux types of plain containers, which may use neither the kubelet's sockets nor GPUs' device nodes
_CONTAINER_TYPES = ("container_t", "svirt_lxc_net_t")


@check("security-modules")
def security_modules(node: Node) -> Finding:
    """Note an enforcing SELinux with the label of a plain container."""
    known = seen(node.process(), "this process")
    label = known.label or "none"
    if known.selinux == "enforcing":
        parts = known.label.split(":")
        if len(parts) > 2 and parts[2] in _CONTAINER_TYPES:
            return note(
                f"SELinux is enforcing, and this process is {label}: its policy may deny the kubelet's sockets and device "
                "nodes",
                "if something above is denied to root: ausearch -m avc -ts recent on the node; setsebool -P "
                "container_use_devices 1, or privileged",
            )
        return ok(f"SELinux is enforcing; this process is {label}")
    if known.selinux:
        return ok("SELinux is permissive: it denies nothing")
    if known.label and known.label != "unconfined":
        return ok(f"AppArmor: this process is under {label}")
    return ok("neither SELinux nor AppArmor confines this process")
