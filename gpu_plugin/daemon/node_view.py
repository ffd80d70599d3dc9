"""The state of the daemon's parts for its views: facts for probes, links, the device lists and their holders."""

import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from gpu_plugin.cluster.labels.keeper import NodeLabels
from gpu_plugin.daemon.cluster_reporting import ClusterReporting
from gpu_plugin.daemon.configuration import Configuration
from gpu_plugin.daemon.event_log import EventLog
from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.daemon.now import Now
from gpu_plugin.daemon.offering import Offering
from gpu_plugin.daemon.operations import Operations
from gpu_plugin.devices.node import Node
from gpu_plugin.kubelet.attribution import PodAttribution
from gpu_plugin.kubelet.counts import KubeletCounts
from gpu_plugin.kubelet.inventory import Inventory
from gpu_plugin.kubelet.pod_listing import Holder
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.kubelet.snapshot import ResourceView
from gpu_plugin.nvml.call_times import CallTimes
from gpu_plugin.state.recorder import Recorder

if TYPE_CHECKING:
    from gpu_plugin.kubelet.pod_listing import HoldersByDevice
    from gpu_plugin.placement.views.report import OfferedResource
    from gpu_plugin.status.gpus import Listed
    from gpu_plugin.status.model import Links
    from gpu_plugin.telemetry.listener.checks import Facts

AllocatedDevice = tuple[Mapping[str, str | int], tuple[Holder, ...]]
"""A device with `resource`, `device`, and `uuid` and `index` of its GPU; and the containers that hold it."""

AllocatedDevices = Iterator[AllocatedDevice]


class Cached(msgspec.Struct):
    """Views of the newest resources and node, kept until the resources or the node change."""

    resources: Mapping[str, ResourceView] | None = None
    node: Node | None = None
    listed: "Listed | None" = None
    offered: "Sequence[OfferedResource]" = ()
    topology: Mapping[str, object] | None = None
    links: "tuple[Links | None, str] | None" = None


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the daemon, for its views. The parts are read and not changed."""

    now: Now
    configuration: Configuration
    health: HealthWatch
    operations: Operations
    inventory: Inventory
    offering: Offering
    cluster: ClusterReporting
    labels: NodeLabels
    events: EventLog
    recorder: Recorder
    registrations: Registrations
    attribution: PodAttribution
    counts: KubeletCounts
    call_times: CallTimes
    cached: Cached = msgspec.field(default_factory=Cached)

    def picture(self) -> str:
        """Return the picture of the links as SVG; empty if no links are known."""
        return self.links()[1]

    def allocated(self, holders: "HoldersByDevice | None") -> AllocatedDevices:
        """Yield the devices of the present snapshot that containers hold, made lazily: there may be thousands.

        Each has `resource`, `device`, and `uuid` and `index` of its GPU; and the containers that hold it.
        """
        index = {gpu.uuid: gpu.index for gpu in self.health.gpus}
        return (
            (
                {"resource": name, "device": device.id, "uuid": device.gpu, "index": index.get(device.gpu, "")},
                tuple(sorted(held_by)),
            )
            for name, device, held_by in self.inventory.store.current.allocated(holders or {})
        )

    def facts(self) -> "Facts":
        """Return the facts for probes."""
        from gpu_plugin.telemetry.listener.checks import Facts  # noqa: PLC0415 - only needed with a listener

        if self.now.waits_for:
            return Facts(waits_for=self.now.waits_for, standby=self.now.standby)
        served = self.inventory.store.current.resources
        cdi = self.inventory.cdi
        return Facts(
            takes_over=self.now.takes_over,
            refused=self.configuration.status().refused,
            driver=self.now.no_gpu or self.now.driver_trouble,
            turn_due=math.inf if self.now.monitor is None else self.now.monitor.turn_due,
            offered=not self.inventory.unpublished,
            resources={name: view.resource for name, view in served.items()},
            registering=bool(self.configuration.settings.registration_socket),
            standings={name: self.registrations.of(name) for name in served},
            unserved=self.not_offered(),
            cdi=None if cdi is None else cdi.trouble,
        )

    def not_offered(self) -> tuple[str, ...]:
        """Return a sentence for each reason why devices that the settings ask for are not offered to pods."""
        return (*filter(None, [self.now.unoffered]), *self.inventory.offer.plan.warnings)

    async def topology(self, request: Mapping[str, object]) -> Mapping[str, object]:  # noqa: ARG002
        """Return the links between the GPUs and the served resources, as known now, for the commands about placement."""
        from gpu_plugin.placement.views.report import report  # noqa: PLC0415 - only needed on request

        if self.cached.topology is None or not self._is_current():
            self.cached.topology = report(self.now.node, self.offered())
        return self.cached.topology

    def links(self) -> "tuple[Links | None, str]":
        """Return the links, and their picture."""
        from gpu_plugin.status.links import links  # noqa: PLC0415 - only needed for the page

        if self.cached.links is None or not self._is_current():
            self.cached.links = links(self.now.node, self.offered(), self.node_name)
        return self.cached.links

    def offered(self) -> "Sequence[OfferedResource]":
        """Return the hardware of the device lists by resource."""
        from gpu_plugin.placement.views.report import offered  # noqa: PLC0415 - only needed on request
        from gpu_plugin.status.gpus import listed  # noqa: PLC0415

        if not self._is_current():
            views = self.inventory.store.current.resources
            self.cached.resources, self.cached.node = views, self.now.node
            self.cached.listed = listed(views, self.inventory.withheld())
            self.cached.offered = tuple(offered(view.resource, view.policy) for view in views.values())
            self.cached.topology = self.cached.links = None
        return self.cached.offered

    def _is_current(self) -> bool:
        return self.cached.resources is self.inventory.store.current.resources and self.cached.node is self.now.node

    @property
    def node_name(self) -> str:
        """The name of the node."""
        return self.configuration.settings.node_name or socket.gethostname()
