"""Check that kubelet and container runtime support the device list strategy."""

from gpu_plugin.config.values import AUTO
from gpu_plugin.containers.edits import is_cdi
from gpu_plugin.containers.strategy_choice import choose
from gpu_plugin.doctor.check import check
from gpu_plugin.doctor.finding import Finding, note, ok, seen, skipped, warning
from gpu_plugin.doctor.node import Node

_ENABLE = (
    "see docs/containers.md: containerd before 2.0 needs enable_cdi = true in its CRI plugin's section, the kubelet the feature "
    "gate DevicePluginCDIDevices before 1.29; or use --device-list-strategy envvar with NVIDIA's container runtime"
)


@check("container-runtime")
def container_runtime(node: Node) -> Finding:
    """Warn if CDI is configured and the node's files do not show support for it. Report the strategy that `auto` chooses."""
    strategies = node.settings.device_list_strategy
    evidence = seen(node.evidence(), "the files of kubelet and container runtime")
    choice = choose(evidence, node.settings.cdi_dir)
    takes_cdi = choice.strategy == "cdi-cri"
    asked = ", ".join(strategies)
    if AUTO in strategies:
        return ok(f"{asked} chooses {choice.strategy}: {choice.reason}")
    if any(map(is_cdi, strategies)):
        if takes_cdi:
            return ok(f"{asked}: {choice.reason}")
        if evidence.trouble:
            return skipped(f"{asked}: whether the runtime supports CDI names is not known: {evidence.trouble}")
        if strategies == ("cdi-annotations",):
            return note(
                f"{asked}: the runtime must read CDI annotations; for CDI names of the kubelet: {choice.reason}"
            )
        return warning(f"{asked} is configured, and CDI is not known to work here: {choice.reason}", _ENABLE)
    if takes_cdi:
        return ok(f"{asked}, which needs NVIDIA's container runtime; cdi-cri would work, too: {choice.reason}")
    return ok(f"{asked}, which needs NVIDIA's container runtime; CDI is not known to work here: {choice.reason}")
