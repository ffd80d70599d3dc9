"""Whether a kubelet takes registrations."""

from gpu_plugin.doctor.check import Finding, check, failed, note, ok, seen, warning
from gpu_plugin.doctor.facts import Facts

_FORBIDDEN = frozenset(("Permission denied", "Operation not permitted"))  # EACCES and EPERM in the system's words
_KUBELET = "kubelet"
_EMBEDDING = ("k3s", "rke2", "k0s", "microk8s", "kubelite", "hyperkube")
"""Programs of distributions that have the kubelet in them."""


@check("kubelet-socket")
def kubelet_socket(facts: Facts) -> Finding:
    """Fails where nobody answers on it as a gRPC server does."""
    if facts.kubelet_socket is None:
        return note("an empty --kubelet-socket: nothing is to be registered")
    remedy = (
        "the kubelet, or the directory that its socket lies in, hangs: see its log and the kernel log; restart the kubelet "
        "(systemctl restart kubelet)"
    )
    known = seen(facts.kubelet_socket, facts.settings.registration_socket, remedy, needed=True)
    if not known.there:
        return failed(
            f"there is no {known.path}",
            "is the kubelet running (systemctl status kubelet)? It makes the socket when it has started; or is "
            "--device-plugin-dir right?",
        )
    if not known.is_socket:
        return failed(f"{known.path} is not a socket", "remove it and restart the kubelet")
    if known.error in _FORBIDDEN:
        return failed(
            f"this process may not connect to {known.path}: {known.error}",
            "run as root, with the mode that the socket and its directories ask for (ls -l); as root, SELinux may be the reason "
            "(ausearch -m avc): give the container the type spc_t, or run it privileged",
        )
    if known.error:
        return failed(
            f"nobody can be reached at {known.path}: {known.error}",
            "restart the kubelet: an old one's socket is left behind",
        )
    who = f" by process {known.pid} ({known.program})" if known.pid else ""
    if not known.http2:
        return failed(f"{known.path} is answered{who}, and not as a kubelet does", "which program listens there?")
    if known.program and known.program != _KUBELET and not known.program.startswith(_EMBEDDING):
        return warning(
            f"{known.path} is answered{who}, which is not called kubelet",
            "where that is no kubelet of a distribution, find out why it listens there",
        )
    return ok(f"{known.path} is answered{who}")
