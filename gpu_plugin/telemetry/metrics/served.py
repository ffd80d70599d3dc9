"""The metrics of what is served: devices, the pods that hold them, and what passes between the plugin and the kubelet."""

from collections.abc import Mapping
from typing import Any

from gpu_plugin.telemetry.metrics.family import Family, counter, gauge, histogram, labelled

Named = Mapping[str, Mapping[str, Any]]
"""What is said of each resource, by its name."""


def families(status: Mapping[str, Any]) -> list[Family]:
    """All of them."""
    kubelet = status.get("counters", {}).get("kubelet", {})
    counted: Named = {name: {} for name in status["resources"]} | kubelet.get("resources", {})
    return [
        *_devices(status["resources"]),
        *_pods(status.get("attribution")),
        *_allocations(counted),
        *_registrations(status, counted),
        *_calls(kubelet.get("methods", {})),
    ]


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
        )
    ]


def _pods(attribution: Mapping[str, Any] | None) -> list[Family]:
    if attribution is None:
        return []
    return [
        gauge(
            "gpu_plugin_pod_device",
            "A container holds a device.",
            [
                (labelled(namespace=namespace, pod=pod, container=container, **device), 1)
                for device, holders in attribution["devices"]
                for namespace, pod, container in holders
            ],
        ),
        gauge(
            "gpu_plugin_pod_attribution_up",
            "Whether the PodResources service of the kubelet says which pods hold what.",
            [("", int(not attribution["trouble"]))],
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
