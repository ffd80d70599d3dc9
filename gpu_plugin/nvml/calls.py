"""Calls to the driver on daemon threads, and whether any of them has not come back: NVML must not be closed under one."""

from collections.abc import Callable
from typing import Any, TypeVar

from gpu_plugin.runtime.threads import Job, Workers

T = TypeVar("T")


class DriverCalls:
    """Makes calls at once where they take their time, and keeps count of those that have not come back."""

    def __init__(self) -> None:
        self._workers = Workers("nvml-calls")
        self._out: set[Job[Any]] = set()

    @property
    def under_way(self) -> bool:
        """Whether a call was handed over that has not come back, whoever still waits for it."""
        return any(not job.done.done() for job in self._out)

    def begin(self, call: Callable[[], T]) -> Job[T]:
        """Hands a call over."""
        job = self._workers.begin(call)
        self._out.add(job)
        job.done.add_done_callback(lambda _: self._out.discard(job))
        return job

    def begin_unrelated(self, call: Callable[[], T]) -> Job[T]:
        """As `begin`, for a call that is none of the driver's: whether it comes back is nothing to NVML."""
        return self._workers.begin(call)

    def close(self) -> None:
        """Lets idle threads end; a hung one is a daemon and ends with the process."""
        self._workers.close()
