"""Check that the kubelet's PodResources service reports the devices of pods."""

from gpu_plugin.config.words import counted
from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, ok, seen, warning
from gpu_plugin.doctor.node import Node

# Seconds after which an answer is slow. The plugin waits for at most five seconds, and needs an answer after each change.
SLOW = 1.0


@check("pod-resources")
def pod_resources(node: Node) -> Finding:
    """Warn if the service does not answer, or slowly. GPUs are served nevertheless, but stay allocated longer than needed."""
    known = seen(node.pod_resources(), node.settings.effective_pod_resources_socket)
    without = "without it the devices of pods are not known: metrics name no pods, and devices that are gone stay listed longer"
    if known.absent:
        return warning(
            f"there is no {known.path}; {without}",
            "in a container mount the kubelet's directory pod-resources (the directory, not the socket); or is "
            "--pod-resources-socket right?",
        )
    if known.trouble:
        return warning(f"{known.trouble}; {without}", "is the kubelet overloaded or restarting? Its log says more")
    took = f"{known.path} answers in {known.seconds * 1000:.0f} ms"
    if known.seconds > SLOW:
        return warning(took, "the kubelet is slow: look at its load, and at the number of pods and plugins")
    return ok(f"{took}; pods hold {counted(known.allocated, 'device')} of any kind")
