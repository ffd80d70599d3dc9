"""The offer: a node's resources under some settings, before health and before what pods hold. Decisions only, no I/O."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from gpu_plugin.access.conflicts import pair_warning
from gpu_plugin.access.container import STRATEGIES as LIST_STRATEGIES
from gpu_plugin.access.container import Access
from gpu_plugin.access.plan import access_warnings, plan_access
from gpu_plugin.config.choices import Registry
from gpu_plugin.config.settings import Settings
from gpu_plugin.config.sharing import DISTRIBUTED, MPS
from gpu_plugin.config.values import AUTO
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
    """The resources of this node under these settings, before health. Where there are many GPUs, `prepared` takes its time.

    `warnings` are sentences on what the settings ask for, besides those of the plan. `mig_gpus` has the GPU's uuid for each MIG
    device of the node, also of GPUs that are not served.
    """

    plan: Plan = msgspec.field(default_factory=Plan)
    access: Access = msgspec.field(default_factory=Access)
    placement: Placement = msgspec.field(default_factory=Placement)
    policy: str = DISTRIBUTED
    mps_root: str = ""
    warnings: tuple[str, ...] = ()
    mig_gpus: Mapping[str, str] = msgspec.field(default_factory=dict)

    def prepared(self) -> "Offer":
        """The offer with its placement ready."""
        return self if self.placement.ready else replace(self, placement=Placement.of(self.placement.topology))

    @property
    def hardware(self) -> frozenset[tuple[str, str]]:
        """The uuid of the GPU and what containers are told to see, for each piece of hardware in it. Takes 0.1 µs a device."""
        return frozenset(
            (device.gpu, device.visible_id) for resource in self.plan.resources for device in resource.devices
        )

    @property
    def mps_resources(self) -> tuple[MpsShared, ...]:
        """Resources some of whose devices are shared by MPS, with what their daemons should serve. Takes 0.2 µs a device."""
        found = []
        for resource in self.plan.resources:
            devices = [device for device in resource.devices if device.shared == MPS]
            if devices:
                gpus = dict.fromkeys(device.gpu for device in devices if not device.withheld)
                first = devices[0]
                found.append(MpsShared(resource.name, tuple(gpus), first.replicas, first.limits, self.mps_root))
        return tuple(found)


def require_functions(settings: Settings) -> None:
    """Raises NoFunctionError where the settings choose what nothing is done for: else it would show when a pod is admitted."""
    chosen: tuple[tuple[Registry[Any], Sequence[str]], ...] = (
        (LIST_STRATEGIES, settings.device_list_strategy),
        (MIG_STRATEGIES, (settings.mig_strategy,)),
        (POLICIES, (settings.shared_devices_allocation_policy,)),
    )
    for registry, names in chosen:
        for name in names:
            if name != AUTO:
                registry[name]  # raises where there is none


def without_gone(old: Offer, node: Node) -> Offer:
    """The offer with devices withheld whose hardware is not on the node any more."""
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
    """Makes the offer of a node. `before` is kept as its placement where it still holds; a large node's is not ready then.

    Raises ConfigError where the settings ask for what the node cannot do.
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
