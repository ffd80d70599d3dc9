"""Measures the driver's calls: their durations, the errors, and the calls that hang."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from gpu_plugin.config.settings import SettingsStore
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.port import NVML_FUNCTIONS, Driver, NvmlError
from gpu_plugin.runtime.histogram import Histogram

# Seconds: most getters take 2 µs, the MIG mode takes 0.2 ms, and the first call about a sleeping GPU takes seconds
DURATIONS = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)

WAIT = "wait"  # this call is expected to block for its timeout

# By call, error codes that are not counted because they only say that an object does not exist
_ORDINARY: Mapping[str, frozenset[int]] = {
    WAIT: frozenset({Return.TIMEOUT}),
    "mig_handle": frozenset({Return.NOT_FOUND}),
    "nvlink_remote_bus_id": frozenset({Return.INVALID_ARGUMENT}),
}

_KNOWN = frozenset(Return)


class CallTimes:
    """Records all calls. Thread-safe."""

    def __init__(self, settings: SettingsStore, clock: Callable[[], float] = time.monotonic) -> None:
        """Store the settings, which have the seconds after which a call counts as hung, and a steady clock in seconds."""
        self._settings = settings
        self._clock = clock
        self._durations: dict[str, Histogram] = {}
        self._errors: Counter[tuple[str, str]] = Counter()
        self._hung: Counter[str] = Counter()
        self._out: dict[int, tuple[str, float, float]] = {}
        self._tickets = itertools.count()
        self._lock = threading.Lock()

    def timed(self, driver: Driver) -> Driver:
        """Return a driver that makes the calls of `driver` and records them."""
        timed = Driver()
        vars(timed).update({name: self._around(name, getattr(driver, name)) for name in NVML_FUNCTIONS})
        return timed

    def told(self) -> Mapping[str, Any]:
        """Return plain data: `calls` by name with `seconds`, `errors` by code and `hung`, and the number `hanging` now.

        Calls that were never made are not included. `wait` has no `seconds`, since it is expected to wait.
        """
        now, timeout = self._clock(), self._settings.current.nvml_timeout
        with self._lock:
            hanging = Counter(call for call, began, allowed in self._out.values() if now - began >= timeout + allowed)
            return {
                "calls": {
                    call: {
                        "seconds": durations.as_data() if call != WAIT else None,
                        "errors": {code: count for (of, code), count in sorted(self._errors.items()) if of == call},
                        "hung": self._hung[call] + hanging[call],
                    }
                    for call, durations in sorted(self._durations.items())
                },
                "hanging": sum(hanging.values()),
            }

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            ticket, allowed = next(self._tickets), arguments[-1] / 1000 if name == WAIT else 0.0
            with self._lock:
                self._durations.setdefault(name, Histogram(DURATIONS))
                self._out[ticket] = name, self._clock(), allowed
            try:
                return call(*arguments)
            except NvmlError as error:
                if not error.unsupported and error.code not in _ORDINARY.get(name, ()):
                    label = Return(error.code).name.lower() if error.code in _KNOWN else str(error.code)
                    with self._lock:
                        self._errors[name, label] += 1
                raise
            finally:
                now, timeout = self._clock(), self._settings.current.nvml_timeout
                with self._lock:
                    _, began, _ = self._out.pop(ticket)
                    self._durations[name].observe(now - began)
                    self._hung[name] += now - began >= timeout + allowed

        return timed
