"""The present state of the daemon. Its parts set and read it."""

import time

import msgspec

from gpu_plugin.devices.node import Node
from gpu_plugin.nvml.monitor import Monitor


class Now(msgspec.Struct):
    """The present state of the daemon and its discovery.

    Attributes:
        waits_for: a sentence about the other daemon that this daemon waits for; empty while no other daemon has the node.
        memory: a sentence with the reason why the memory of earlier processes is not known; empty if it is known.
        driver: why no GPU could be found at the start; empty after GPUs were found, None during the first attempt.
        no_gpu: why no GPU is expected on this node; empty if there may be a GPU.
        unoffered: why the hardware is not offered as the settings ask; empty if it is.
        takes_over: whether a former daemon still answers the kubelet because this daemon has not registered yet.
        node: the hardware, as it was found last.
        monitor: the monitor of the hardware; None until the daemon has the node.
        started: Unix time in seconds of the process's start.
    """

    waits_for: str = ""
    memory: str = ""
    driver: str | None = None
    no_gpu: str = ""
    unoffered: str = ""
    node: Node = msgspec.field(default_factory=Node)
    standby: bool = False
    """Whether this daemon waits, without a claim, for a daemon with the same state directory, or hands the node over."""
    takes_over: bool = False
    monitor: Monitor | None = None
    started: float = msgspec.field(default_factory=time.time)

    @property
    def driver_trouble(self) -> str | None:
        """Why no GPU can be reached now; empty if a GPU can be reached or none is expected, None during the first attempt."""
        if self.no_gpu:
            return ""
        return self.monitor.trouble if self.monitor is not None and self.driver == "" else self.driver
