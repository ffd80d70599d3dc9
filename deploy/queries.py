"""What the panels of the dashboard ask: PromQL with the dashboard's variables in it."""

NODES = 'cluster=~"$cluster", node=~"$node"'
GPUS = f'{NODES}, uuid=~"$gpu"'
NODE = "cluster, node"
GPU = f"{NODE}, index, uuid"
POD = "cluster, namespace, pod"


def each(metric: str, selector: str, by: str = GPU) -> str:
    """A metric by these labels alone: a plugin that was restarted has other labels, and its series overlap for a moment."""
    return f"max by ({by}) ({metric}{{{selector}}})"


def health(state: str, selector: str = GPUS) -> str:
    """1 where a GPU is in this state, else 0."""
    return each("gpu_plugin_gpu_health", f'{selector}, state="{state}"')


def of_pods(reading: str, by: str = POD, how: str = "avg") -> str:
    """A reading of the GPUs that a pod holds."""
    held = each("gpu_plugin_pod_device", GPUS, "cluster, node, namespace, pod, container, uuid")
    return f"{how} by ({by}) ({held} * on ({NODE}, uuid) group_left () {each(reading, GPUS, f'{NODE}, uuid')})"


def late(metric: str, by: str, quantile: float = 0.99) -> str:
    """A quantile of a histogram over the interval of the graph."""
    rates = f"rate({metric}_bucket{{{NODES}}}[$__rate_interval])"
    return f"histogram_quantile({quantile}, sum by ({by}, le) ({rates}))"


def rate(metric: str, by: str, selector: str = NODES) -> str:
    """How often a second, by these labels."""
    return f"sum by ({by}) (rate({metric}{{{selector}}}[$__rate_interval]))"


def increase(metric: str, by: str) -> str:
    """How much it grew over the interval of the graph, by these labels."""
    return f"sum by ({by}) (increase({metric}{{{NODES}}}[$__rate_interval]))"


INFO = each("gpu_plugin_gpu_info", GPUS, f"{NODE}, uuid, model, pci_bus_id")
