"""The Grafana dashboard of the chart: what each panel asks and shows. `deploy/generate.py` writes it."""

from collections.abc import Mapping
from typing import Any

from deploy import grafana
from deploy.grafana import BLUE, GREEN, RED, YELLOW, Json, Query, Row, Show

UID = "gpu-plugin"

NODES = 'cluster=~"$cluster", node=~"$node"'
GPUS = f'{NODES}, uuid=~"$gpu"'
NODE = "cluster, node"
GPU = f"{NODE}, index, uuid"
POD = "cluster, namespace, pod"

ATTENTION = ((None, GREEN), (1, YELLOW))
ALARM = ((None, GREEN), (1, RED))


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


def _number(title: str, expr: str, description: str, **more: Any) -> Show:
    return Show(title, [Query(expr, instant=True)], description, **{"kind": "stat", "width": 3, "height": 4, **more})


VERDICTS = {"0": ("fine", GREEN), "1": ("application", BLUE), "2": ("degraded", YELLOW), "3": ("fatal", RED)}
STATES = {"0": ("Healthy", GREEN), "1": ("Degraded", YELLOW), "2": ("Unhealthy", RED)}
INFO = each("gpu_plugin_gpu_info", GPUS, f"{NODE}, uuid, model, pci_bus_id")

FLEET = Row(
    "Fleet",
    [
        _number("Nodes", f"count({each('gpu_plugin_build_info', NODES, NODE)})", "Nodes whose plugin answers."),
        _number("GPUs", f"count({each('gpu_plugin_gpu_info', GPUS)})", "GPUs that plugins know of."),
        _number(
            "Unhealthy",
            f"sum({health('unhealthy')})",
            "GPUs that are not given to new pods.",
            thresholds=ALARM,
        ),
        _number("Degraded", f"sum({health('degraded')})", "GPUs that work, with a fault.", thresholds=ATTENTION),
        _number(
            "Nodes without driver",
            f"count({each('gpu_plugin_driver_up', NODES, NODE)} == 0) or vector(0)",
            "Nodes none of whose GPUs can be reached through the driver.",
            thresholds=ALARM,
        ),
        _number(
            "Not registered",
            f"count({each('gpu_plugin_registered', NODES, f'{NODE}, resource')} == 0) or vector(0)",
            "Resources of nodes that the kubelet is not told of.",
            thresholds=ALARM,
        ),
        _number(
            "Devices held",
            f"count({each('gpu_plugin_pod_device', NODES, f'{NODE}, resource, device')}) or vector(0)",
            "Devices that containers hold: GPUs, MIG devices and replicas.",
        ),
        _number("Power", f"sum({each('gpu_plugin_gpu_power_watts', GPUS)})", "What all these GPUs draw.", unit="watt"),
        Show(
            "GPUs that need attention",
            [
                Query(
                    f"({each('gpu_plugin_gpu_signal_verdict', GPUS, f'{GPU}, signal')} >= 2)"
                    f" * on ({NODE}, uuid) group_left (model, pci_bus_id) {INFO}",
                    instant=True,
                )
            ],
            "Which GPU, and what is held against it. gpu-plugin explain on the node says what clears it.",
            kind="table",
            width=14,
            mappings=VERDICTS,
            columns={
                "Value": "verdict",
                "signal": "signal",
                "node": "node",
                "index": "GPU",
                "model": "model",
                "pci_bus_id": "bus id",
                "uuid": "uuid",
                "cluster": "cluster",
            },
        ),
        Show(
            "Pods on Unhealthy GPUs",
            [
                Query(
                    f"{each('gpu_plugin_pod_device', GPUS, f'{GPU}, namespace, pod, container')}"
                    f" and on ({NODE}, uuid) ({health('unhealthy')} == 1)",
                    instant=True,
                )
            ],
            "Whom it hits.",
            kind="table",
            width=10,
            columns={
                "namespace": "namespace",
                "pod": "pod",
                "container": "container",
                "node": "node",
                "index": "GPU",
                "cluster": "cluster",
            },
        ),
        Show(
            "GPUs by health",
            [Query(f"sum by (state) ({each('gpu_plugin_gpu_health', GPUS, f'{GPU}, state')})", "{{state}}")],
            "How many GPUs are in each state.",
            stacked=True,
        ),
        Show(
            "Devices by resource",
            [
                Query(
                    f"sum by (resource, state) ({each('gpu_plugin_devices', NODES, f'{NODE}, resource, state')})",
                    "{{resource}} {{state}}",
                )
            ],
            "What is offered to kubelets. Retired devices are gone, and a pod may hold them still.",
            stacked=True,
        ),
        Show(
            "Xids",
            [
                Query(
                    f"sum by (xid, class) (increase(gpu_plugin_xid_errors_total{{{GPUS}}}[1h])) > 0",
                    "Xid {{xid}} ({{class}})",
                )
            ],
            "Xid errors within an hour, by number and by what they ask for.",
        ),
    ],
)

PER_NODE = Row(
    "Nodes",
    [
        Show(
            "Nodes",
            [
                Query(f"count by ({NODE}) ({each('gpu_plugin_gpu_info', GPUS)})", instant=True),
                Query(f"sum by ({NODE}) ({health('unhealthy')})", instant=True),
                Query(f"sum by ({NODE}) ({health('degraded')})", instant=True),
                Query(each("gpu_plugin_driver_up", NODES, NODE), instant=True),
                Query(f"min by ({NODE}) (gpu_plugin_registered{{{NODES}}})", instant=True),
                Query(each("gpu_plugin_state_written", NODES, NODE), instant=True),
                Query(f"avg by ({NODE}) ({each('gpu_plugin_gpu_utilization_ratio', GPUS)})", instant=True),
                Query(f"max by ({NODE}) ({each('gpu_plugin_gpu_temperature_celsius', GPUS)})", instant=True),
            ],
            "One line a node.",
            kind="table",
            width=24,
            columns={
                "cluster": "cluster",
                "node": "node",
                "Value #A": "GPUs",
                "Value #B": "Unhealthy",
                "Value #C": "Degraded",
                "Value #D": "driver",
                "Value #E": "registered",
                "Value #F": "state written",
                "Value #G": "utilization",
                "Value #H": "hottest",
            },
            units={"utilization": "percentunit", "hottest": "celsius"},
        ),
        Show(
            "Utilization by node",
            [Query(f"avg by ({NODE}) ({each('gpu_plugin_gpu_utilization_ratio', GPUS)})", "{{node}}")],
            "Mean over the node's GPUs that are not in MIG mode.",
            unit="percentunit",
            top=1,
        ),
        Show(
            "Power by node",
            [Query(f"sum by ({NODE}) ({each('gpu_plugin_gpu_power_watts', GPUS)})", "{{node}}")],
            "What the node's GPUs draw.",
            unit="watt",
        ),
        Show(
            "Allocations by node",
            [
                Query(
                    f"sum by ({NODE}, resource) (increase(gpu_plugin_allocated_devices_total{{{NODES}}}[$__rate_interval]))",
                    "{{node}} {{resource}}",
                )
            ],
            "Devices given to containers.",
        ),
    ],
)

PER_GPU = Row(
    "GPUs",
    [
        Show(
            "Health",
            [Query(f"{health('degraded')} + 2 * {health('unhealthy')}", "{{node}} {{index}}")],
            "The state of each GPU over time.",
            kind="state-timeline",
            width=12,
            mappings=STATES,
        ),
        Show(
            "Signals",
            [
                Query(
                    f"{each('gpu_plugin_gpu_signal_verdict', GPUS, f'{GPU}, signal')} > 0",
                    "{{node}} {{index}} {{signal}}",
                )
            ],
            "What is held against each GPU over time.",
            kind="state-timeline",
            width=12,
            mappings=VERDICTS,
        ),
        Show(
            "Temperature",
            [
                Query(each("gpu_plugin_gpu_temperature_celsius", GPUS), "{{node}} {{index}}"),
                Query(each("gpu_plugin_gpu_memory_temperature_celsius", GPUS), "{{node}} {{index}} memory"),
            ],
            "Temperature of GPU and memory.",
            unit="celsius",
        ),
        Show(
            "Margin to slowdown",
            [
                Query(
                    each("gpu_plugin_gpu_temperature_threshold_celsius", f'{GPUS}, threshold="slowdown"')
                    + f" - {each('gpu_plugin_gpu_temperature_celsius', GPUS)}",
                    "{{node}} {{index}}",
                ),
                Query(each("gpu_plugin_gpu_temperature_margin_celsius", GPUS), "{{node}} {{index}} T.Limit"),
            ],
            "How much hotter a GPU may get before it slows down: to its slowdown threshold, and to its T.Limit where it has one.",
            unit="celsius",
            below_zero=True,
        ),
        Show(
            "Power",
            [
                Query(each("gpu_plugin_gpu_power_watts", GPUS), "{{node}} {{index}}"),
                Query(f"max({each('gpu_plugin_gpu_power_limit_watts', GPUS)})", "highest limit"),
            ],
            "Power draw, beside the highest limit in force.",
            unit="watt",
        ),
        Show(
            "Utilization",
            [Query(each("gpu_plugin_gpu_utilization_ratio", GPUS), "{{node}} {{index}}")],
            "Share of time in which a kernel ran. A GPU in MIG mode has none.",
            unit="percentunit",
            top=1,
        ),
        Show(
            "Memory in use",
            [
                Query(
                    f"{each('gpu_plugin_gpu_memory_used_bytes', GPUS)} / {each('gpu_plugin_gpu_memory_total_bytes', GPUS)}",
                    "{{node}} {{index}}",
                )
            ],
            "Share of the GPU's memory.",
            unit="percentunit",
            top=1,
        ),
        Show(
            "Clocks held down",
            [
                Query(
                    f"{each('gpu_plugin_gpu_clocks_event', GPUS, f'{GPU}, reason')} > 0",
                    "{{node}} {{index}} {{reason}}",
                )
            ],
            "What holds a GPU's clocks down now.",
        ),
        Show(
            "Memory errors",
            [
                Query(rate("gpu_plugin_gpu_ecc_uncorrected_errors_total", GPU, GPUS), "{{node}} {{index}} uncorrected"),
                Query(rate("gpu_plugin_gpu_ecc_corrected_errors_total", GPU, GPUS), "{{node}} {{index}} corrected"),
            ],
            "ECC errors a second.",
        ),
        Show(
            "Remapped rows",
            [
                Query(
                    f"{each('gpu_plugin_gpu_remapped_rows', GPUS, f'{GPU}, cause')} > 0", "{{node}} {{index}} {{cause}}"
                ),
                Query(f"{each('gpu_plugin_gpu_row_remap_pending', GPUS)} > 0", "{{node}} {{index}} pending"),
                Query(f"{each('gpu_plugin_gpu_row_remap_failure', GPUS)} > 0", "{{node}} {{index}} failed"),
            ],
            "Memory rows that were remapped in the life of the part; those that wait for a reset, and those that failed.",
        ),
        Show(
            "NVLinks that are down",
            [
                Query(
                    each("gpu_plugin_gpu_nvlinks", f'{GPUS}, state="inactive"'),
                    "{{node}} {{index}}",
                ),
                Query(rate("gpu_plugin_gpu_nvlink_crc_errors_total", GPU, GPUS), "{{node}} {{index}} CRC errors/s"),
                Query(
                    rate("gpu_plugin_gpu_nvlink_failed_recoveries_total", GPU, GPUS),
                    "{{node}} {{index}} failed recoveries/s",
                ),
            ],
            "Links that are not active, and errors on those that are.",
        ),
        Show(
            "PCIe",
            [
                Query(
                    f"{each('gpu_plugin_gpu_pcie_link_lanes', GPUS)} / {each('gpu_plugin_gpu_pcie_link_max_lanes', GPUS)}",
                    "{{node}} {{index}} lanes in use",
                ),
                Query(rate("gpu_plugin_gpu_pcie_replays_total", GPU, GPUS), "{{node}} {{index}} replays/s"),
            ],
            "Share of its lanes that a GPU's link uses, and packets that were sent again.",
        ),
    ],
    open=False,
)

PER_POD = Row(
    "Pods",
    [
        Show(
            "Devices by pod",
            [
                Query(
                    each("gpu_plugin_pod_device", GPUS, f"{GPU}, namespace, pod, container, resource, device"),
                    instant=True,
                )
            ],
            "Which container holds which device.",
            kind="table",
            width=24,
            columns={
                "namespace": "namespace",
                "pod": "pod",
                "container": "container",
                "node": "node",
                "index": "GPU",
                "resource": "resource",
                "device": "device",
                "cluster": "cluster",
            },
        ),
        Show(
            "Utilization by pod",
            [Query(of_pods("gpu_plugin_gpu_utilization_ratio"), "{{namespace}}/{{pod}}")],
            "Mean over the GPUs that the pod holds. A shared GPU counts whole for each of its pods.",
            unit="percentunit",
            top=1,
        ),
        Show(
            "Memory by pod",
            [Query(of_pods("gpu_plugin_gpu_memory_used_bytes", how="sum"), "{{namespace}}/{{pod}}")],
            "Memory in use on the GPUs that the pod holds, whoever uses it.",
            unit="bytes",
        ),
        Show(
            "Power by pod",
            [Query(of_pods("gpu_plugin_gpu_power_watts", how="sum"), "{{namespace}}/{{pod}}")],
            "What the GPUs draw that the pod holds.",
            unit="watt",
        ),
        Show(
            "GPUs that are held and idle",
            [
                Query(
                    f"{each('gpu_plugin_pod_device', GPUS, f'{GPU}, namespace, pod, container')}"
                    f" and on ({NODE}, uuid) (max by ({NODE}, uuid)"
                    f" (max_over_time(gpu_plugin_gpu_utilization_ratio{{{GPUS}}}[1h])) < 0.01)",
                    instant=True,
                )
            ],
            "Pods whose GPU had nothing to do for an hour.",
            kind="table",
            width=24,
            columns={
                "namespace": "namespace",
                "pod": "pod",
                "container": "container",
                "node": "node",
                "index": "GPU",
                "cluster": "cluster",
            },
        ),
    ],
    open=False,
)

PLUGIN = Row(
    "The plugin",
    [
        Show(
            "Versions",
            [Query(f"count by (version) ({each('gpu_plugin_build_info', NODES, f'{NODE}, version')})", "{{version}}")],
            "Nodes by the version that runs.",
            width=6,
            stacked=True,
        ),
        Show(
            "Time to answer the kubelet (p99)",
            [Query(late("gpu_plugin_rpc_duration_seconds", "method"), "{{method}}")],
            "99 of 100 requests are answered within this time.",
            width=6,
            unit="s",
        ),
        Show(
            "Requests refused",
            [Query(rate("gpu_plugin_rpc_errors_total", f"{NODE}, method, code"), "{{node}} {{method}} {{code}}")],
            "Requests of the kubelet that were refused or failed, a second.",
            width=6,
            unit="reqps",
        ),
        Show(
            "Registrations",
            [
                Query(
                    f"sum by (result) (increase(gpu_plugin_registrations_total{{{NODES}}}[$__rate_interval]))",
                    "{{result}}",
                )
            ],
            "Attempts to register with a kubelet.",
            width=6,
        ),
        Show(
            "ListAndWatch streams",
            [Query(each("gpu_plugin_list_streams", NODES, f"{NODE}, resource"), "{{node}} {{resource}}")],
            "Streams of the kubelet that are open: 1 for each resource is right.",
            width=6,
        ),
        Show(
            "Lists sent",
            [Query(rate("gpu_plugin_lists_sent_total", f"{NODE}, resource"), "{{node}} {{resource}}")],
            "Lists of devices, a second.",
            width=6,
        ),
        Show(
            "Event loop late by (p99)",
            [Query(late("gpu_plugin_event_loop_lag_seconds", NODE), "{{node}}")],
            "How long anything may have to wait in the plugin.",
            width=6,
            unit="s",
        ),
        Show(
            "NVML calls (p99)",
            [Query(f"topk(10, {late('gpu_plugin_nvml_call_duration_seconds', 'call')})", "{{call}}")],
            "The ten slowest calls to the driver.",
            width=6,
            unit="s",
        ),
        Show(
            "NVML calls refused",
            [Query(rate("gpu_plugin_nvml_call_errors_total", "call, code"), "{{call}} {{code}}")],
            "Calls that the driver refused, a second, by return code.",
            width=6,
        ),
        Show(
            "NVML calls that hang",
            [
                Query(each("gpu_plugin_nvml_calls_hanging", NODES, NODE), "{{node}}"),
                Query(
                    f"sum by ({NODE}, call) (increase(gpu_plugin_nvml_calls_hung_total{{{NODES}}}[$__rate_interval])) > 0",
                    "{{node}} {{call}}",
                ),
            ],
            "Calls that are out for too long now, and those that became so.",
            width=6,
            thresholds=ALARM,
        ),
        Show(
            "Configuration",
            [
                Query(
                    f"sum by (result) (increase(gpu_plugin_config_reloads_total{{{NODES}}}[$__rate_interval]))",
                    "{{result}}",
                ),
                Query(f"sum({each('gpu_plugin_config_refused', NODES, NODE)})", "nodes that refuse theirs"),
            ],
            "How often configurations were read, and with what result.",
            width=6,
        ),
        Show(
            "State",
            [
                Query(f"sum({each('gpu_plugin_state_written', NODES, NODE)})", "nodes with state on disk"),
                Query(f"sum({each('gpu_plugin_pod_attribution_up', NODES, NODE)})", "nodes that know their pods"),
                Query(f"sum({each('gpu_plugin_waiting', NODES, NODE)})", "nodes that wait for another plugin"),
            ],
            "Whether health is written down, and whether PodResources answers.",
            width=6,
        ),
        Show(
            "What is offered changes",
            [Query(f"changes(gpu_plugin_snapshot_version{{{NODES}}}[$__rate_interval])", "{{node}}")],
            "New snapshots: changes of health, devices or settings.",
            width=6,
        ),
        Show(
            "Time to scrape",
            [Query(each("gpu_plugin_scrape_duration_seconds", NODES, NODE), "{{node}}")],
            "How long it took to make the metrics.",
            width=6,
            unit="s",
        ),
        Show(
            "Log lines dropped",
            [Query(rate("gpu_plugin_log_lines_dropped_total", NODE), "{{node}}")],
            "Lines a second that nobody read in time.",
            width=6,
        ),
        Show(
            "Running since",
            [Query(f"time() - {each('gpu_plugin_start_timestamp_seconds', NODES, NODE)}", "{{node}}")],
            "How long the plugin has run.",
            width=6,
            unit="s",
        ),
    ],
    open=False,
)

ROWS = (FLEET, PER_NODE, PER_GPU, PER_POD, PLUGIN)

VARIABLES: Mapping[str, str] = {
    "cluster": "label_values(gpu_plugin_build_info, cluster)",
    "node": 'label_values(gpu_plugin_build_info{cluster=~"$cluster"}, node)',
    "gpu": f"label_values(gpu_plugin_gpu_info{{{NODES}}}, uuid)",
}
"""Grafana's queries for their values, by name. Where series have no label `cluster`, that one has none."""


def dashboard() -> Json:
    """The dashboard, as Grafana imports it."""
    what = "Which GPU is sick, why, whom it hits; and how the device plugins are."
    return grafana.dashboard(UID, "GPU plugin", what, ("gpu", "kubernetes"), ROWS, VARIABLES)
