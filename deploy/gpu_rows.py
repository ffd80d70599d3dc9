"""The dashboard's panels of single GPUs and of the pods that hold them."""

from deploy.grafana import BLUE, GREEN, RED, YELLOW, Query, Row, Show
from deploy.queries import GPU, GPUS, NODE, each, health, of_pods, rate

VERDICTS = {"0": ("fine", GREEN), "1": ("application", BLUE), "2": ("degraded", YELLOW), "3": ("fatal", RED)}
STATES = {"0": ("Healthy", GREEN), "1": ("Degraded", YELLOW), "2": ("Unhealthy", RED)}

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
