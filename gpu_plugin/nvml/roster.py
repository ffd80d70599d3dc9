"""The GPUs that are watched, what they are known by, and which of them are released."""

import msgspec

from gpu_plugin.nvml.bus import Bus
from gpu_plugin.nvml.port import Handle
from gpu_plugin.nvml.release import Released
from gpu_plugin.nvml.watched import Watched


class Roster(msgspec.Struct):
    """What the parts of the monitor share. `wanted` is released, `untouched` what the open driver has no handle of."""

    wanted: Released
    untouched: Released = msgspec.field(default_factory=Released)
    gpus: list[Watched] = msgspec.field(default_factory=list)
    by_handle: dict[Handle, str] = msgspec.field(default_factory=dict)
    """Uuids by every handle of this opening of the driver: an event may name one that is not the newest."""
    bus: Bus = msgspec.field(default_factory=Bus)

    def at_rest(self, uuid: str) -> bool:
        """Whether a GPU is released, or not resumed yet: neither is it asked anything, nor is anything told of it."""
        return uuid in self.wanted or uuid in self.untouched

    def watched(self) -> list[Watched]:
        """The GPUs that are asked, and told of, now."""
        return [watched for watched in self.gpus if not self.at_rest(watched.gpu.uuid)]

    @property
    def in_use(self) -> bool:
        """Whether there is a GPU to be reached through the driver: else nobody is to have it open."""
        return self.wanted.leaves(watched.gpu for watched in self.gpus)

    def owner(self, uuid: str) -> str:
        """The uuid of the GPU that goes by it, or that has a MIG device which does; empty if none."""
        for watched in self.gpus:
            if watched.gpu.uuid == uuid or any(device.uuid == uuid for device in watched.gpu.mig_devices):
                return watched.gpu.uuid
        return ""

    def know_handles(self) -> None:
        """Takes note of the handles that GPUs have now."""
        self.by_handle |= {watched.handle: watched.gpu.uuid for watched in self.gpus if watched.handle is not None}

    def forget(self) -> None:
        """Gives up what does not outlive a driver that is closed: what comes next leaves alone what is released now."""
        self.untouched = self.wanted
        self.by_handle.clear()
        for watched in self.gpus:
            watched.forget()
