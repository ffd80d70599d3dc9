"""What the monitor keeps of each GPU."""

import logging
from dataclasses import dataclass, replace

from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.observation import Fabric, Sample
from gpu_plugin.nvml.mig import UNREADABLE_LOOKS, cut
from gpu_plugin.nvml.port import Handle
from gpu_plugin.nvml.sample import Look
from gpu_plugin.threads import Job

log = logging.getLogger(__name__)

PLACEHOLDER = "GPU-unreadable-"
"""Begins the made-up uuid of a GPU whose own is not known yet. Such a device is never healthy, so no pod can hold it."""


@dataclass(slots=True)
class Watched:
    """A GPU with its handle (None: out of reach) and the call to it that is under way, if any."""

    gpu: Gpu
    handle: Handle | None
    pending: "Job[Look | tuple[Handle, Gpu]] | Job[tuple[Handle, Gpu]] | Job[str] | None" = None
    events: bool = False
    refused: str = ""
    """Why events were refused last, said once."""
    divisible: bool = True
    """Whether it can be cut into MIG devices, as far as is known: a part that never can is not asked again."""
    unreadable_looks: int = 0
    """Looks in a row in which a MIG device of it was unreadable."""
    untold: str = ""
    """Why the last look did not tell how it is cut, said once."""
    unsupported: frozenset[str] = frozenset()
    """Fields of a Sample that it never answers, learnt since it was described: not asked for again."""
    binding: int | None = None
    """The last binding that the host told of it."""
    asked_under: int | None = None
    """The binding as of when the driver was asked about it last."""
    nvlinks: tuple[bool, ...] | None = None
    """Which of its NVLinks were active when it last said so, since it was described."""
    fabric: Fabric | None = None
    """Likewise how far it had come in joining its fabric, without regard to how sound that is."""
    vanished_since: float | None = None
    """Since when it is not there any more, in seconds of the event loop's clock; None while it is."""

    @property
    def named(self) -> bool:
        """Whether it goes by a uuid of its own."""
        return not self.gpu.uuid.startswith(PLACEHOLDER)

    def reached(self, now: float, timeout: float) -> bool:
        """Whether it answered the last time, and has not let a call wait for `timeout` seconds since."""
        return self.handle is not None and (self.pending is None or now - self.pending.started < timeout)

    def forget(self) -> None:
        """Gives up what does not outlive a driver that is closed."""
        self.handle, self.pending, self.events, self.unsupported = None, None, False, frozenset()

    def described(self, handle: Handle, gpu: Gpu) -> None:
        """Takes in how the driver describes it now, and through which handle it is reached."""
        self.handle, self.gpu, self.events, self.unsupported = handle, gpu, False, frozenset()
        self.nvlinks = self.fabric = None  # whatever it says next, the links may have been read before that was so

    def relinked(self, seen: Sample) -> bool:
        """Takes in which NVLinks are active, and how far it has joined its fabric. Returns whether that is news."""
        before = self.nvlinks, self.fabric
        if seen.nvlinks is not None:
            self.nvlinks = seen.nvlinks
        if seen.fabric is not None:
            self.fabric = replace(seen.fabric, health_mask=0, summary=0)
        return (self.nvlinks, self.fabric) != before

    def recut(self, found: Look) -> bool:
        """Takes in how a look found the GPU to be cut. Returns whether another look soon would settle something."""
        self.divisible = found.divisible
        if found.untold and found.untold != self.untold:
            log.warning("GPU %s: how it is cut into MIG devices is not known now: %s", self.gpu.uuid, found.untold)
        self.untold = found.untold
        partition = found.partition
        if partition is None:
            return False
        if partition.unreadable and not self.unreadable_looks:
            for index, why in partition.unreadable.items():
                log.warning("GPU %s: MIG device %d cannot be read: %s", self.gpu.uuid, index, why)
        self.unreadable_looks = self.unreadable_looks + 1 if partition.unreadable else 0
        gpu = cut(self.gpu, partition, hold=self.unreadable_looks < UNREADABLE_LOOKS)
        if gpu is self.gpu:
            return 0 < self.unreadable_looks < UNREADABLE_LOOKS
        self.unsupported = frozenset()  # some questions go unanswered while a GPU is cut, and only then
        if gpu.mig_enabled != self.gpu.mig_enabled:
            self.events = False  # the mode is switched by a reset, which a registration may not survive
        into = ", ".join(device.profile for device in gpu.mig_devices) or "no MIG devices"
        log.info("GPU %s: %s", gpu.uuid, f"MIG mode, cut into {into}" if gpu.mig_enabled else "MIG mode is off")
        self.gpu = gpu
        return True
