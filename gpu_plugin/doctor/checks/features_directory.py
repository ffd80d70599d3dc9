"""Check that the file of labels can be written where Node Feature Discovery reads it."""

from gpu_plugin.doctor.check import Finding, check, ok, seen, skipped, warning
from gpu_plugin.doctor.facts import Facts


@check("features-directory")
def features_directory(facts: Facts) -> Finding:
    """Warn if --node-labels is file and the directory is missing or not writable."""
    if facts.settings.node_labels != "file":
        return skipped("--node-labels is not file")
    known = seen(facts.features, facts.settings.features_dir)
    if known.error or not known.there or not known.is_directory:
        return warning(
            f"{known.path}: {known.error or 'there is no such directory'}: the Node gets no labels",
            "run Node Feature Discovery's worker on this node, and mount its features.d here; or is --features-dir right?",
        )
    if known.read_only or not known.writable:
        return warning(
            f"{known.path} cannot be written: the Node gets no labels", "mount it read-write, and run as root"
        )
    return ok(f"{known.path} can be written")
