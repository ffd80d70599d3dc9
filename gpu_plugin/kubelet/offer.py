"""The offer: a node's resources under some settings, without health and without the devices that pods hold. No I/O."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from gpu_plugin.config.choices import Registry
from gpu_plugin.config.settings import Settings
from gpu_plugin.config.sharing import DISTRIBUTED, MPS
from gpu_plugin.config.values import AUTO
from gpu_plugin.containers.conflicts import pair_warning
from gpu_plugin.containers.edits import STRATEGIES as LIST_STRATEGIES
from gpu_plugin.containers.edits import Access
from gpu_plugin.containers.plan import access_warnings, plan_access
from gpu_plugin.devices.device import Resource, withhold
from gpu_plugin.devices.node import Node
from gpu_plugin.devices.plan import STRATEGIES as MIG_STRATEGIES
from gpu_plugin.devices.plan import Plan, plan
from gpu_plugin.devices.retirement import NOT_ON_NODE
from gpu_plugin.devices.sharing import MpsShared
from gpu_plugin.placement.shared import POLICIES
from gpu_plugin.placement.subsets import IMMEDIATE_GPUS, Placement
from gpu_plugin.placement.topology import Topology


class Offer(msgspec.Struct, frozen=True):
    """The resources of this node under these settings, without health. `prepared` is slow on a node with many GPUs.

    `warnings` are sentences about the settings, in addition to the warnings of the plan. `mig_gpus` has the uuid of the GPU of
    each MIG device of the node, including GPUs that are not served.
    """

    plan: Plan = msgspec.field(default_factory=Plan)
    access: Access = msgspec.field(default_factory=Access)
    placement: Placement = msgspec.field(default_factory=Placement)
    policy: str = DISTRIBUTED
    mps_root: str = ""
    warnings: tuple[str, ...] = ()
    mig_gpus: Mapping[str, str] = msgspec.field(default_factory=dict)

    def prepared(self) -> "Offer":
        """Return the offer with its placement ready."""
        return self if self.placement.ready else replace(self, placement=Placement.of(self.placement.topology))

    @property
    def hardware(self) -> frozenset[tuple[str, str]]:
        """The uuid of the GPU, and the uuid that containers see, of each GPU and MIG device. Takes 0.1 µs a device."""
        return frozenset(
            (device.gpu, device.visible_id) for resource in self.plan.resources for device in resource.devices
        )

    @property
    def mps_resources(self) -> tuple[MpsShared, ...]:
        """The resources with devices that are shared by MPS, as their daemons should serve them. Takes 0.2 µs a device."""
        found = []
        for resource in self.plan.resources:
            devices = [device for device in resource.devices if device.shared == MPS]
            if devices:
                gpus = dict.fromkeys(device.gpu for device in devices if not device.withheld)
                first = devices[0]
                found.append(MpsShared(resource.name, tuple(gpus), first.replicas, first.limits, self.mps_root))
        return tuple(found)


def require_functions(settings: Settings) -> None:
    """Raises NoFunctionError for a choice without a function, which the admission of a pod would show otherwise."""
    chosen: tuple[tuple[Registry[Any], Sequence[str]], ...] = (
        (LIST_STRATEGIES, settings.device_list_strategy),
        (MIG_STRATEGIES, (settings.mig_strategy,)),
        (POLICIES, (settings.shared_devices_allocation_policy,)),
    )
    for registry, names in chosen:
        for name in names:
            if name != AUTO:
                registry[name]  # raises NoFunctionError


def without_gone(old: Offer, node: Node) -> Offer:
    """Return the offer, and withhold its devices whose hardware has left the node."""
    there = {gpu.uuid for gpu in node.gpus} | {mig.uuid for gpu in node.gpus for mig in gpu.mig_devices}
    resources = tuple(
        Resource(
            resource.name,
            tuple(
                device if device.visible_id in there or device.withheld else withhold(device, NOT_ON_NODE)
                for device in resource.devices
            ),
        )
        for resource in old.plan.resources
    )
    return replace(old, plan=Plan(resources, old.plan.warnings))


def offer(node: Node, settings: Settings, dev_root: str | None, before: Placement | None = None) -> Offer:
    """Compute the offer of a node.

    Args:
        node: the hardware.
        settings: the settings in force.
        dev_root: the root of the device nodes.
        before: the former placement, which is kept if the links are the same. A new placement of a large node is not ready.

    Raises:
        ConfigError: the node cannot do what the settings request.
    """
    topology = Topology.of(node)
    planned = plan(node, settings)
    conflict = pair_warning(settings.device_list_strategy, planned.resources)
    made = Offer(
        planned,
        plan_access(settings, node, dev_root),
        before if before is not None and before.topology == topology else Placement(topology),
        settings.shared_devices_allocation_policy,
        settings.mps_root.rstrip("/"),
        (*access_warnings(settings, node), *([conflict] if conflict else [])),
        {mig.uuid: gpu.uuid for gpu in node.gpus for mig in gpu.mig_devices},
    )
    return made.prepared() if len(topology) <= IMMEDIATE_GPUS else made
