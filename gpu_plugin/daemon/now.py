"""The present state of the daemon, which its parts set and read."""

import time

import msgspec

from gpu_plugin.devices.node import Node
from gpu_plugin.nvml.monitor import Monitor


class Now(msgspec.Struct):
    """What the daemon and its discovery have found out so far.

    Attributes:
        waits_for: which other daemon this one waits for, in a sentence; empty while it has the node to itself.
        memory: why it is not known what earlier processes remembered, in a sentence; empty once it is.
        driver: why GPUs could not be found at the start, empty once they were, and None while the first attempt is under way.
        no_gpu: the reason why no GPU is to be expected on this node; empty if there may be one.
        unoffered: why what was found is not offered as the settings ask; empty where it is.
        takes_over: whether a former daemon still answers the kubelet, until this one has registered.
        node: the hardware, as it was found last.
        monitor: looks at the hardware; None until the daemon has the node.
        started: Unix time in seconds of the process's start.
    """

    waits_for: str = ""
    memory: str = ""
    driver: str | None = None
    no_gpu: str = ""
    unoffered: str = ""
    node: Node = msgspec.field(default_factory=Node)
    standby: bool = False
    """Whether the daemon that is waited for uses the same state directory."""
    takes_over: bool = False
    monitor: Monitor | None = None
    started: float = msgspec.field(default_factory=time.time)

    @property
    def driver_trouble(self) -> str | None:
        """Why no GPU can be reached now; empty if one can or none is expected, None while the first attempt is under way."""
        if self.no_gpu:
            return ""
        return self.monitor.trouble if self.monitor is not None and self.driver == "" else self.driver
