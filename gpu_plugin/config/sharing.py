"""What the config file asks for beyond single values: shared devices, names by pattern, verdicts. Immutable, already checked."""

import msgspec

TIME_SLICING = "time-slicing"
MPS = "mps"

SECTIONS = {"timeSlicing": TIME_SLICING, "mps": MPS}
"""Keys of the section `sharing` of a config file, and the strategy that each stands for."""

DISTRIBUTED = "distributed"
PACKED = "packed"
SPREAD = "spread"
"""What --shared-devices-allocation-policy may be; `placement.shared` has what each does."""


class DeviceChoice(msgspec.Struct, frozen=True):
    """Which devices of a resource an entry takes: the first `count` of those left, those `listed`, or all if neither is set.

    A listed one is a GPU index ("0"), a MIG index ("0:1"), GPU-<uuid>, MIG-<uuid> or MIG-GPU-<uuid>/<gi>/<ci>.
    """

    count: int = 0
    listed: tuple[str, ...] = ()

    @property
    def everything(self) -> bool:
        """Whether every device of the resource is meant."""
        return not self.count and not self.listed


class MpsLimits(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """What each client of an MPS daemon may use at most; None: an equal share among the replicas.

    `active_thread_percentage` is 1 to 100; `pinned_memory` is MiB of device memory. A file has
    those that are given, with its own spelling.
    """

    active_thread_percentage: float | None = None
    pinned_memory: int | None = None


class SharedResource(msgspec.Struct, frozen=True):
    """One entry under `sharing`: `devices` of the resource `name` are offered `replicas` times each as `offered_as`.

    With one replica the devices are not shared: the entry only keeps them from the other entries, and may rename them.
    Both names are whole, as in nvidia.com/gpu; `strategy` is TIME_SLICING or MPS. `single_requests` refuses a container
    that asks for more than one (failRequestsGreaterThanOne).
    """

    name: str
    offered_as: str
    replicas: int
    strategy: str = TIME_SLICING
    devices: DeviceChoice = DeviceChoice()
    single_requests: bool = False
    limits: MpsLimits = MpsLimits()


class NamePattern(msgspec.Struct, frozen=True):
    """Whatever matches `pattern` ("*" stands for any text, all else for itself) is counted under `name`, a whole one."""

    pattern: str
    name: str


class Verdicts(msgspec.Struct, frozen=True):
    """The operator's own words, which `health_section` lists: on Xids, on classes of Xids, and on health signals, by name."""

    xids: tuple[tuple[int, str], ...] = ()
    xid_classes: tuple[tuple[str, str], ...] = ()
    signals: tuple[tuple[str, str], ...] = ()
