"""The dashboard's panels of the fleet, of nodes, and of the plugin on them."""

from typing import Any

from deploy.gpu_rows import VERDICTS
from deploy.grafana import GREEN, RED, YELLOW, Query, Row, Show
from deploy.queries import GPU, GPUS, INFO, NODE, NODES, each, health, late, rate

ATTENTION = ((None, GREEN), (1, YELLOW))
ALARM = ((None, GREEN), (1, RED))


def _number(title: str, expr: str, description: str, **more: Any) -> Show:
    return Show(title, [Query(expr, instant=True)], description, **{"kind": "stat", "width": 3, "height": 4, **more})


FLEET = Row(
    "Fleet",
    [
        _number("Nodes", f"count({each('gpu_plugin_build_info', NODES, NODE)})", "Nodes whose plugin answers."),
        _number("GPUs", f"count({each('gpu_plugin_gpu_info', GPUS)})", "GPUs that plugins know of."),
        _number(
            "Unhealthy",
            f"sum({health('unhealthy')})",
            "GPUs that are not given to new pods, those that an operator holds back among them.",
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
            "GPUs held back by operators",
            [
                Query(
                    f"({each('gpu_plugin_gpu_held_back', GPUS, f'{GPU}, by')} == 1)"
                    f" * on ({NODE}, uuid) group_left (model) {INFO}",
                    instant=True,
                )
            ],
            "GPUs without a fault that are not given to new pods, and the order: gpu-plugin cordon (cordon), the annotation of "
            "the Node (node-cordon), or gpu-plugin release (maintenance). gpu-plugin explain on the node says whose and why.",
            kind="table",
            width=10,
            columns={
                "by": "order",
                "node": "node",
                "index": "GPU",
                "model": "model",
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
            width=7,
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
            width=7,
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
            width=24,
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
