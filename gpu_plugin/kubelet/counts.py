"""Counts of the traffic between the plugin and the kubelet, for all resources, since the start of the process."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from gpu_plugin.runtime.histogram import Histogram

# Methods with one answer. ListAndWatch, which lasts, is counted by its streams and lists.
METHODS = ("Allocate", "GetPreferredAllocation", "GetDevicePluginOptions", "PreStartContainer")

# Upper bounds of the histogram in seconds. An answer takes half a millisecond, and the kubelet waits without a deadline.
DURATIONS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)

# The results of a registration.
ACCEPTED = "accepted"
FAILED = "failed"


class KubeletCounts:
    """Requests, their durations and errors, registrations, streams and lists. Only `allocated` may be called on any thread.

    Attributes:
        durations: durations of answered and refused requests, by method.
        errors: numbers of refused and failed requests, by method and name of the gRPC status.
        registrations: numbers of registrations, by resource and result.
        streams: numbers of open ListAndWatch streams of the kubelet, by resource.
        lists: numbers of device lists sent on any stream, by resource.
        requests: numbers of requests on connections of the kubelet, by resource.
    """

    def __init__(self) -> None:
        self.durations = {method: Histogram(DURATIONS) for method in METHODS}
        self.errors: Counter[tuple[str, str]] = Counter()
        self.registrations: Counter[tuple[str, str]] = Counter()
        self.streams: dict[str, int] = {}
        self.lists: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self._allocations: Counter[str] = Counter()
        self._devices: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def timed(self, method: str) -> Iterator[None]:
        """Measure the duration of a request, and count its error."""
        began = time.monotonic()
        try:
            yield
        except GRPCError as error:
            self.errors[method, error.status.name] += 1
            raise
        except Exception:
            self.errors[method, Status.UNKNOWN.name] += 1  # the status that grpclib answers
            raise
        finally:
            self.durations[method].observe(time.monotonic() - began)

    def allocated(self, resource: str, devices: int) -> None:
        """Count an answered Allocate with its number of devices. Thread-safe, because long requests run on threads."""
        with self._lock:
            self._allocations[resource] += 1
            self._devices[resource] += devices

    def as_data(self) -> Mapping[str, Any]:
        """Return the counts as plain data, `resources` and `methods` each by name."""
        names = {*self._allocations, *self.streams, *self.lists, *(resource for resource, _ in self.registrations)}
        return {
            "methods": {
                method: {
                    "seconds": durations.as_data(),
                    "errors": {code: count for (of, code), count in sorted(self.errors.items()) if of == method},
                }
                for method, durations in self.durations.items()
            },
            "resources": {
                name: {
                    "allocations": self._allocations[name],
                    "allocated_devices": self._devices[name],
                    "registrations": {result: self.registrations[name, result] for result in (ACCEPTED, FAILED)},
                    "streams": self.streams.get(name, 0),
                    "lists": self.lists[name],
                }
                for name in sorted(names)
            },
        }
