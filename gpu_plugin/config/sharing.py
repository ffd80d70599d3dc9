"""Settings of the config file that are not single values: shared devices, names by pattern, verdicts. Immutable and checked."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from gpu_plugin.config.device_names import model_pattern, resource_name
from gpu_plugin.config.values import memory_mib, percentage

TIME_SLICING = "time-slicing"
MPS = "mps"

SECTIONS = {
    "timeSlicing": TIME_SLICING,
    "mps": MPS,
}  # the strategy of each key in the section `sharing` of a config file

# The values of --shared-devices-allocation-policy, which `placement.shared` implements.
DISTRIBUTED = "distributed"
PACKED = "packed"
SPREAD = "spread"


class DeviceChoice(msgspec.Struct, frozen=True):
    """The devices of a resource in an entry: the first `count` devices left, the `listed` devices, or all if neither is set.

    A listed device is a GPU index ("0"), a MIG index ("0:1"), GPU-<uuid>, MIG-<uuid> or MIG-GPU-<uuid>/<gi>/<ci>.
    """

    count: int = 0
    listed: tuple[str, ...] = ()

    @property
    def everything(self) -> bool:
        """Whether the entry has every device of the resource."""
        return not self.count and not self.listed


class MpsLimits(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The limits of each client of an MPS daemon; None for an equal share among the replicas.

    `active_thread_percentage` is 1 to 100; `pinned_memory` is in MiB of device memory. A file has only the given limits, in camel
    case.
    """

    active_thread_percentage: Annotated[
        float | None, percentage, "percent of a GPU's threads that each client may use"
    ] = None
    pinned_memory: Annotated[
        int | None, memory_mib, "device memory that each client may use: 8Gi, 8192Mi, or a number of MiB"
    ] = None


class SharedResource(msgspec.Struct, frozen=True):
    """One entry under `sharing`: `devices` of the resource `name` are offered `replicas` times each as `offered_as`.

    With one replica the devices are not shared: the entry only excludes them from other entries, and may rename them.
    Both names have a domain, as in nvidia.com/gpu. `strategy` is TIME_SLICING or MPS. With `single_requests`, a container that
    requests more than one device is refused (failRequestsGreaterThanOne).
    """

    name: str
    offered_as: str
    replicas: int
    strategy: str = TIME_SLICING
    devices: DeviceChoice = DeviceChoice()
    single_requests: bool = False
    limits: MpsLimits = MpsLimits()


class NamePattern(msgspec.Struct, frozen=True):
    """Devices that match `pattern` belong to the resource `name`, which has a domain.

    "*" matches any text. No other character is special.
    """

    pattern: Annotated[str, model_pattern, '"*" stands for any text, all else for itself']
    name: Annotated[str, resource_name, "the resource; without a domain, one of nvidia.com/"]


class Verdicts(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The operator's verdicts on Xids, classes of Xids and health signals: the section `health` of a config file."""

    xid: Mapping[int, str] = {}
    xid_class: Mapping[str, str] = {}
    signals: Mapping[str, str] = {}
