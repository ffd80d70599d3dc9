"""Requests for looks at GPUs before the next poll. They wake the monitor."""

import math

import anyio

from gpu_plugin.nvml.schedule import Schedule
from gpu_plugin.runtime.pulse import Pulse


class LookRequests:
    """Requests by the parts of the monitor. `made` rings after each. Everything runs on the event loop."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.made = Pulse()

    def all_gpus(self) -> None:
        """Request a full look at every GPU now. During a turn, the request is for the next turn."""
        self._schedule.everyone(-math.inf)
        self.made.ring()

    def event_arrived(self, uuid: str) -> None:
        """Request a look at the GPU of an event, or at all GPUs if it is not known (`schedule.UNKNOWN_GPU`)."""
        if not self._schedule.expects(uuid):
            self._schedule.event_arrived(uuid, anyio.current_time())
            self.made.ring()
