"""What the monitor keeps of each GPU."""

import logging
from typing import Any

import msgspec
from msgspec.structs import replace

from gpu_plugin.devices.device import is_placeholder
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.observation import Fabric, Fault, Sample
from gpu_plugin.nvml.event_set import Registered
from gpu_plugin.nvml.mig import UNREADABLE_LOOKS, with_partition
from gpu_plugin.nvml.port import Handle
from gpu_plugin.nvml.sample import Look
from gpu_plugin.runtime.threads import Job

log = logging.getLogger(__name__)

Probed = tuple[Handle, Gpu]  # what a probe brought: the handle that was got again, and the GPU as it describes itself


class LookResult(msgspec.Struct, frozen=True):
    """What a GPU's turn found.

    `sample` is None while a call is under way that has not been out for too long, and where the GPU was described instead.
    """

    sample: Sample | None = None
    repartitioned: bool = False  # it is repartitioned: there may be other device nodes
    links_changed: bool = False  # the links between GPUs are to be read again
    register_events: bool = False
    """It is reached through a new handle, or was reset: what it was asked to report is asked for again."""
    look_soon: bool = False  # another look within a second would settle something


class Watched(msgspec.Struct):
    """A GPU with its handle (None: out of reach) and the call about it that is under way: `looking` or `registering`."""

    gpu: Gpu
    handle: Handle | None
    looking: "Job[Look] | Job[Probed] | None" = None
    registering: "Job[Registered] | None" = None
    turn: int = 0  # looks that were begun, by which it is told which of them are full
    counting: int | None = None  # the last word on which counters can be compared (`Sample.counting`)
    partitionable: bool = True
    """Whether it can be partitioned into MIG devices, as far as is known: a part that never can is not asked again."""
    unreadable_looks: int = 0  # looks in a row in which a MIG device of it was unreadable
    partition_trouble: str = ""  # why the last look did not tell how it is partitioned, said once
    unsupported: frozenset[str] = frozenset()
    """Fields of a Sample that it never answers, learnt since it was described: not asked for again."""
    unanswered: frozenset[str] | None = None
    """The same for whoever asks what it tells: kept while it cannot be looked at; None before the first look at it."""
    binding: int | None = None  # the last binding that the host told of it
    asked_under: int | None = None  # the binding as of when the driver was asked about it last
    # Which of its NVLinks were active when it last said so, since it was described.
    nvlinks: tuple[bool, ...] | None = None
    # Likewise how far it had come in joining its fabric, without regard to how sound that is.
    fabric: Fabric | None = None
    vanished_since: float | None = None
    """Since when it is not there any more, in seconds of the event loop's clock; None while it is."""

    @property
    def named(self) -> bool:
        """Whether it goes by a uuid of its own."""
        return not is_placeholder(self.gpu.uuid)

    @property
    def pending(self) -> "Job[Any] | None":
        """The call about it that was begun and whose outcome has not been taken in."""
        return self.looking or self.registering

    def reached(self, now: float, timeout: float) -> bool:
        """Whether it answered the last time, and has not let a call wait for `timeout` seconds since."""
        return self.handle is not None and (self.pending is None or now - self.pending.started < timeout)

    def forget(self) -> None:
        """Gives up what does not outlive a driver that is closed."""
        self.handle, self.looking, self.registering, self.unsupported = None, None, None, frozenset()
        self.counting = None

    def described(self, handle: Handle, gpu: Gpu) -> None:
        """Takes in how the driver describes it now, and through which handle it is reached."""
        self.handle, self.gpu = handle, gpu
        self.nvlinks = self.fabric = None  # whatever it says next, the links may have been read before that was so

    def saw(self, sample: Sample, now: float) -> LookResult:
        """Takes in that there is nothing to be had of it but this sample, by which it is out of reach."""
        self.handle = None
        self.dated(sample, now)
        return LookResult(sample)

    def dated(self, sample: Sample, now: float) -> None:
        """Takes in what a sample says of whether it is there, at time `now` of the event loop."""
        if sample.fault is Fault.VANISHED:
            self.vanished_since = now if self.vanished_since is None else self.vanished_since
        elif sample.fault not in (Fault.DRIVER, Fault.HUNG):  # which say nothing of whether it is there
            self.vanished_since = None

    def looked(self, found: Look, now: float) -> LookResult:
        """Takes in what a look brought at time `now` of the event loop."""
        if found.sample.fault:  # handles from before a reset are worth nothing: the next look asks for a new one
            return self.saw(found.sample, now)
        new_handle = self.handle is None
        self.handle = found.handle
        self.unsupported |= found.unsupported
        self.counting = found.sample.counting
        self.dated(found.sample, now)
        before, was_enabled = self.gpu, self.gpu.mig_enabled
        if found.gpu is not before:  # its partition or its index may have come from elsewhere meanwhile
            self.gpu = replace(
                found.gpu, index=before.index, mig_enabled=before.mig_enabled, mig_devices=before.mig_devices
            )
        soon = self._take_partition(found)
        self.unanswered = self.unsupported
        return LookResult(
            found.sample,
            repartitioned=self.gpu is not before,
            links_changed=self.links_changed(found.sample),
            # A registration does not survive the reset that a new handle may come from, or that the MIG mode is switched by.
            register_events=new_handle or self.gpu.mig_enabled != was_enabled,
            look_soon=soon,
        )

    def links_changed(self, seen: Sample) -> bool:
        """Takes in which NVLinks are active, and how far it has joined its fabric. Returns whether that is news."""
        before = self.nvlinks, self.fabric
        if seen.nvlinks is not None:
            self.nvlinks = seen.nvlinks
        if seen.fabric is not None:
            self.fabric = replace(seen.fabric, health_mask=0, summary=0)
        return (self.nvlinks, self.fabric) != before

    def _take_partition(self, found: Look) -> bool:
        """Takes in how a look found the GPU to be partitioned. Returns whether another look soon would settle something."""
        self.partitionable = found.partitionable
        if found.partition_trouble and found.partition_trouble != self.partition_trouble:
            log.warning("GPU %s: its MIG devices cannot be read now: %s", self.gpu.uuid, found.partition_trouble)
        self.partition_trouble = found.partition_trouble
        partition = found.partition
        if partition is None:
            return False
        if partition.unreadable and not self.unreadable_looks:
            for index, why in partition.unreadable.items():
                log.warning("GPU %s: MIG device %d cannot be read: %s", self.gpu.uuid, index, why)
        self.unreadable_looks = self.unreadable_looks + 1 if partition.unreadable else 0
        gpu = with_partition(self.gpu, partition, hold=self.unreadable_looks < UNREADABLE_LOOKS)
        if gpu is self.gpu:
            return 0 < self.unreadable_looks < UNREADABLE_LOOKS
        self.unsupported = frozenset()  # some questions go unanswered while a GPU is partitioned, and only then
        into = ", ".join(device.profile for device in gpu.mig_devices) or "no MIG devices"
        log.info("GPU %s: %s", gpu.uuid, f"MIG mode, partitioned into {into}" if gpu.mig_enabled else "MIG mode is off")
        self.gpu = gpu
        return True
