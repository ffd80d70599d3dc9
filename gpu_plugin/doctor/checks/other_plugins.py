"""Check for another plugin that serves GPUs on this node: the kubelet uses the plugin that registered a resource last."""

from pathlib import Path

from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, Unknown, note, ok, skipped, warning
from gpu_plugin.doctor.node import Node
from gpu_plugin.kubelet.socket import PREFIX
from gpu_plugin.runtime.peer import listening

_MAX_SOCKETS = 64  # that are reported

# The beginnings of socket names of NVIDIA's plugin (nvidia-gpu.sock, nvidia-mig-1g.10gb.sock) and of Google's
_NVIDIAS = ("nvidia-", "nvidia.")


def read_others(directory: str, registration: str) -> list[str]:
    """Return the sockets that accept connections, by name, without this plugin's and the kubelet's (`registration`).

    Raises OSError if the directory cannot be listed.
    """
    others: list[str] = []
    for path in sorted(Path(directory).iterdir()):
        ours = str(path) == registration or path.name.startswith(PREFIX) or path.name == "kubelet.sock"
        if not ours and len(others) < _MAX_SOCKETS and not path.is_symlink() and path.is_socket():
            others += [path.name] if listening(str(path)) else []
    return others


@check("other-plugins")
def other_plugins(node: Node) -> Finding:
    """Warn of sockets of NVIDIA's plugin that accept connections; note other sockets."""
    directory = node.settings.socket_dir
    others = node.known("other_plugins", read_others, directory, node.settings.registration_socket)
    if isinstance(others, Unknown):
        return skipped("the kubelet's directory cannot be listed")
    theirs = [name for name in others if name.lower().startswith(_NVIDIAS)]
    if theirs:
        return warning(
            f"another GPU plugin listens in {directory}: {', '.join(theirs)}",
            "a resource belongs to the plugin that registered last: remove one of the two from this node, or give them "
            "different resource names",
        )
    if others:
        return note(f"plugins of other resources listen there, too: {', '.join(others)}")
    return ok("no other plugin listens in the kubelet's directory")
