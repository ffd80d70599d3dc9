"""Check that a kubelet accepts registrations."""

from gpu_plugin.doctor.check import Finding, check, failed, note, ok, seen, warning
from gpu_plugin.doctor.facts import Facts

_FORBIDDEN = frozenset(("Permission denied", "Operation not permitted"))  # EACCES and EPERM in the system's words
_KUBELET = "kubelet"
_EMBEDDING = ("k3s", "rke2", "k0s", "microk8s", "kubelite", "hyperkube")
"""Programs of distributions that contain the kubelet."""


@check("kubelet-socket")
def kubelet_socket(facts: Facts) -> Finding:
    """Fail if no server answers on the kubelet's socket as a gRPC server does."""
    if facts.kubelet_socket is None:
        return note("--kubelet-socket is empty: the daemon registers nothing")
    remedy = (
        "the kubelet, or the directory of its socket, hangs: see its log and the kernel log; restart the kubelet "
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
            "run as root, and see the modes of the socket and its directories (ls -l); as root, SELinux may be the reason "
            "(ausearch -m avc): give the container the type spc_t, or run it privileged",
        )
    if known.error:
        return failed(
            f"no connection to {known.path}: {known.error}",
            "restart the kubelet: this is the socket of a kubelet that ended",
        )
    who = f" by process {known.pid} ({known.program})" if known.pid else ""
    if not known.http2:
        return failed(f"{known.path} is answered{who}, but not as a kubelet does", "which program listens there?")
    if known.program and known.program != _KUBELET and not known.program.startswith(_EMBEDDING):
        return warning(
            f"{known.path} is answered{who}, which is not called kubelet",
            "unless that is the kubelet of a distribution, find out why it listens there",
        )
    return ok(f"{known.path} is answered{who}")
