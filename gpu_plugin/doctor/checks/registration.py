"""Check that the kubelet has the resources: the registrations of a running daemon, and the devices of the kubelet."""

from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, Known, Unknown, failed, note, ok, skipped, warning
from gpu_plugin.doctor.node import Node
from gpu_plugin.doctor.pod_resources import PodResources

_REMEDY = "is the kubelet running, and is --device-plugin-dir right? If it refused, its log has the reason"


@check("registration")
def registration(node: Node) -> Finding | list[Finding]:
    """Fail with each unregistered resource; warn of a resource without a healthy device at the kubelet."""
    daemon, pods = node.daemon(), node.pod_resources()
    if isinstance(daemon, Unknown) and daemon.hung:
        return skipped(
            "the daemon hangs, so it does not report this; pods that ask for its devices wait for its answer"
        )
    if isinstance(daemon, Unknown) or daemon.status is None:
        return _without_daemon(pods)
    served = daemon.status.resources
    if not daemon.status.kubelet.socket:
        return note("nothing is registered, because --kubelet-socket is empty")
    if not served and (reason := node.no_gpu()):
        return note(f"{reason}, so nothing is registered")
    if not served:
        return failed("the daemon serves no resource, so nothing is registered", "see `driver` and `daemon` above")
    healthy = None if isinstance(pods, Unknown) or pods.trouble else pods.healthy
    found = []
    for name, each in served.items():
        if not each.registration.registered:
            found.append(failed(f"{name} is not registered: {each.registration.why}", _REMEDY))
        elif healthy is not None and each.healthy and not healthy.get(name):
            found.append(
                warning(
                    f"{name} is registered, but the kubelet has no healthy device of it",
                    "run doctor again; if it stays so, another plugin may serve this resource: see `other-plugins`",
                )
            )
    return found or ok(f"the kubelet has {', '.join(served)}")


def _without_daemon(pods: Known[PodResources]) -> Finding:
    """Return a finding with the healthy devices that the kubelet has of any plugin."""
    if not isinstance(pods, Unknown) and pods.healthy:
        has = ", ".join(f"{count} of {name}" for name, count in sorted(pods.healthy.items()))
        return note(
            f"no daemon answers; the kubelet has healthy devices of other plugins, or of a former daemon: {has}"
        )
    return skipped("no daemon answers, so nothing is registered")
