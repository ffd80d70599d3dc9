"""Check for another plugin that serves GPUs on this node: the kubelet uses the plugin that registered a resource last."""

from gpu_plugin.doctor.check import Finding, check, note, ok, skipped, warning
from gpu_plugin.doctor.facts import Facts, Unknown

_NVIDIAS = ("nvidia-", "nvidia.")
"""The beginnings of socket names of NVIDIA's plugin (nvidia-gpu.sock, nvidia-mig-1g.10gb.sock) and of Google's."""


@check("other-plugins")
def other_plugins(facts: Facts) -> Finding:
    """Warn of sockets of NVIDIA's plugin that accept connections; note other sockets."""
    known = facts.kubelet_directory
    if isinstance(known, Unknown) or not known.directory.is_directory:
        return skipped("the kubelet's directory cannot be listed")
    theirs = [name for name in known.others if name.lower().startswith(_NVIDIAS)]
    if theirs:
        return warning(
            f"another GPU plugin listens in {known.directory.path}: {', '.join(theirs)}",
            "a resource belongs to the plugin that registered last: remove one of the two from this node, or give them "
            "different resource names",
        )
    if known.others:
        return note(f"plugins of other resources listen there, too: {', '.join(known.others)}")
    return ok("no other plugin listens in the kubelet's directory")
