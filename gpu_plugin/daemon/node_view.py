"""The status of the daemon, facts for probes, and the topology, made from the state of the daemon's parts.

The parts are read and not changed.
"""

import math
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import anyio
import msgspec
from anyio.lowlevel import checkpoint
from msgspec.structs import replace

from gpu_plugin import __version__
from gpu_plugin.cluster.labels.keeper import NodeLabels
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings
from gpu_plugin.daemon.cluster_reporting import ClusterReporting
from gpu_plugin.daemon.configuration import Configuration, Wait
from gpu_plugin.daemon.event_log import EventLog
from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.daemon.now import Now
from gpu_plugin.daemon.offering import Offering
from gpu_plugin.daemon.operations import Operations
from gpu_plugin.devices.absent import missing_gpus
from gpu_plugin.devices.node import Node
from gpu_plugin.kubelet.attribution import PodAttribution
from gpu_plugin.kubelet.counts import KubeletCounts
from gpu_plugin.kubelet.inventory import Inventory
from gpu_plugin.kubelet.pod_listing import Holder
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.kubelet.snapshot import ResourceView
from gpu_plugin.nvml.call_times import CallTimes
from gpu_plugin.state.recorder import Recorder
from gpu_plugin.status import gpus, model
from gpu_plugin.status.model import Status
from gpu_plugin.status.problems import headline, problems
from gpu_plugin.status.remedies import Shell
from gpu_plugin.telemetry.logs import dropped

if TYPE_CHECKING:
    from gpu_plugin.kubelet.pod_listing import HoldersByDevice
    from gpu_plugin.placement.views.report import Offered, OfferedResource
    from gpu_plugin.telemetry.listener.checks import Facts

DEVICES_PER_PIECE = 500  # Devices that are converted before other tasks run: 1 ms
EVENTS = 50  # events on the status page
MAX_COMPLAINTS = 20  # files that CDI specifications leave out


DEVICES_PER_PIECE = 500
"""Devices that are converted before other tasks run: 1 ms."""


def _process(started: float, now: float) -> model.Process:
    """Return the entry of this process. Both arguments are Unix times in seconds."""
    return model.Process(
        version=__version__,
        python=platform.python_version(),
        pid=os.getpid(),
        started=started,
        uptime_seconds=round(now - started),
        log_lines_dropped=dropped(),
    )


def _shell(settings: Settings) -> Shell:
    """Return the place of this process. The chart sets POD_NAMESPACE and POD_NAME."""
    environment = os.environ
    return Shell(settings.node_name, environment.get("POD_NAMESPACE", ""), environment.get("POD_NAME", ""))


def _completed(status: Status, settings: Settings) -> Status:
    """Return a status with its problems and its headline."""
    found = problems(status, _shell(settings))
    return replace(status, problems=found, headline=headline(status, found))


def without_configuration(settings: Settings, wait: Wait, started: float) -> Status:
    """Return the status before the node's label has chosen the configuration: the process, and the reason of the wait.

    `settings` are the settings of flags and environment. `started` is Unix time in seconds.
    """
    wanted = None if wait.source is None else wait.source.wanted()
    why = "nothing is served yet, since there is no configuration"
    faults = wait.reasons if wait.tried else ()
    now = time.time()
    status = Status(
        at=now,
        node=settings.node_name or socket.gethostname(),
        daemon=_process(started, now),
        waiting=why if faults else f"{why}: {wait.why}",
        state=model.State(directory=str(settings.state_dir)),
        driver=model.Driver(answered=False),
        kubelet=model.Kubelet(socket=settings.registration_socket or "", directory=settings.socket_dir),
        configuration=model.Configuration(
            wanted=str(wanted or ""),
            refused="; ".join(faults),
            faults=tuple(faults),
            reloads={"applied": 0, "unchanged": 0, "refused": 0},
        ),
        labels=model.Labels(way=settings.node_labels),
    )
    return _completed(status, settings)


AllocatedDevice = tuple[Mapping[str, str | int], tuple[Holder, ...]]
"""A device with `resource`, `device`, and `uuid` and `index` of its GPU; and the containers that hold it."""

AllocatedDevices = Iterator[AllocatedDevice]


class Cached(msgspec.Struct):
    """Views of the newest resources and node, kept until the resources or the node change."""

    resources: Mapping[str, ResourceView] | None = None
    node: Node | None = None
    listed: gpus.Listed = msgspec.field(default_factory=gpus.Listed)
    offered: "Sequence[OfferedResource]" = ()
    topology: Mapping[str, object] | None = None
    links: tuple[model.Links | None, str] | None = None


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon's status and views, from the state of its parts."""

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

    async def status(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Return the status with the devices that pods hold, the counters and the settings, for the control socket.

        The health that it reports is written before the reply, so that it outlives a kill of this process.
        """
        if request:
            raise ConfigError(f"{', '.join(sorted(request))}: not a field of this verb")
        await self.recorder.written()
        held = await self.attribution.newest()
        # With tens of thousands of held devices, the steps before and after this line take tens of milliseconds each.
        await checkpoint()
        status = replace(self.of(held), counters=self.counters(), settings=self.configuration.in_full())
        if self.configuration.settings.pod_metrics:
            devices = []
            for each in self.allocated(held):
                devices.append(each)
                if not len(devices) % DEVICES_PER_PIECE:
                    await checkpoint()
            status = replace(status, pods=replace(self._pods(held), devices=tuple(devices)))
        return cast("Mapping[str, object]", msgspec.to_builtins(status))

    async def waiting(self, request: Mapping[str, object]) -> Mapping[str, object]:  # noqa: ARG002
        """Return the status while another daemon has the node. Do not query the kubelet."""
        status = replace(self.of(), counters=self.counters(), settings=self.configuration.in_full())
        return cast("Mapping[str, object]", msgspec.to_builtins(status))

    async def scraped(self) -> tuple[Status, AllocatedDevices]:
        """Return the status for a scrape of the metrics, and the devices that containers held some seconds ago.

        Do not wait for a slow kubelet. Each device is made when the caller iterates to it.
        """
        if not self.configuration.settings.pod_metrics:
            return replace(self.of(), counters=self.counters()), iter(())
        held = await self.attribution.shortly()
        return replace(self.of(), counters=self.counters(), pods=self._pods(held)), self.allocated(held)

    async def page(self) -> Status:
        """Return the status for the status page: with pods, links and the newest events."""
        if self.configuration.settings.pod_metrics:
            held = await self.attribution.current()
            pods = self._pods(held)
        else:
            held, pods = None, model.Pods(trouble="naming pods is switched off (--pod-metrics=false)")
        known = {gpu.uuid: gpu.index for gpu in self.health.gpus}
        newest = list(self.events.store.events)[: -EVENTS - 1 : -1]
        events = tuple(
            model.Event(
                at=each.at,
                kind=each.kind,
                text=each.text,
                verdict=each.verdict,
                by=each.by,
                reason=each.reason,
                gpu=known.get(each.uuid, each.index),
            )
            for each in newest
        )
        return replace(self.of(held), pods=pods, links=self._links()[0], events=events)

    def picture(self) -> str:
        """Return the picture of the links as SVG; empty if no links are known."""
        return self._links()[1]

    def of(self, held: "HoldersByDevice | None" = None) -> Status:
        """Return the state of the node and its configuration. `held` are the containers that hold devices, if they are known."""
        from gpu_plugin.health.explain import explain  # noqa: PLC0415 - saves 1 ms at the start

        settings, offered, listed = self.configuration.settings, self._offered(), self.cached.listed
        by_gpu: dict[str, list[tuple[str, Offered]]] = {}
        for resource in offered:
            for each in resource.hardware:
                by_gpu.setdefault(each.gpu, []).append((resource.name, each))
        holdings = None if held is None else gpus.holdings(held)
        counts = {} if held is None else gpus.held_devices(held)
        standings = {gpu.uuid: self.health.ledger.standing(gpu.uuid, None) for gpu in self.health.gpus}
        at = self.health.now()
        now, unix = anyio.current_time(), time.time()
        cdi = self.inventory.cdi
        status = Status(
            at=unix,
            node=self._node_name(),
            daemon=_process(self.now.started, unix),
            waiting=self.now.waits_for,
            state=model.State(directory=str(settings.state_dir), trouble=self._unwritten()),
            driver=model.Driver(
                version=self.now.node.driver_version,
                trouble=self.now.driver_trouble or "",
                no_gpu=self.now.no_gpu,
                answered=self.now.driver is not None,
                restart="" if self.now.monitor is None else self.now.monitor.restart_needed,
            ),
            unoffered=self._not_offered(),
            missing=tuple(map(gpus.missing, missing_gpus(self.now.node.absent, settings))),
            kubelet=model.Kubelet(socket=settings.registration_socket or "", directory=settings.socket_dir),
            resources={
                name: replace(
                    each,
                    held_back=gpus.devices_held_back(listed.unhealthy[name], standings),
                    held=None if held is None else counts.get(name, 0),
                    registration=gpus.registration(self.registrations.of(name), now, unix),
                )
                for name, each in listed.resources.items()
            },
            configuration=self.configuration.status(),
            device_list_strategy=model.Strategy(
                used=settings.device_list_strategy, reason=settings.device_list_strategy_reason
            ),
            cdi=None
            if cdi is None
            else model.Cdi(
                directory=settings.cdi_dir,
                devices=len(cdi.nodes),
                trouble=cdi.trouble,
                complaints=cdi.complaints[:MAX_COMPLAINTS],
            ),
            cluster=self.cluster.status(),
            labels=model.Labels(way=settings.node_labels, trouble=self.labels.trouble),
            gpus=tuple(
                gpus.gpu(
                    gpu,
                    explain(self.health.ledger, gpu, at),
                    standings[gpu.uuid],
                    listed.withheld.get(gpu.uuid, ()),
                    by_gpu.get(gpu.uuid, ()),
                    holdings,
                    self.health.readings.of(gpu.uuid),
                )
                for gpu in self.health.gpus
            ),
        )
        return _completed(status, settings)

    def counters(self) -> model.Counters:
        """Return the counts since the start."""
        from gpu_plugin.health.signals import SIGNALS  # noqa: PLC0415 - as above

        monitor, reports = self.now.monitor, self.health.reports.as_data()
        unsupported = monitor.unsupported() if monitor is not None else {}
        return model.Counters(
            snapshot_version=self.inventory.store.current.version,
            transitions=reports["transitions"],
            xids=reports["xids"],
            xid_classes={str(xid): row.recovery for xid, row in self.health.ledger.policy.xids.table.items()},
            supported={
                uuid: {name: not signal.asks or not fields.issuperset(signal.asks) for name, signal in SIGNALS.items()}
                for uuid, fields in unsupported.items()
            },
            kubelet=self.counts.as_data(),
            nvml=self.call_times.told(),
            mps=self.offering.mps_counts,
        )

    def _unwritten(self) -> str:
        """Return why a restart would lose state, such as a failed write; empty if it would lose nothing."""
        troubles = (
            self.now.memory,
            self.recorder.trouble,
            self.configuration.storage_trouble,
            self.events.store.trouble,
        )
        return "; ".join(filter(None, troubles))

    def _pods(self, held: "HoldersByDevice | None") -> model.Pods:
        """Return the state of the queries to PodResources. `held` is the newest answer."""
        return model.Pods(
            trouble=self.attribution.trouble or ("" if held is not None else "PodResources has not answered yet"),
            requests=self.attribution.questions,
            failures=self.attribution.failures,
        )

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
            unserved=self._not_offered(),
            cdi=None if cdi is None else cdi.trouble,
        )

    def _not_offered(self) -> tuple[str, ...]:
        """Return a sentence for each reason why devices that the settings ask for are not offered to pods."""
        return (*filter(None, [self.now.unoffered]), *self.inventory.offer.plan.warnings)

    async def topology(self, request: Mapping[str, object]) -> Mapping[str, object]:  # noqa: ARG002
        """Return the links between the GPUs and the served resources, as known now, for the commands about placement."""
        from gpu_plugin.placement.views.report import report  # noqa: PLC0415 - only needed on request

        if self.cached.topology is None or not self._is_current():
            self.cached.topology = report(self.now.node, self._offered())
        return self.cached.topology

    def _links(self) -> tuple[model.Links | None, str]:
        """Return the links, and their picture."""
        from gpu_plugin.status.links import links  # noqa: PLC0415 - only needed for the page

        if self.cached.links is None or not self._is_current():
            self.cached.links = links(self.now.node, self._offered(), self._node_name())
        return self.cached.links

    def _offered(self) -> "Sequence[OfferedResource]":
        """Return the hardware of the device lists by resource."""
        from gpu_plugin.placement.views.report import offered  # noqa: PLC0415 - only needed on request

        if not self._is_current():
            views = self.inventory.store.current.resources
            self.cached.resources, self.cached.node = views, self.now.node
            self.cached.listed = gpus.listed(views, self.inventory.withheld())
            self.cached.offered = tuple(offered(view.resource, view.policy) for view in views.values())
            self.cached.topology = self.cached.links = None
        return self.cached.offered

    def _is_current(self) -> bool:
        return self.cached.resources is self.inventory.store.current.resources and self.cached.node is self.now.node

    def _node_name(self) -> str:
        return self.configuration.settings.node_name or socket.gethostname()
