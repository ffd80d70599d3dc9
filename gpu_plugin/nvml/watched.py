"""What the monitor keeps of each GPU."""

from dataclasses import dataclass

from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.observation import Sample
from gpu_plugin.nvml.port import Handle
from gpu_plugin.threads import Job

PLACEHOLDER = "GPU-unreadable-"
"""Begins the made-up uuid of a GPU whose own is not known yet. Such a device is never healthy, so no pod can hold it."""


@dataclass(frozen=True, slots=True)
class Reached:
    """A GPU was asked for a new handle, and looked at through it."""

    handle: Handle
    sample: Sample


@dataclass(slots=True)
class Watched:
    """A GPU with its handle (None: out of reach) and the call to it that is under way, if any."""

    gpu: Gpu
    handle: Handle | None
    pending: "Job[Sample] | Job[Reached] | Job[tuple[Handle, Gpu]] | Job[str] | None" = None
    events: bool = False
    refused: str = ""
    """Why events were refused last, said once."""
