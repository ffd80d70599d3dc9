"""All metrics: of the process, configuration, driver, devices, pods and the kubelet's calls, and of the GPUs (`gpus`).

docs/metrics.md describes all of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from gpu_plugin.status.model import Counters, Pods, Resource, Status
from gpu_plugin.telemetry.metrics import gpus
from gpu_plugin.telemetry.metrics.exposition import PROMETHEUS, Family, counter, gauge, histogram, info, labelled, lines

Named = Mapping[str, Mapping[str, Any]]  # the counts of each resource, or of each call, by its name

# A device with `resource`, `device`, `uuid` and `index`, and the containers that hold it: namespace, pod and container.
Held = tuple[Mapping[str, str | int], Iterable[tuple[str, str, str]]]

KNOWN = 1024  # largest number of label texts of containers and of GPUs that are cached, for reuse with several devices


def families(
    status: Status, held: Iterable[Held] = (), lag: Mapping[str, Any] | None = None, scrape_seconds: float | None = None
) -> Iterator[Family]:
    """Return the families for a status in a constant order, each made when it is iterated over.

    For parts that the status lacks there are no families or no samples. `held` are the devices that containers hold. `lag` is
    the delay of the event loop, as `Histogram.as_data`, and `scrape_seconds` the duration of making the last text.
    """
    counters = status.counters or Counters()
    yield from _process(status, counters, lag, scrape_seconds)
    yield from _configuration(status)
    yield from _driver(status, counters.nvml)
    yield gauge(
        "gpu_plugin_gpus_missing",
        "GPUs that are on the PCI bus, or were there before, and that the driver does not list.",
        len(status.missing),
    )
    yield from _devices(status.resources)
    yield from _pods(status.pods, held)
    yield from _resources(status, {name: {} for name in status.resources} | counters.kubelet.get("resources", {}))
    yield from _calls(counters.kubelet.get("methods", {}))
    yield from _mps(counters.mps)
    yield from gpus.families(status)


def metrics(status: Status) -> list[str]:
    """Return the status in Prometheus' text exposition format 0.0.4, line by line."""
    held = status.pods.devices if status.pods is not None else ()
    return [line for family in families(status, held) for line in lines(family, PROMETHEUS)]


def _process(
    status: Status, counters: Counters, lag: Mapping[str, Any] | None, scrape_seconds: float | None
) -> Iterator[Family]:
    daemon = status.daemon
    yield info(
        "gpu_plugin_build_info",
        "Versions of the plugin and of Python.",
        [labelled(version=daemon.version, python=daemon.python)],
    )
    yield gauge("gpu_plugin_start_timestamp_seconds", "When the process started, in Unix time.", daemon.started)
    yield gauge(
        "gpu_plugin_waiting", "Whether another daemon has the node, and this one waits for it.", bool(status.waiting)
    )
    yield gauge(
        "gpu_plugin_snapshot_version",
        "The version of the snapshot that is offered to the kubelet.",
        counters.snapshot_version,
    )
    yield histogram(
        "gpu_plugin_event_loop_lag_seconds",
        "Delay of the event loop, measured once a second.",
        [] if lag is None else [("", lag)],
    )
    yield gauge(
        "gpu_plugin_state_written", "Whether all state that a restart needs is on disk.", not status.state.trouble
    )
    yield counter(
        "gpu_plugin_log_lines_dropped_total",
        "Log lines that could not be written to standard error.",
        daemon.log_lines_dropped,
    )
    yield gauge("gpu_plugin_scrape_duration_seconds", "Duration of making the text of the last scrape.", scrape_seconds)


def _configuration(status: Status) -> Iterator[Family]:
    configuration, cdi = status.configuration, status.cdi
    yield counter(
        "gpu_plugin_config_reloads_total",
        "Times the configuration was read, by outcome.",
        [(labelled(result=result), count) for result, count in configuration.reloads.items()],
    )
    yield gauge(
        "gpu_plugin_config_refused", "Whether the requested configuration is not in force.", bool(configuration.refused)
    )
    yield gauge(
        "gpu_plugin_config_label_unheard",
        "Whether a change of the node label that names the configuration would go unnoticed now.",
        bool(configuration.unheard),
    )
    yield gauge(
        "gpu_plugin_cdi_ready",
        "Whether the newest CDI specifications are valid and written; only if containers get CDI names.",
        None if cdi is None else not cdi.trouble,
    )


def _driver(status: Status, nvml: Mapping[str, Any]) -> Iterator[Family]:
    driver = status.driver
    yield gauge(
        "gpu_plugin_driver_up",
        "Whether any GPU can be reached; no series on a node without GPUs.",
        None if driver.no_gpu else driver.answered and not driver.trouble,
    )
    yield gauge(
        "gpu_plugin_restart_needed",
        "Whether a hung call about one GPU keeps others from being found or released until the plugin is restarted.",
        bool(driver.restart),
    )
    if not nvml:
        return
    calls = [(labelled(call=call), each) for call, each in nvml["calls"].items()]
    yield histogram(
        "gpu_plugin_nvml_call_duration_seconds",
        "Duration of calls to NVML that have returned, except the wait for events.",
        [(labels, each["seconds"]) for labels, each in calls if each["seconds"] is not None],
    )
    yield counter(
        "gpu_plugin_nvml_call_errors_total",
        "Calls that NVML refused, by return code, except unsupported calls.",
        _errors(calls),
    )
    yield counter(
        "gpu_plugin_nvml_calls_hung_total",
        "Calls to NVML that took longer than the timeout, including calls that have not returned.",
        [(labels, each["hung"]) for labels, each in calls],
    )
    yield gauge(
        "gpu_plugin_nvml_calls_hanging", "Calls to NVML that have not returned within the timeout.", nvml["hanging"]
    )


def _devices(resources: Mapping[str, Resource]) -> Iterator[Family]:
    yield gauge(
        "gpu_plugin_devices",
        "Devices listed to the kubelet, by resource and state.",
        [
            (labelled(resource=name, state=state), count)
            for name, each in resources.items()
            for state, count in (
                ("healthy", each.healthy),
                ("unhealthy", each.devices - each.healthy - each.retired),
                ("retired", each.retired),
            )
        ],
    )
    yield gauge(
        "gpu_plugin_devices_held_back",
        "Unhealthy devices that only an operator's order keeps from pods: their hardware has no fault.",
        [(labelled(resource=name), each.held_back) for name, each in resources.items()],
    )
    yield gauge(
        "gpu_plugin_devices_faulty",
        "Unhealthy devices that a fault of their GPU or MIG device keeps from pods.",
        [(labelled(resource=name), each.faulty) for name, each in resources.items()],
    )


def _pods(pods: Pods | None, held: Iterable[Held]) -> Iterator[Family]:
    if pods is None:
        return
    yield gauge("gpu_plugin_pod_device", "A container holds a device.", _held(held))
    yield gauge(
        "gpu_plugin_pod_attribution_up",
        "Whether the PodResources service of the kubelet answers which pods hold devices.",
        not pods.trouble,
    )
    yield counter(
        "gpu_plugin_pod_resources_requests_total",
        "Requests to the PodResources service of the kubelet, by result.",
        [
            (labelled(result="answered"), pods.requests - pods.failures),
            (labelled(result="failed"), pods.failures),
        ],
    )


def _held(devices: Iterable[Held]) -> Iterator[tuple[str, int]]:
    """Return a sample for each device and container. Texts that several devices share are made once."""

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


def _resources(status: Status, counted: Named) -> Iterator[Family]:
    """Return the traffic between plugin and kubelet of each resource. `counted` has served and former resources."""
    named = [(labelled(resource=name), each) for name, each in counted.items()]
    yield counter(
        "gpu_plugin_allocate_requests_total",
        "Allocate calls that were answered.",
        [(labels, each.get("allocations", 0)) for labels, each in named],
    )
    yield counter(
        "gpu_plugin_allocated_devices_total",
        "Devices given to containers in Allocate calls.",
        [(labels, each.get("allocated_devices", 0)) for labels, each in named],
    )
    yield gauge(
        "gpu_plugin_registered",
        "Whether the kubelet has a resource: it accepted the registration and reads the list of devices.",
        [(labelled(resource=name), each.registration.registered) for name, each in status.resources.items()],
    )
    yield counter(
        "gpu_plugin_registrations_total",
        "Attempts to register a resource with the kubelet, by result.",
        [
            (f"{labels},{labelled(result=result)}", each.get("registrations", {}).get(result, 0))
            for labels, each in named
            for result in ("accepted", "failed")
        ],
    )
    yield gauge(
        "gpu_plugin_list_streams",
        "ListAndWatch streams of the kubelet that are open.",
        [(labelled(resource=name), counted[name].get("streams", 0)) for name in status.resources],
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
        "Time from the arrival of a request of the kubelet to its answer.",
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
    """Return a sample for each error code of calls, with the labels of the call."""
    for labels, each in calls:
        for code, count in each["errors"].items():
            yield f"{labels},{labelled(code=code)}", count
