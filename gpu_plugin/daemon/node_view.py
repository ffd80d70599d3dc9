"""The views of the daemon's state: status, facts for probes, explanations of health, the status page, and the topology.

All output for people and programs is read here. The views read the parts and change nothing.
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

from gpu_plugin import __version__
from gpu_plugin.cluster.labels.keeper import NodeLabels
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings
from gpu_plugin.daemon import node_status
from gpu_plugin.daemon.cluster_reporting import ClusterReporting
from gpu_plugin.daemon.configuration import Configuration, Wait
from gpu_plugin.daemon.event_log import EventLog
from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.daemon.now import Now
from gpu_plugin.daemon.offering import Offering
from gpu_plugin.daemon.operations import Operations
from gpu_plugin.devices.absent import missing_gpus
from gpu_plugin.devices.gpu_names import short_bus_id
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.kubelet.attribution import PodAttribution
from gpu_plugin.kubelet.counts import KubeletCounts
from gpu_plugin.kubelet.inventory import Inventory
from gpu_plugin.kubelet.pod_listing import Pods
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.kubelet.snapshot import ResourceView
from gpu_plugin.nvml.call_times import CallTimes
from gpu_plugin.state.recorder import Recorder
from gpu_plugin.telemetry.logs import dropped

if TYPE_CHECKING:
    from gpu_plugin.kubelet.pod_listing import Holder, HoldersByDevice
    from gpu_plugin.telemetry.listener.checks import Facts
    from gpu_plugin.telemetry.listener.page_data import Material

DEVICES_PER_PIECE = 500
"""Devices that are converted before other tasks run: 1 ms."""


def _process(started: float, now: float) -> Mapping[str, object]:
    """Return the version, age and identity of this process. Both arguments are Unix times in seconds."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "pid": os.getpid(),
        "started": started,
        "uptime_seconds": round(now - started),
        "log_lines_dropped": dropped(),
    }


def without_configuration(settings: Settings, wait: Wait, started: float) -> Mapping[str, object]:
    """Return the status before the node's label has chosen the configuration: the process, and the reason of the wait.

    `settings` are the settings of flags and environment. `started` is Unix time in seconds.
    """
    wanted = None if wait.source is None else wait.source.wanted()
    why = "nothing is served yet, since there is no configuration"
    faults = wait.reasons if wait.tried else ()
    return {
        "daemon": _process(started, time.time()),
        "waiting": why if faults else f"{why}: {wait.why}",
        "state": {"directory": settings.state_dir, "trouble": ""},
        "driver": {"version": "", "trouble": "", "no_gpu": "", "answered": False, "restart": ""},
        "unoffered": (),
        "missing": [],
        "kubelet": {
            "socket": settings.registration_socket or "",
            "directory": settings.socket_dir,
            "resources": {},
        },
        "configuration": {
            "file": "",
            "since": None,
            "wanted": str(wanted or ""),
            "refused": "; ".join(faults),
            "faults": list(faults),
            "unheard": "",
            "reloads": {"applied": 0, "unchanged": 0, "refused": 0},
        },
        "device_list_strategy": {"used": [], "reason": ""},
        "cdi": None,
        "cluster": None,
        "labels": {"way": settings.node_labels, "trouble": ""},
        "resources": {},
        "health": {"gpus": [], "transitions": [], "xids": [], "xid_classes": {}, "supported": {}},
    }


AllocatedDevice = tuple[Mapping[str, object], Sequence["Holder"]]
"""A device with `resource`, `device`, and `uuid` and `index` of its GPU; and the containers that hold it."""


class Cached(msgspec.Struct):
    """Views of the newest resources and node, kept until the resources or the node change."""

    resources: Mapping[str, ResourceView] | None = None
    listed: node_status.Listed = msgspec.field(default_factory=node_status.Listed)
    node: Node | None = None
    linked: Mapping[str, ResourceView] | None = None
    topology: Mapping[str, object] = msgspec.field(default_factory=dict)


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

    async def explain(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Return `Operations.explain`, and for each GPU the reasons why healthy devices are withheld, and notices."""
        answer = await self.operations.explain(request)
        gpus = cast("Sequence[Mapping[str, object]]", answer["gpus"])
        known = {gpu.uuid: gpu for gpu in self.health.gpus}
        listed = (known.get(str(gpu["uuid"])) for gpu in gpus)  # None: a missing GPU
        return {
            **answer,
            "gpus": [
                {**gpu, **({} if found is None else self._hardware(found))}
                for gpu, found in zip(gpus, listed, strict=True)
            ],
        }

    def _hardware(self, gpu: Gpu) -> Mapping[str, object]:
        return {
            "bus_id": short_bus_id(gpu.pci_bus_id),
            "model": gpu.model,
            "withheld": self.inventory.withheld(gpu.uuid),
            "notices": node_status.gpu_notices(
                gpu, self.health.readings.of(gpu.uuid), released=gpu.uuid in self.health.released()
            ),
        }

    async def status(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Return `at_a_glance`, and the devices that pods hold, as far as the kubelet reports them."""
        if request:
            raise ConfigError(f"{', '.join(sorted(request))}: not a field of this verb")
        holding = await self.attribution.newest_pods()
        # With tens of thousands of held devices, the steps before and after this line take tens of milliseconds each.
        await checkpoint()
        glance = self.at_a_glance(holding)
        answer = {**glance, "attribution": None, "settings": self.configuration.in_full()}
        if self.configuration.settings.pod_metrics:
            held = await self.attribution.current()
            devices = []
            for each in self._allocated(held):
                devices.append(each)
                if not len(devices) % DEVICES_PER_PIECE:
                    await checkpoint()
            answer["attribution"] = {**self._attribution(held), "devices": devices}
        return answer

    async def scraped(self) -> Mapping[str, object]:
        """Return `at_a_glance`, and the devices that containers held some seconds ago, for a scrape of the metrics.

        Do not wait for a slow kubelet. Each entry of `devices` is made when the caller iterates to it.
        """
        if not self.configuration.settings.pod_metrics:
            return {**self.at_a_glance(), "attribution": None}
        held = await self.attribution.shortly()
        return {**self.at_a_glance(), "attribution": {**self._attribution(held), "devices": self._allocated(held)}}

    async def waiting(self, request: Mapping[str, object]) -> Mapping[str, object]:  # noqa: ARG002
        """Return the status while another daemon has the node. Do not query the kubelet."""
        return {**self.at_a_glance(), "settings": self.configuration.in_full()}

    def at_a_glance(self, holders: Pods | None = None) -> Mapping[str, object]:
        """Return the state of the node and its configuration, for `gpu-plugin status` and for scrapes of the metrics.

        `counters` has the counts since the start: `snapshot_version`, `kubelet` (`KubeletCounts.as_data`), `nvml`
        (`CallTimes.told`) and `mps` (counts of gpu-plugin mps by resource).
        """
        listed = self._listed()
        devices = listed.distinct if holders is None else listed.by_gpu
        held = None if holders is None else node_status.pods_by_id(holders)
        known = {gpu.uuid: gpu for gpu in self.health.gpus}
        health = self.operations.health()
        seen = cast("Sequence[Mapping[str, object]]", health["gpus"])
        standings = {
            uuid: self.health.ledger.standing(uuid, None) for each in seen if (uuid := str(each["uuid"])) in known
        }
        gpus = [
            node_status.gpu(
                known[uuid],
                each,
                standings[uuid],
                devices.get(uuid, ()),
                held,
                self.health.readings.of(uuid),
            )
            for each in seen
            if (uuid := str(each["uuid"])) in standings
        ]
        resources = {
            name: {
                **each,
                "held_back": node_status.devices_held_back(listed.unhealthy.get(name, {}), standings),
                "faulty": node_status.devices_faulty(listed.unhealthy.get(name, {}), standings),
            }
            for name, each in listed.resources.items()
        }
        now, unix = anyio.current_time(), time.time()
        return {
            "daemon": _process(self.now.started, unix),
            "waiting": self.now.waits_for,
            "state": {"directory": self.configuration.settings.state_dir, "trouble": self._unwritten()},
            "driver": {
                "version": self.now.node.driver_version,
                "trouble": self.now.driver_trouble or "",
                "no_gpu": self.now.no_gpu,
                "answered": self.now.driver is not None,
                "restart": "" if self.now.monitor is None else self.now.monitor.restart_needed,
            },
            "unoffered": self._not_offered(),
            "missing": [
                node_status.missing(gpu) for gpu in missing_gpus(self.now.node.absent, self.configuration.settings)
            ],
            "kubelet": {
                "socket": self.configuration.settings.registration_socket or "",
                "directory": self.configuration.settings.socket_dir,
                "resources": {
                    name: node_status.registration(self.registrations.of(name), now, unix)
                    for name in self.inventory.store.current.resources
                },
            },
            "configuration": self.configuration.status(),
            "device_list_strategy": {
                "used": list(self.configuration.settings.device_list_strategy),
                "reason": self.configuration.settings.device_list_strategy_reason,
            },
            "cdi": self._cdi_status(),
            "cluster": self.cluster.status(),
            "labels": {"way": self.configuration.settings.node_labels, "trouble": self.labels.trouble},
            "resources": resources,
            "health": {**health, "gpus": gpus},
            "counters": {
                "snapshot_version": self.inventory.store.current.version,
                "kubelet": self.counts.as_data(),
                "nvml": self.call_times.told(),
                "mps": self.offering.mps_counts,
            },
        }

    def _listed(self) -> node_status.Listed:
        now = self.inventory.store.current.resources
        if self.cached.resources is not now:
            counts = cast("Mapping[str, Mapping[str, object]]", self.inventory.status())
            devices = {name: view.resource.devices for name, view in now.items()}
            listed = node_status.listed(devices, counts, lambda name, device: now[name].unreachable(device))
            self.cached.resources, self.cached.listed = now, listed
        return self.cached.listed

    def _unwritten(self) -> str:
        """Return why a restart would lose state, such as a failed write; empty if it would lose nothing."""
        troubles = (
            self.now.memory,
            self.recorder.trouble,
            self.configuration.storage_trouble,
            self.events.store.trouble,
        )
        return "; ".join(filter(None, troubles))

    def _attribution(self, held: "HoldersByDevice | None") -> Mapping[str, object]:
        """Return the state of the queries to PodResources. `held` is the newest answer.

        `trouble` is the reason why the newest query failed. `questions` and `failures` count queries since the start.
        """
        return {
            "trouble": self.attribution.trouble or ("" if held is not None else "PodResources has not answered yet"),
            "questions": self.attribution.questions,
            "failures": self.attribution.failures,
        }

    def _allocated(self, holders: "HoldersByDevice | None") -> Iterator[AllocatedDevice]:
        """Yield the devices of the present snapshot that containers hold. They are made lazily: there may be thousands."""
        index = {gpu.uuid: gpu.index for gpu in self.health.gpus}
        return (
            (
                {"resource": name, "device": device.id, "uuid": device.gpu, "index": index.get(device.gpu, "")},
                sorted(held_by),
            )
            for name, device, held_by in self.inventory.store.current.allocated(holders or {})
        )

    def facts(self) -> "Facts":
        """Return the facts for probes."""
        from gpu_plugin.telemetry.listener.checks import Facts  # noqa: PLC0415 - only needed with a listener

        if self.now.waits_for:
            return Facts(waits_for=self.now.waits_for, standby=self.now.standby)
        served = self.inventory.store.current.resources
        cdi = self.inventory.cdi_status()
        return Facts(
            takes_over=self.now.takes_over,
            refused=str(self.configuration.status()["refused"]),
            driver=self.now.no_gpu or self.now.driver_trouble,
            turn_due=math.inf if self.now.monitor is None else self.now.monitor.turn_due,
            offered=not self.inventory.unpublished,
            resources={name: view.resource for name, view in served.items()},
            registering=bool(self.configuration.settings.registration_socket),
            standings={name: self.registrations.of(name) for name in served},
            unserved=self._not_offered(),
            cdi=None if cdi is None else str(cdi["trouble"]),
        )

    def material(self, held: "HoldersByDevice | None", why_unknown: str) -> "Material":
        """Return the data of the status page. `held` has the containers that hold devices; None if they are not known."""
        from gpu_plugin.telemetry.listener.page_data import EVENTS, Material  # noqa: PLC0415 - only needed for the page

        status = self.at_a_glance()
        newest = list(self.events.store.events)[-EVENTS:]
        return Material(
            node=self.configuration.settings.node_name or socket.gethostname(),
            status=status,
            troubles=node_status.troubles(status),
            explained=self.operations.explained()["gpus"],
            topology=self._topology(),
            events=[msgspec.to_builtins(event) for event in newest],
            held=held,
            why_unknown=why_unknown,
        )

    def _not_offered(self) -> tuple[str, ...]:
        """Return a sentence for each reason why devices that the settings ask for are not offered to pods."""
        return (*filter(None, [self.now.unoffered]), *self.inventory.offer.plan.warnings)

    def _cdi_status(self) -> Mapping[str, object] | None:
        answer = self.inventory.cdi_status()
        return None if answer is None else {"directory": self.configuration.settings.cdi_dir, **answer}

    async def topology(self, request: Mapping[str, object]) -> Mapping[str, object]:  # noqa: ARG002
        """Return the links between the GPUs and the served resources, as known now, for the commands about placement."""
        return self._topology()

    def _topology(self) -> Mapping[str, object]:
        from gpu_plugin.placement.views.report import report  # noqa: PLC0415 - only needed on request

        node, now = self.now.node, self.inventory.store.current.resources
        if self.cached.linked is not now or self.cached.node is not node:
            served = [(view.resource, view.policy) for view in now.values()]
            self.cached.node, self.cached.linked, self.cached.topology = node, now, report(node, served)
        return self.cached.topology
