"""Check that the health and the cordons of GPUs can be stored, and outlive a restart and a boot."""

from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.directory import read_directory, unwritable_by
from gpu_plugin.doctor.finding import Finding, failed, note, ok, seen, warning
from gpu_plugin.doctor.node import Node

# The files take at most some 20 MiB and a dozen inodes, including the copies while they are replaced
_ENOUGH_BYTES = 64 * 1024 * 1024
_ENOUGH_INODES = 64

_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_KEPT = "the health of GPUs, including cordons, is lost with"


@check("state-directory")
def state_directory(node: Node) -> Finding | list[Finding]:
    """Fail if the directory is not writable; warn if it is nearly full, does not last, or other users may write there."""
    path = node.settings.state_dir
    known = seen(node.known("state", read_directory, path, node.root), path, needed=True)
    uid = node.uid()
    if known.error:
        if uid:
            return note(f"{path}: {known.error}", "run doctor as root to see it")
        return failed(f"{path}: {known.error}", "is the file system below it in order? See the kernel log")
    if known.there and not known.is_directory:
        return failed(f"{path} is not a directory", "is --state-dir right?")
    if known.read_only:
        return failed(
            f"{path} is on a file system that is read-only: {_KEPT} the daemon",
            "remount it, or name another --state-dir",
        )
    if not known.writable:
        if uid:
            return unwritable_by(uid, path)
        return failed(
            f"{path} cannot be written, even by root: {_KEPT} the daemon", "SELinux or AppArmor? See the audit log"
        )
    found = []
    if 0 <= known.free_bytes < _ENOUGH_BYTES or 0 <= known.free_inodes < _ENOUGH_INODES:
        left = f"{known.free_bytes // (1024 * 1024)} MiB"
        left += f" and {known.free_inodes} files" if known.free_inodes >= 0 else ""
        empty = not known.free_bytes or not known.free_inodes
        make = failed if empty else warning
        found.append(
            make(f"{path}: {left} are left on {known.mount} ({known.filesystem})", f"make room on {known.mount}")
        )
    if known.filesystem in _IN_MEMORY:
        found.append(
            warning(
                f"{path} is on {known.filesystem} ({known.mount}): {_KEPT} the next boot",
                "name a --state-dir on a disk",
            )
        )
    elif known.filesystem == "overlay" and node.contained():
        found.append(
            warning(
                f"{path} is part of this container's own file system: {_KEPT} the container",
                "mount a directory of the node there (a hostPath volume)",
            )
        )
    if known.there and known.mode & 0o022:
        found.append(
            warning(
                f"{path} has the mode {known.mode:04o}: other users than its owner can change the stored health and the orders "
                "that the daemon obeys",
                f"chmod go-w {path}",
            )
        )
    if found:
        return found
    made = "" if known.there else ", once it is made"
    room = f", {known.free_bytes // (1024 * 1024)} MiB free" if known.free_bytes >= 0 else ""
    return ok(f"{path} can be written{made}: {known.filesystem or 'a file system'} on {known.mount or '/'}{room}")
