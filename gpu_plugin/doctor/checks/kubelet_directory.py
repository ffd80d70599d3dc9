"""Check that the kubelet's directory of device plugins exists and is writable."""

from pathlib import Path

from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.directory import Directory, read_directory, unwritable_by
from gpu_plugin.doctor.finding import Finding, failed, note, ok, seen
from gpu_plugin.doctor.node import Node
from gpu_plugin.kubelet import checkpoint


def read_kubelet_directory(path: str, root: Path) -> tuple[Directory, bool]:
    """Return the directory, and whether it has the kubelet's checkpoint file."""
    directory = read_directory(path, root)
    return directory, directory.writable and Path(path, checkpoint.NAME).exists()


@check("kubelet-directory")
def kubelet_directory(node: Node) -> Finding:
    """Fail if the directory is missing, was removed while mounted, or is not writable."""
    path = node.settings.socket_dir
    directory, used = seen(node.known("kubelet_directory", read_kubelet_directory, path, node.root), path, needed=True)
    if directory.error:
        return failed(f"{path}: {directory.error}", "run as root; is the file system below it in order?")
    if not directory.there:
        return failed(
            f"there is no directory {path}",
            "start the kubelet, which makes it; in a container mount it from the node; or is --device-plugin-dir right?",
        )
    if not directory.is_directory:
        return failed(f"{path} is not a directory", "is --device-plugin-dir right?")
    if directory.removed:
        return failed(
            f"{path} was removed on the node, and what is mounted here is only what is left of it",
            "delete this pod, or restart the unit, so that the new directory is mounted",
        )
    if directory.read_only:
        return failed(f"{path} is mounted read-only", "mount it read-write: the plugin's sockets are made there")
    if not directory.writable:
        if uid := node.uid():
            return unwritable_by(uid, path)
        return failed(
            f"{path} cannot be written, even by root", "SELinux or AppArmor? See the node's audit log (ausearch -m avc)"
        )
    if not used:
        return note(
            f"{path} can be written, but has no {checkpoint.NAME}: no kubelet has ever used it",
            "if a kubelet runs on this node, is --device-plugin-dir its directory? Kubelets use "
            "/var/lib/kubelet/device-plugins, whatever their --root-dir",
        )
    return ok(f"{path} is the kubelet's, and can be written")
