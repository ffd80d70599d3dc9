"""The metrics of what is served: devices, the pods that hold them, and what passes between the plugin and the kubelet."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from gpu_plugin.telemetry.metrics.exposition import Family, counter, gauge, histogram, labelled

Named = Mapping[str, Mapping[str, Any]]
"""What is said of each resource, by its name."""


KNOWN = 1024
"""Labels of containers and of GPUs that are made text once, and not again for each device."""


def families(status: Mapping[str, Any]) -> Iterator[Family]:
    """Metric families of what is served, each made when its turn comes."""
    kubelet = status.get("counters", {}).get("kubelet", {})
    counted: Named = {name: {} for name in status["resources"]} | kubelet.get("resources", {})
    yield from _devices(status["resources"])
    yield from _pods(status.get("attribution"))
    yield from _allocations(counted)
    yield from _registrations(status, counted)
    yield from _calls(kubelet.get("methods", {}))


def _devices(resources: Named) -> list[Family]:
    return [
        gauge(
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
        ),
        gauge(
            "gpu_plugin_devices_held_back",
            "Unhealthy devices that nothing but an operator's order keeps from pods: their hardware has no fault.",
            [(labelled(resource=name), counts.get("held_back")) for name, counts in resources.items()],
        ),
    ]


def _pods(attribution: Mapping[str, Any] | None) -> list[Family]:
    if attribution is None:
        return []
    return [
        gauge("gpu_plugin_pod_device", "A container holds a device.", _held(attribution["devices"])),
        gauge(
            "gpu_plugin_pod_attribution_up",
            "Whether the PodResources service of the kubelet says which pods hold what.",
            int(not attribution["trouble"]),
        ),
        counter(
            "gpu_plugin_pod_resources_requests_total",
            "Questions to the PodResources service of the kubelet, by whether they were answered.",
            [
                (labelled(result="answered"), attribution["questions"] - attribution["failures"]),
                (labelled(result="failed"), attribution["failures"]),
            ],
        ),
    ]


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


def _allocations(counted: Named) -> list[Family]:
    return [
        counter(
            "gpu_plugin_allocate_requests_total",
            "Allocate calls that were answered.",
            [(labelled(resource=name), each.get("allocations", 0)) for name, each in counted.items()],
        ),
        counter(
            "gpu_plugin_allocated_devices_total",
            "Devices given to containers in them.",
            [(labelled(resource=name), each.get("allocated_devices", 0)) for name, each in counted.items()],
        ),
    ]


def _registrations(status: Mapping[str, Any], counted: Named) -> list[Family]:
    return [
        gauge(
            "gpu_plugin_registered",
            "Whether the kubelet is told of a resource's devices: it took the registration and reads the list.",
            [
                (labelled(resource=name), int(each["registered"]))
                for name, each in status["kubelet"]["resources"].items()
            ],
        ),
        counter(
            "gpu_plugin_registrations_total",
            "Attempts to register a resource with the kubelet, by what came of them.",
            [
                (labelled(resource=name, result=result), each.get("registrations", {}).get(result, 0))
                for name, each in counted.items()
                for result in ("accepted", "failed")
            ],
        ),
        gauge(
            "gpu_plugin_list_streams",
            "ListAndWatch streams of the kubelet that are open.",
            [(labelled(resource=name), counted[name].get("streams", 0)) for name in status["resources"]],
        ),
        counter(
            "gpu_plugin_lists_sent_total",
            "Lists of devices that were sent to the kubelet.",
            [(labelled(resource=name), each.get("lists", 0)) for name, each in counted.items()],
        ),
    ]


def _calls(methods: Named) -> list[Family]:
    return [
        histogram(
            "gpu_plugin_rpc_duration_seconds",
            "From the arrival of a request of the kubelet to its answer.",
            [(labelled(method=method), each["seconds"]) for method, each in methods.items()],
        ),
        counter(
            "gpu_plugin_rpc_errors_total",
            "Requests of the kubelet that were refused or failed, by gRPC status.",
            [
                (labelled(method=method, code=code), count)
                for method, each in methods.items()
                for code, count in each["errors"].items()
            ],
        ),
    ]
