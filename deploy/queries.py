"""PromQL queries of the dashboard's panels. They contain the dashboard's variables."""

NODES = 'cluster=~"$cluster", node=~"$node"'
GPUS = f'{NODES}, uuid=~"$gpu"'
NODE = "cluster, node"
GPU = f"{NODE}, index, uuid"
POD = "cluster, namespace, pod"


def each(metric: str, selector: str, by: str = GPU) -> str:
    """Return a query for the maximum of a metric by the labels `by`.

    A restarted plugin has other labels, and its new series overlap the old series for a moment. The maximum merges them.
    """
    return f"max by ({by}) ({metric}{{{selector}}})"


def health(state: str, selector: str = GPUS) -> str:
    """Return a query that is 1 for each GPU in this state, else 0."""
    return each("gpu_plugin_gpu_health", f'{selector}, state="{state}"')


def of_pods(reading: str, by: str = POD, how: str = "avg") -> str:
    """Return a query for a reading of the GPUs that a pod holds, aggregated with `how`."""
    held = each("gpu_plugin_pod_device", GPUS, "cluster, node, namespace, pod, container, uuid")
    return f"{how} by ({by}) ({held} * on ({NODE}, uuid) group_left () {each(reading, GPUS, f'{NODE}, uuid')})"


def late(metric: str, by: str, quantile: float = 0.99) -> str:
    """Return a query for a quantile of a histogram over the graph's rate interval."""
    rates = f"rate({metric}_bucket{{{NODES}}}[$__rate_interval])"
    return f"histogram_quantile({quantile}, sum by ({by}, le) ({rates}))"


def rate(metric: str, by: str, selector: str = NODES) -> str:
    """Return a query for the rate of a counter per second, summed by the labels `by`."""
    return f"sum by ({by}) (rate({metric}{{{selector}}}[$__rate_interval]))"


def increase(metric: str, by: str) -> str:
    """Return a query for the increase of a counter over the graph's rate interval, summed by the labels `by`."""
    return f"sum by ({by}) (increase({metric}{{{NODES}}}[$__rate_interval]))"


INFO = each("gpu_plugin_gpu_info", GPUS, f"{NODE}, uuid, model, pci_bus_id")
