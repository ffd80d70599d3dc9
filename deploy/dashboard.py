"""The Grafana dashboard of the chart: its rows, panels and variables. `deploy/generate.py` writes it."""

from collections.abc import Mapping

from deploy import grafana
from deploy.grafana import BLUE, GREEN, RED, YELLOW, Json, Row, Show, number, table
from deploy.queries import GPU, GPUS, INFO, NODE, NODES, each, health, increase, late, of_pods, rate

VERDICTS = {"0": ("fine", GREEN), "1": ("application", BLUE), "2": ("degraded", YELLOW), "3": ("fatal", RED)}
STATES = {"0": ("Healthy", GREEN), "1": ("Degraded", YELLOW), "2": ("Unhealthy", RED)}

ATTENTION = ((None, GREEN), (1, YELLOW))
ALARM = ((None, GREEN), (1, RED))

# Legends
A_GPU = "{{node}} {{index}}"
A_POD = "{{namespace}}/{{pod}}"

HOLDERS = each("gpu_plugin_pod_device", GPUS, f"{GPU}, namespace, pod, container")
VERDICT = each("gpu_plugin_gpu_signal_verdict", GPUS, f"{GPU}, signal")
UTILIZATION = each("gpu_plugin_gpu_utilization_ratio", GPUS)
POWER = each("gpu_plugin_gpu_power_watts", GPUS)
HOTTEST = each("gpu_plugin_gpu_temperature_celsius", GPUS)

FLEET = Row(
    "Fleet",
    [
        number("Nodes", f"count({each('gpu_plugin_build_info', NODES, NODE)})", "Nodes whose plugin answers."),
        number("GPUs", f"count({each('gpu_plugin_gpu_info', GPUS)})", "GPUs that plugins know of."),
        number(
            "Unhealthy",
            f"sum({health('unhealthy')})",
            "GPUs that are not given to new pods, those that an operator holds back among them.",
            thresholds=ALARM,
        ),
        number("Degraded", f"sum({health('degraded')})", "GPUs that work, with a fault.", thresholds=ATTENTION),
        number(
            "Nodes without driver",
            f"count({each('gpu_plugin_driver_up', NODES, NODE)} == 0) or vector(0)",
            "Nodes none of whose GPUs can be reached through the driver.",
            thresholds=ALARM,
        ),
        number(
            "Not registered",
            f"count({each('gpu_plugin_registered', NODES, f'{NODE}, resource')} == 0) or vector(0)",
            "Resources of nodes that the kubelet is not told of.",
            thresholds=ALARM,
        ),
        number(
            "Devices held",
            f"count({each('gpu_plugin_pod_device', NODES, f'{NODE}, resource, device')}) or vector(0)",
            "Devices that containers hold: GPUs, MIG devices and replicas.",
        ),
        number("Power", f"sum({POWER})", "What all these GPUs draw.", unit="watt"),
        table(
            "GPUs that need attention",
            f"({VERDICT} >= 2) * on ({NODE}, uuid) group_left (model, pci_bus_id) {INFO}",
            "Which GPU, and what is held against it. gpu-plugin explain on the node says what clears it.",
            "Value signal node index model pci_bus_id uuid cluster",
            width=14,
            mappings=VERDICTS,
        ),
        table(
            "GPUs held back by operators",
            f"({each('gpu_plugin_gpu_held_back', GPUS, f'{GPU}, by')} == 1)"
            f" * on ({NODE}, uuid) group_left (model) {INFO}",
            "GPUs without a fault that are not given to new pods, and the order: gpu-plugin cordon (cordon), the annotation of "
            "the Node (node-cordon), or gpu-plugin release (maintenance). gpu-plugin explain on the node says whose and why.",
            "by node index model uuid cluster",
            width=10,
        ),
        table(
            "Pods on Unhealthy GPUs",
            f"{HOLDERS} and on ({NODE}, uuid) ({health('unhealthy')} == 1)",
            "Whom it hits.",
            "namespace pod container node index cluster",
            width=10,
        ),
        Show(
            "GPUs by health",
            {"{{state}}": f"sum by (state) ({each('gpu_plugin_gpu_health', GPUS, f'{GPU}, state')})"},
            "How many GPUs are in each state.",
            width=7,
            stacked=True,
        ),
        Show(
            "Devices by resource",
            {
                "{{resource}} {{state}}": "sum by (resource, state) "
                f"({each('gpu_plugin_devices', NODES, f'{NODE}, resource, state')})"
            },
            "What is offered to kubelets. Retired devices are gone, and a pod may hold them still.",
            width=7,
            stacked=True,
        ),
        Show(
            "Xids",
            {
                "Xid {{xid}} ({{class}})": f"sum by (xid, class) (increase(gpu_plugin_xid_errors_total{{{GPUS}}}[1h])) > 0"
            },
            "Xid errors within an hour, by number and by what they ask for.",
            width=24,
        ),
    ],
)

PER_NODE = Row(
    "Nodes",
    [
        table(
            "Nodes",
            {
                "GPUs": f"count by ({NODE}) ({each('gpu_plugin_gpu_info', GPUS)})",
                "Unhealthy": f"sum by ({NODE}) ({health('unhealthy')})",
                "Degraded": f"sum by ({NODE}) ({health('degraded')})",
                "driver": each("gpu_plugin_driver_up", NODES, NODE),
                "registered": f"min by ({NODE}) (gpu_plugin_registered{{{NODES}}})",
                "state written": each("gpu_plugin_state_written", NODES, NODE),
                "utilization": f"avg by ({NODE}) ({UTILIZATION})",
                "hottest": f"max by ({NODE}) ({HOTTEST})",
            },
            "One line a node.",
            "cluster node",
            units={"utilization": "percentunit", "hottest": "celsius"},
        ),
        Show(
            "Utilization by node",
            {"{{node}}": f"avg by ({NODE}) ({UTILIZATION})"},
            "Mean over the node's GPUs that are not in MIG mode.",
            unit="percentunit",
            top=1,
        ),
        Show("Power by node", {"{{node}}": f"sum by ({NODE}) ({POWER})"}, "What the node's GPUs draw.", unit="watt"),
        Show(
            "Allocations by node",
            {"{{node}} {{resource}}": increase("gpu_plugin_allocated_devices_total", f"{NODE}, resource")},
            "Devices given to containers.",
        ),
    ],
)

PER_GPU = Row(
    "GPUs",
    [
        Show(
            "Health",
            {A_GPU: f"{health('degraded')} + 2 * {health('unhealthy')}"},
            "The state of each GPU over time.",
            kind="state-timeline",
            width=12,
            mappings=STATES,
        ),
        Show(
            "Signals",
            {f"{A_GPU} {{{{signal}}}}": f"{VERDICT} > 0"},
            "What is held against each GPU over time.",
            kind="state-timeline",
            width=12,
            mappings=VERDICTS,
        ),
        Show(
            "Temperature",
            {A_GPU: HOTTEST, f"{A_GPU} memory": each("gpu_plugin_gpu_memory_temperature_celsius", GPUS)},
            "Temperature of GPU and memory.",
            unit="celsius",
        ),
        Show(
            "Margin to slowdown",
            {
                A_GPU: each("gpu_plugin_gpu_temperature_threshold_celsius", f'{GPUS}, threshold="slowdown"')
                + f" - {HOTTEST}",
                f"{A_GPU} T.Limit": each("gpu_plugin_gpu_temperature_margin_celsius", GPUS),
            },
            "How much hotter a GPU may get before it slows down: to its slowdown threshold, and to its T.Limit where it has one.",
            unit="celsius",
            below_zero=True,
        ),
        Show(
            "Power",
            {A_GPU: POWER, "highest limit": f"max({each('gpu_plugin_gpu_power_limit_watts', GPUS)})"},
            "Power draw, beside the highest limit in force.",
            unit="watt",
        ),
        Show(
            "Utilization",
            {A_GPU: UTILIZATION},
            "Share of time in which a kernel ran. A GPU in MIG mode has none.",
            unit="percentunit",
            top=1,
        ),
        Show(
            "Memory in use",
            {A_GPU: " / ".join(each(f"gpu_plugin_gpu_memory_{which}_bytes", GPUS) for which in ("used", "total"))},
            "Share of the GPU's memory.",
            unit="percentunit",
            top=1,
        ),
        Show(
            "Clocks held down",
            {f"{A_GPU} {{{{reason}}}}": f"{each('gpu_plugin_gpu_clocks_event', GPUS, f'{GPU}, reason')} > 0"},
            "What holds a GPU's clocks down now.",
        ),
        Show(
            "Memory errors",
            {
                f"{A_GPU} {which}": rate(f"gpu_plugin_gpu_ecc_{which}_errors_total", GPU, GPUS)
                for which in ("uncorrected", "corrected")
            },
            "ECC errors a second.",
        ),
        Show(
            "Remapped rows",
            {
                f"{A_GPU} {{{{cause}}}}": f"{each('gpu_plugin_gpu_remapped_rows', GPUS, f'{GPU}, cause')} > 0",
                f"{A_GPU} pending": f"{each('gpu_plugin_gpu_row_remap_pending', GPUS)} > 0",
                f"{A_GPU} failed": f"{each('gpu_plugin_gpu_row_remap_failure', GPUS)} > 0",
            },
            "Memory rows that were remapped in the life of the part; those that wait for a reset, and those that failed.",
        ),
        Show(
            "NVLinks that are down",
            {
                A_GPU: each("gpu_plugin_gpu_nvlinks", f'{GPUS}, state="inactive"'),
                f"{A_GPU} CRC errors/s": rate("gpu_plugin_gpu_nvlink_crc_errors_total", GPU, GPUS),
                f"{A_GPU} failed recoveries/s": rate("gpu_plugin_gpu_nvlink_failed_recoveries_total", GPU, GPUS),
            },
            "Links that are not active, and errors on those that are.",
        ),
        Show(
            "PCIe",
            {
                f"{A_GPU} lanes in use": f"{each('gpu_plugin_gpu_pcie_link_lanes', GPUS)}"
                f" / {each('gpu_plugin_gpu_pcie_link_max_lanes', GPUS)}",
                f"{A_GPU} replays/s": rate("gpu_plugin_gpu_pcie_replays_total", GPU, GPUS),
            },
            "Share of its lanes that a GPU's link uses, and packets that were sent again.",
        ),
    ],
    open=False,
)

PER_POD = Row(
    "Pods",
    [
        table(
            "Devices by pod",
            each("gpu_plugin_pod_device", GPUS, f"{GPU}, namespace, pod, container, resource, device"),
            "Which container holds which device.",
            "namespace pod container node index resource device cluster",
        ),
        Show(
            "Utilization by pod",
            {A_POD: of_pods("gpu_plugin_gpu_utilization_ratio")},
            "Mean over the GPUs that the pod holds. A shared GPU counts whole for each of its pods.",
            unit="percentunit",
            top=1,
        ),
        Show(
            "Memory by pod",
            {A_POD: of_pods("gpu_plugin_gpu_memory_used_bytes", how="sum")},
            "Memory in use on the GPUs that the pod holds, whoever uses it.",
            unit="bytes",
        ),
        Show(
            "Power by pod",
            {A_POD: of_pods("gpu_plugin_gpu_power_watts", how="sum")},
            "What the GPUs draw that the pod holds.",
            unit="watt",
        ),
        table(
            "GPUs that are held and idle",
            f"{HOLDERS} and on ({NODE}, uuid) (max by ({NODE}, uuid)"
            f" (max_over_time(gpu_plugin_gpu_utilization_ratio{{{GPUS}}}[1h])) < 0.01)",
            "Pods whose GPU had nothing to do for an hour.",
            "namespace pod container node index cluster",
        ),
    ],
    open=False,
)

PLUGIN = Row(
    "The plugin",
    [
        Show(
            "Versions",
            {"{{version}}": f"count by (version) ({each('gpu_plugin_build_info', NODES, f'{NODE}, version')})"},
            "Nodes by the version that runs.",
            stacked=True,
        ),
        Show(
            "Time to answer the kubelet (p99)",
            {"{{method}}": late("gpu_plugin_rpc_duration_seconds", "method")},
            "99 of 100 requests are answered within this time.",
            unit="s",
        ),
        Show(
            "Requests refused",
            {"{{node}} {{method}} {{code}}": rate("gpu_plugin_rpc_errors_total", f"{NODE}, method, code")},
            "Requests of the kubelet that were refused or failed, a second.",
            unit="reqps",
        ),
        Show(
            "Registrations",
            {"{{result}}": increase("gpu_plugin_registrations_total", "result")},
            "Attempts to register with a kubelet.",
        ),
        Show(
            "ListAndWatch streams",
            {"{{node}} {{resource}}": each("gpu_plugin_list_streams", NODES, f"{NODE}, resource")},
            "Streams of the kubelet that are open: 1 for each resource is right.",
        ),
        Show(
            "Lists sent",
            {"{{node}} {{resource}}": rate("gpu_plugin_lists_sent_total", f"{NODE}, resource")},
            "Lists of devices, a second.",
        ),
        Show(
            "Event loop late by (p99)",
            {"{{node}}": late("gpu_plugin_event_loop_lag_seconds", NODE)},
            "How long anything may have to wait in the plugin.",
            unit="s",
        ),
        Show(
            "NVML calls (p99)",
            {"{{call}}": f"topk(10, {late('gpu_plugin_nvml_call_duration_seconds', 'call')})"},
            "The ten slowest calls to the driver.",
            unit="s",
        ),
        Show(
            "NVML calls refused",
            {"{{call}} {{code}}": rate("gpu_plugin_nvml_call_errors_total", "call, code")},
            "Calls that the driver refused, a second, by return code.",
        ),
        Show(
            "NVML calls that hang",
            {
                "{{node}}": each("gpu_plugin_nvml_calls_hanging", NODES, NODE),
                "{{node}} {{call}}": f"{increase('gpu_plugin_nvml_calls_hung_total', f'{NODE}, call')} > 0",
            },
            "Calls that are out for too long now, and those that became so.",
            thresholds=ALARM,
        ),
        Show(
            "Configuration",
            {
                "{{result}}": increase("gpu_plugin_config_reloads_total", "result"),
                "nodes that refuse theirs": f"sum({each('gpu_plugin_config_refused', NODES, NODE)})",
            },
            "How often configurations were read, and with what result.",
        ),
        Show(
            "State",
            {
                "nodes with state on disk": f"sum({each('gpu_plugin_state_written', NODES, NODE)})",
                "nodes that know their pods": f"sum({each('gpu_plugin_pod_attribution_up', NODES, NODE)})",
                "nodes that wait for another plugin": f"sum({each('gpu_plugin_waiting', NODES, NODE)})",
            },
            "Whether health is written down, and whether PodResources answers.",
        ),
        Show(
            "What is offered changes",
            {"{{node}}": f"changes(gpu_plugin_snapshot_version{{{NODES}}}[$__rate_interval])"},
            "New snapshots: changes of health, devices or settings.",
        ),
        Show(
            "Time to scrape",
            {"{{node}}": each("gpu_plugin_scrape_duration_seconds", NODES, NODE)},
            "How long it took to make the metrics.",
            unit="s",
        ),
        Show(
            "Log lines dropped",
            {"{{node}}": rate("gpu_plugin_log_lines_dropped_total", NODE)},
            "Lines a second that nobody read in time.",
        ),
        Show(
            "Running since",
            {"{{node}}": f"time() - {each('gpu_plugin_start_timestamp_seconds', NODES, NODE)}"},
            "How long the plugin has run.",
            unit="s",
        ),
    ],
    open=False,
    width=6,
)

ROWS = (FLEET, PER_NODE, PER_GPU, PER_POD, PLUGIN)

VARIABLES: Mapping[str, str] = {
    "cluster": "label_values(gpu_plugin_build_info, cluster)",
    "node": 'label_values(gpu_plugin_build_info{cluster=~"$cluster"}, node)',
    "gpu": f"label_values(gpu_plugin_gpu_info{{{NODES}}}, uuid)",
}
"""Grafana's query for the values of each variable. The variable `cluster` has no values if series have no label `cluster`."""


def dashboard() -> Json:
    """Return the dashboard in the form that Grafana imports."""
    what = "Which GPU is sick, why, whom it hits; and how the device plugins are."
    return grafana.dashboard("gpu-plugin", "GPU plugin", what, ("gpu", "kubernetes"), ROWS, VARIABLES)
