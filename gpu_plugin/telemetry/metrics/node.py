"""The metrics of the plugin itself, and of the driver that it asks."""

from collections.abc import Mapping
from typing import Any

from gpu_plugin.telemetry.metrics.exposition import Family, counter, gauge, histogram, info, labelled


def families(status: Mapping[str, Any]) -> list[Family]:
    """Metric families of the process, its configuration and the driver, from the daemon's status."""
    return [*_process(status), *_configuration(status), *_driver(status)]


def _process(status: Mapping[str, Any]) -> list[Family]:
    daemon, state = status["daemon"], status.get("state")
    lag, counters = status.get("event_loop_lag"), status.get("counters", {})
    return [
        info(
            "gpu_plugin_build_info",
            "What runs.",
            [labelled(version=daemon["version"], python=daemon["python"])] if "python" in daemon else [],
        ),
        gauge("gpu_plugin_start_timestamp_seconds", "When the process started, in Unix time.", daemon.get("started")),
        gauge(
            "gpu_plugin_waiting",
            "Whether another daemon has the node, and this one waits for it.",
            int(bool(status["waiting"])) if "waiting" in status else None,
        ),
        gauge(
            "gpu_plugin_snapshot_version",
            "The version of what is offered to the kubelet.",
            counters.get("snapshot_version"),
        ),
        histogram(
            "gpu_plugin_event_loop_lag_seconds",
            "By how much the event loop was late, once a second.",
            [] if lag is None else [("", lag)],
        ),
        gauge(
            "gpu_plugin_state_written",
            "Whether all that a restart must remember is on disk.",
            None if state is None else int(not state["trouble"]),
        ),
        counter(
            "gpu_plugin_log_lines_dropped_total",
            "Log lines that standard error did not take.",
            daemon["log_lines_dropped"],
        ),
        gauge(
            "gpu_plugin_scrape_duration_seconds",
            "How long it took to make the text before this one.",
            status.get("scrape_seconds"),
        ),
    ]


def _configuration(status: Mapping[str, Any]) -> list[Family]:
    configuration = status["configuration"]
    return [
        counter(
            "gpu_plugin_config_reloads_total",
            "Times the configuration was read, by outcome.",
            [(labelled(result=result), count) for result, count in configuration["reloads"].items()],
        ),
        gauge(
            "gpu_plugin_config_refused",
            "Whether the configuration that was asked for is not the one in force.",
            int(bool(configuration["refused"])),
        ),
        gauge(
            "gpu_plugin_config_label_unheard",
            "Whether a change of the node label that names the configuration would not be heard of now.",
            int(bool(configuration["unheard"])),
        ),
        gauge(
            "gpu_plugin_cdi_ready",
            "Whether CDI specifications are written that containers can be made with; only where they are told CDI names.",
            int(not status["cdi"]["trouble"]) if status["cdi"] is not None else None,
        ),
    ]


def _driver(status: Mapping[str, Any]) -> list[Family]:
    driver, nvml = status.get("driver"), status.get("counters", {}).get("nvml")
    found = [
        gauge(
            "gpu_plugin_driver_up",
            "Whether any GPU can be reached.",
            None if driver is None else int(driver.get("answered", True) and not driver["trouble"]),
        )
    ]
    if nvml is None:
        return found
    calls = [(labelled(call=call), each) for call, each in nvml["calls"].items()]
    return [
        *found,
        histogram(
            "gpu_plugin_nvml_call_duration_seconds",
            "Calls to NVML that came back, but for the wait for events.",
            [(labels, each["seconds"]) for labels, each in calls if each["seconds"] is not None],
        ),
        counter(
            "gpu_plugin_nvml_call_errors_total",
            "Calls that NVML refused, by return code, but for what a part does not have.",
            [
                (f"{labels},{labelled(code=code)}", count)
                for labels, each in calls
                for code, count in each["errors"].items()
            ],
        ),
        counter(
            "gpu_plugin_nvml_calls_hung_total",
            "Calls to NVML that took longer than they may, those that have not come back included.",
            [(labels, each["hung"]) for labels, each in calls],
        ),
        gauge(
            "gpu_plugin_nvml_calls_hanging",
            "Calls to NVML that have been out for longer than they may.",
            nvml["hanging"],
        ),
    ]
