"""What the daemon says of itself, as Prometheus reads it. Pure."""

from collections.abc import Mapping
from typing import Any


def metrics(status: Mapping[str, Any]) -> list[str]:
    """The status in Prometheus' text exposition format 0.0.4. Names, uuids and words hold nothing that it escapes."""
    configuration, resources, health = status["configuration"], status["resources"], status["health"]
    return [
        *_metric(
            "gpu_plugin_config_reloads_total",
            "counter",
            "Times the configuration was read, by what came of it.",
            [({"result": result}, count) for result, count in configuration["reloads"].items()],
        ),
        *_metric(
            "gpu_plugin_config_refused",
            "gauge",
            "Whether the configuration that was asked for is not the one in force.",
            [({}, bool(configuration["refused"]))],
        ),
        *_metric(
            "gpu_plugin_config_label_unheard",
            "gauge",
            "Whether a change of the node label that names the configuration would not be heard of now.",
            [({}, bool(configuration["unheard"]))],
        ),
        *_metric(
            "gpu_plugin_registered",
            "gauge",
            "Whether the kubelet is told of a resource's devices: it took the registration and reads the list.",
            [({"resource": name}, each["registered"]) for name, each in status["kubelet"]["resources"].items()],
        ),
        *_metric(
            "gpu_plugin_log_lines_dropped_total",
            "counter",
            "Log lines that standard error did not take.",
            [({}, status["daemon"]["log_lines_dropped"])],
        ),
        *_metric(
            "gpu_plugin_cdi_ready",
            "gauge",
            "Whether CDI specifications are written that containers can be made with; only where they are told CDI names.",
            [({}, not status["cdi"]["trouble"])] if status["cdi"] is not None else [],
        ),
        *_metric(
            "gpu_plugin_devices",
            "gauge",
            "Devices listed to the kubelet, by resource and state.",
            [
                ({"resource": name, "state": state}, count)
                for name, counts in resources.items()
                for state, count in (
                    ("healthy", counts["healthy"]),
                    ("unhealthy", counts["devices"] - counts["healthy"] - counts["retired"]),
                    ("retired", counts["retired"]),
                )
            ],
        ),
        *_metric(
            "gpu_plugin_gpu_health",
            "gauge",
            "The state that each GPU is in (1) and those it is not in (0). One of whose MIG devices is bad is degraded.",
            [
                ({"uuid": gpu["uuid"], "state": state}, state == gpu["state"])
                for gpu in health["gpus"]
                for state in ("healthy", "degraded", "unhealthy")
            ],
        ),
        *_metric(
            "gpu_plugin_health_transitions_total",
            "counter",
            "Changes of verdict, by GPU, signal and the verdict it came to.",
            [
                ({"uuid": each["uuid"], "signal": each["signal"], "verdict": each["verdict"].lower()}, each["total"])
                for each in health["transitions"]
            ],
        ),
        *_metric(
            "gpu_plugin_xid_errors_total",
            "counter",
            "Xid errors, by GPU, number and class in the Xid policy.",
            [
                ({"uuid": each["uuid"], "xid": each["xid"], "class": each["class"]}, each["total"])
                for each in health["xids"]
            ],
        ),
        *_metric(
            "gpu_plugin_health_signal_supported",
            "gauge",
            "Whether a GPU tells what a health signal needs.",
            [
                ({"uuid": uuid, "signal": signal}, supported)
                for uuid, signals in health["supported"].items()
                for signal, supported in signals.items()
            ],
        ),
    ]


def _metric(name: str, kind: str, text: str, samples: list[tuple[dict[str, object], int]]) -> list[str]:
    shown = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        told = ",".join(f'{label}="{said}"' for label, said in labels.items())
        shown.append(f"{name}{{{told}}} {int(value)}" if told else f"{name} {int(value)}")
    return shown
