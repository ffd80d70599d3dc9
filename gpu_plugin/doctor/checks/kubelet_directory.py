"""Check that the kubelet's directory of device plugins exists and is writable."""

from gpu_plugin.doctor.check import Finding, check, failed, note, ok, seen
from gpu_plugin.doctor.facts import Facts, Unknown


@check("kubelet-directory")
def kubelet_directory(facts: Facts) -> Finding:
    """Fail if the directory is missing, was removed while mounted, or is not writable."""
    known = seen(facts.kubelet_directory, facts.settings.socket_dir, needed=True)
    directory = known.directory
    path = directory.path
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
        uid = facts.process.uid if not isinstance(facts.process, Unknown) else 0
        if uid:
            return note(f"{path} cannot be written by uid {uid}", "run doctor as root to see what the daemon may do")
        return failed(
            f"{path} cannot be written, even by root", "SELinux or AppArmor? See the node's audit log (ausearch -m avc)"
        )
    if not known.checkpoint:
        return note(
            f"{path} can be written, but has no kubelet_internal_checkpoint: no kubelet has ever used it",
            "if a kubelet runs on this node, is --device-plugin-dir its directory? Kubelets use "
            "/var/lib/kubelet/device-plugins, whatever their --root-dir",
        )
    return ok(f"{path} is the kubelet's, and can be written")
