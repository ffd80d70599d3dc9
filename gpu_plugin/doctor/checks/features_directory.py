"""Check that the file of labels can be written where Node Feature Discovery reads it."""

from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.directory import read_directory
from gpu_plugin.doctor.finding import Finding, ok, seen, skipped, warning
from gpu_plugin.doctor.node import Node


@check("features-directory")
def features_directory(node: Node) -> Finding:
    """Warn if --node-labels is file and the directory is missing or not writable."""
    if node.settings.node_labels != "file":
        return skipped("--node-labels is not file")
    path = node.settings.features_dir
    known = seen(node.known("features", read_directory, path, node.root), path)
    if known.error or not known.there or not known.is_directory:
        return warning(
            f"{path}: {known.error or 'there is no such directory'}: the Node gets no labels",
            "run Node Feature Discovery's worker on this node, and mount its features.d here; or is --features-dir right?",
        )
    if known.read_only or not known.writable:
        return warning(f"{path} cannot be written: the Node gets no labels", "mount it read-write, and run as root")
    return ok(f"{path} can be written")
