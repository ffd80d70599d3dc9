"""Every metric: of process, configuration, driver; devices, who holds them, and what the kubelet asks; and of the GPUs (`gpus`).

docs/metrics.md has every one of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from gpu_plugin.telemetry.metrics import gpus
from gpu_plugin.telemetry.metrics.exposition import PROMETHEUS, Family, counter, gauge, histogram, info, labelled, lines

Named = Mapping[str, Mapping[str, Any]]
"""What is said of each resource, or of each call, by its name."""

KNOWN = 1024
"""Labels of containers and of GPUs that are made text once, and not again for each device."""


def families(status: Mapping[str, Any]) -> Iterator[Family]:
    """The families that a status makes, always in the same order, each made when its turn comes.

    What the status does not tell of has none, or no sample.
    """
    counters = status.get("counters", {})
    kubelet = counters.get("kubelet", {})
    yield from _process(status, counters)
    yield from _configuration(status)
    yield from _driver(status.get("driver"), counters.get("nvml"))
    missing = status.get("missing")
    yield gauge(
        "gpu_plugin_gpus_missing",
        "GPUs that the PCI bus or the memory of the node has and the driver does not list.",
        None if missing is None else len(missing),
    )
    yield from _devices(status["resources"])
    yield from _pods(status.get("attribution"))
    yield from _resources(status, {name: {} for name in status["resources"]} | kubelet.get("resources", {}))
    yield from _calls(kubelet.get("methods", {}))
    yield from _mps(counters.get("mps", {}))
    yield from gpus.families(status)


def metrics(status: Mapping[str, Any]) -> list[str]:
    """The status in Prometheus' text exposition format 0.0.4, line by line."""
    return [line for family in families(status) for line in lines(family, PROMETHEUS)]


def _process(status: Mapping[str, Any], counters: Mapping[str, Any]) -> Iterator[Family]:
    daemon, state, lag = status["daemon"], status.get("state"), status.get("event_loop_lag")
    yield info(
        "gpu_plugin_build_info",
        "What runs.",
        [labelled(version=daemon["version"], python=daemon["python"])] if "python" in daemon else [],
    )
    yield gauge("gpu_plugin_start_timestamp_seconds", "When the process started, in Unix time.", daemon.get("started"))
    yield gauge(
        "gpu_plugin_waiting",
        "Whether another daemon has the node, and this one waits for it.",
        bool(status["waiting"]) if "waiting" in status else None,
    )
    yield gauge(
        "gpu_plugin_snapshot_version",
        "The version of what is offered to the kubelet.",
        counters.get("snapshot_version"),
    )
    yield histogram(
        "gpu_plugin_event_loop_lag_seconds",
        "By how much the event loop was late, once a second.",
        [] if lag is None else [("", lag)],
    )
    yield gauge(
        "gpu_plugin_state_written",
        "Whether all that a restart must remember is on disk.",
        None if state is None else not state["trouble"],
    )
    yield counter(
        "gpu_plugin_log_lines_dropped_total",
        "Log lines that standard error did not take.",
        daemon["log_lines_dropped"],
    )
    yield gauge(
        "gpu_plugin_scrape_duration_seconds",
        "How long it took to make the text before this one.",
        status.get("scrape_seconds"),
    )


def _configuration(status: Mapping[str, Any]) -> Iterator[Family]:
    configuration, cdi = status["configuration"], status["cdi"]
    yield counter(
        "gpu_plugin_config_reloads_total",
        "Times the configuration was read, by outcome.",
        [(labelled(result=result), count) for result, count in configuration["reloads"].items()],
    )
    yield gauge(
        "gpu_plugin_config_refused",
        "Whether the configuration that was asked for is not the one in force.",
        bool(configuration["refused"]),
    )
    yield gauge(
        "gpu_plugin_config_label_unheard",
        "Whether a change of the node label that names the configuration would not be heard of now.",
        bool(configuration["unheard"]),
    )
    yield gauge(
        "gpu_plugin_cdi_ready",
        "Whether the newest CDI specifications are valid and written; only where containers are given CDI names.",
        None if cdi is None else not cdi["trouble"],
    )


def _driver(driver: Mapping[str, Any] | None, nvml: Mapping[str, Any] | None) -> Iterator[Family]:
    yield gauge(
        "gpu_plugin_driver_up",
        "Whether any GPU can be reached; no series on a node without GPUs.",
        None if driver is None or driver.get("no_gpu") else driver.get("answered", True) and not driver["trouble"],
    )
    yield gauge(
        "gpu_plugin_restart_needed",
        "Whether a hung call about one GPU keeps others from being found or released until the plugin is restarted.",
        None if driver is None or "restart" not in driver else bool(driver["restart"]),
    )
    if nvml is None:
        return
    calls = [(labelled(call=call), each) for call, each in nvml["calls"].items()]
    yield histogram(
        "gpu_plugin_nvml_call_duration_seconds",
        "Calls to NVML that came back, but for the wait for events.",
        [(labels, each["seconds"]) for labels, each in calls if each["seconds"] is not None],
    )
    yield counter(
        "gpu_plugin_nvml_call_errors_total",
        "Calls that NVML refused, by return code, but for what a part does not have.",
        _errors(calls),
    )
    yield counter(
        "gpu_plugin_nvml_calls_hung_total",
        "Calls to NVML that took longer than they may, those that have not come back included.",
        [(labels, each["hung"]) for labels, each in calls],
    )
    yield gauge(
        "gpu_plugin_nvml_calls_hanging",
        "Calls to NVML that have been out for longer than they may.",
        nvml["hanging"],
    )


def _devices(resources: Named) -> Iterator[Family]:
    yield gauge(
        "gpu_plugin_devices",
        "Devices listed to the kubelet, by resource and state.",
        [
            (labelled(resource=name, state=state), count)
            for name, counts in resources.items()
            for state, count in (
                ("healthy", counts["healthy"]),
                ("unhealthy", counts["devices"] - counts["healthy"] - counts["retired"]),
                ("retired", counts["retired"]),
            )
        ],
    )
    yield gauge(
        "gpu_plugin_devices_held_back",
        "Unhealthy devices that nothing but an operator's order keeps from pods: their hardware has no fault.",
        [(labelled(resource=name), counts.get("held_back")) for name, counts in resources.items()],
    )


def _pods(attribution: Mapping[str, Any] | None) -> Iterator[Family]:
    if attribution is None:
        return
    yield gauge("gpu_plugin_pod_device", "A container holds a device.", _held(attribution["devices"]))
    yield gauge(
        "gpu_plugin_pod_attribution_up",
        "Whether the PodResources service of the kubelet says which pods hold what.",
        not attribution["trouble"],
    )
    yield counter(
        "gpu_plugin_pod_resources_requests_total",
        "Questions to the PodResources service of the kubelet, by whether they were answered.",
        [
            (labelled(result="answered"), attribution["questions"] - attribution["failures"]),
            (labelled(result="failed"), attribution["failures"]),
        ],
    )


def _held(devices: Iterable[tuple[Mapping[str, Any], Iterable[tuple[str, str, str]]]]) -> Iterator[tuple[str, int]]:
    """A sample for each device and container; what many devices have in common is made text once."""

    @lru_cache(KNOWN)
    def container_labels(namespace: str, pod: str, container: str) -> str:
        return labelled(namespace=namespace, pod=pod, container=container)

    @lru_cache(KNOWN)
    def gpu_labels(uuid: str, index: object) -> str:
        return labelled(uuid=uuid, index=index)

    for device, holders in devices:
        of = labelled(resource=device["resource"], device=device["device"])
        gpu = gpu_labels(device["uuid"], device["index"])
        for namespace, pod, container in holders:
            yield f"{container_labels(namespace, pod, container)},{of},{gpu}", 1


def _resources(status: Mapping[str, Any], counted: Named) -> Iterator[Family]:
    """What passes between plugin and kubelet of each resource; `counted` has those that are served, and former ones."""
    named = [(labelled(resource=name), each) for name, each in counted.items()]
    yield counter(
        "gpu_plugin_allocate_requests_total",
        "Allocate calls that were answered.",
        [(labels, each.get("allocations", 0)) for labels, each in named],
    )
    yield counter(
        "gpu_plugin_allocated_devices_total",
        "Devices given to containers in them.",
        [(labels, each.get("allocated_devices", 0)) for labels, each in named],
    )
    yield gauge(
        "gpu_plugin_registered",
        "Whether the kubelet is told of a resource's devices: it took the registration and reads the list.",
        [(labelled(resource=name), each["registered"]) for name, each in status["kubelet"]["resources"].items()],
    )
    yield counter(
        "gpu_plugin_registrations_total",
        "Attempts to register a resource with the kubelet, by what came of them.",
        [
            (f"{labels},{labelled(result=result)}", each.get("registrations", {}).get(result, 0))
            for labels, each in named
            for result in ("accepted", "failed")
        ],
    )
    yield gauge(
        "gpu_plugin_list_streams",
        "ListAndWatch streams of the kubelet that are open.",
        [(labelled(resource=name), counted[name].get("streams", 0)) for name in status["resources"]],
    )
    yield counter(
        "gpu_plugin_lists_sent_total",
        "Lists of devices that were sent to the kubelet.",
        [(labels, each.get("lists", 0)) for labels, each in named],
    )


def _calls(methods: Named) -> Iterator[Family]:
    calls = [(labelled(method=method), each) for method, each in methods.items()]
    yield histogram(
        "gpu_plugin_rpc_duration_seconds",
        "From the arrival of a request of the kubelet to its answer.",
        [(labels, each["seconds"]) for labels, each in calls],
    )
    yield counter(
        "gpu_plugin_rpc_errors_total",
        "Requests of the kubelet that were refused or failed, by gRPC status.",
        _errors(calls),
    )


def _mps(counted: Named) -> Iterator[Family]:
    named = [(labelled(resource=name), each) for name, each in counted.items()]
    yield counter(
        "gpu_plugin_mps_limits_restored_total",
        "Times that a client had changed a limit of an MPS daemon, and gpu-plugin mps set the configured limits again.",
        [(labels, each["limits_restored"]) for labels, each in named],
    )
    yield counter(
        "gpu_plugin_mps_probes_failed_total",
        "Probes of gpu-plugin mps that an MPS daemon did not answer although its process was alive.",
        [(labels, each["probes_failed"]) for labels, each in named],
    )


def _errors(calls: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, int]]:
    """A sample for each code that calls failed with, by the labels of the call."""
    for labels, each in calls:
        for code, count in each["errors"].items():
            yield f"{labels},{labelled(code=code)}", count
