"""Build the status of the node from the state of the daemon's parts. Reads the clocks and the environment; changes nothing."""

import os
import platform
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import anyio
import msgspec
from msgspec.structs import replace

from gpu_plugin import __version__
from gpu_plugin.config.settings import Settings
from gpu_plugin.devices.absent import missing_gpus
from gpu_plugin.health.explain import explain
from gpu_plugin.health.signals import SIGNALS
from gpu_plugin.status import gpus, model
from gpu_plugin.status.model import Status
from gpu_plugin.status.problems import headline, problems
from gpu_plugin.status.remedies import Shell
from gpu_plugin.telemetry.logs import dropped

if TYPE_CHECKING:
    from gpu_plugin.daemon.configuration import Wait
    from gpu_plugin.daemon.node_view import AllocatedDevice, NodeView
    from gpu_plugin.kubelet.pod_listing import HoldersByDevice
    from gpu_plugin.placement.views.report import Offered

EVENTS = 50  # events on the status page
MAX_COMPLAINTS = 20  # files that CDI specifications leave out


def without_configuration(settings: Settings, wait: "Wait", started: float) -> Status:
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
        daemon=_process(started),
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


def built(view: "NodeView", held: "HoldersByDevice | None" = None) -> Status:
    """Return the state of the node and its configuration. `held` are the containers that hold devices, if they are known."""
    settings, offered = view.configuration.settings, view.offered()
    listed = view.cached.listed or gpus.Listed()
    by_gpu: dict[str, list[tuple[str, Offered]]] = {}
    for resource in offered:
        for each in resource.hardware:
            by_gpu.setdefault(each.gpu, []).append((resource.name, each))
    holdings = None if held is None else gpus.holdings(held)
    counts = {} if held is None else gpus.held_devices(held)
    standings = {gpu.uuid: view.health.ledger.standing(gpu.uuid, None) for gpu in view.health.gpus}
    at = view.health.now()
    now, unix = anyio.current_time(), time.time()
    cdi = view.inventory.cdi
    status = Status(
        at=unix,
        node=view.node_name,
        daemon=_process(view.now.started),
        waiting=view.now.waits_for,
        state=model.State(directory=str(settings.state_dir), trouble=_unwritten(view)),
        driver=model.Driver(
            version=view.now.node.driver_version,
            trouble=view.now.driver_trouble or "",
            no_gpu=view.now.no_gpu,
            answered=view.now.driver is not None,
            restart="" if view.now.monitor is None else view.now.monitor.restart_needed,
        ),
        unoffered=view.not_offered(),
        missing=tuple(map(gpus.missing, missing_gpus(view.now.node.absent, settings))),
        kubelet=model.Kubelet(socket=settings.registration_socket or "", directory=settings.socket_dir),
        resources={
            name: replace(
                each,
                held_back=gpus.devices_held_back(listed.unhealthy[name], standings),
                faulty=gpus.devices_faulty(listed.unhealthy[name], standings),
                held=None if held is None else counts.get(name, 0),
                registration=gpus.registration(view.registrations.of(name), now, unix),
            )
            for name, each in listed.resources.items()
        },
        configuration=view.configuration.status(),
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
        cluster=view.cluster.status(),
        labels=model.Labels(way=settings.node_labels, trouble=view.labels.trouble),
        gpus=tuple(
            gpus.gpu(
                gpu,
                explain(view.health.ledger, gpu, at),
                standings[gpu.uuid],
                listed.withheld.get(gpu.uuid, ()),
                by_gpu.get(gpu.uuid, ()),
                holdings,
                view.health.readings.of(gpu.uuid),
            )
            for gpu in view.health.gpus
        ),
    )
    return _completed(status, settings)


def counters(view: "NodeView") -> model.Counters:
    """Return the counts since the start."""
    monitor, reports = view.now.monitor, view.health.reports.as_data()
    unsupported = monitor.unsupported() if monitor is not None else {}
    return model.Counters(
        snapshot_version=view.inventory.store.current.version,
        transitions=reports["transitions"],
        xids=reports["xids"],
        xid_classes={str(xid): row.recovery for xid, row in view.health.ledger.policy.xids.table.items()},
        supported={
            uuid: {name: not signal.asks or not fields.issuperset(signal.asks) for name, signal in SIGNALS.items()}
            for uuid, fields in unsupported.items()
        },
        kubelet=view.counts.as_data(),
        nvml=view.call_times.told(),
        mps=view.offering.mps_counts,
    )


def pods(view: "NodeView", held: "HoldersByDevice | None", devices: "tuple[AllocatedDevice, ...]" = ()) -> model.Pods:
    """Return the state of the queries to PodResources. `held` is the newest answer, and `devices` are the held devices."""
    attribution = view.attribution
    return model.Pods(
        trouble=attribution.trouble or ("" if held is not None else "PodResources has not answered yet"),
        requests=attribution.questions,
        failures=attribution.failures,
        devices=devices,
    )


def scraped(view: "NodeView", held: "HoldersByDevice | None" = None) -> Status:
    """Return the status for a scrape. `held` is the newest answer of PodResources."""
    is_on = view.configuration.settings.pod_metrics
    return replace(built(view), counters=counters(view), pods=pods(view, held) if is_on else None)


def on_page(view: "NodeView", held: "HoldersByDevice | None") -> Status:
    """Return the status for the status page: with pods, links and the newest events."""
    off = model.Pods(trouble="naming pods is switched off (--pod-metrics=false)")
    known = {gpu.uuid: gpu.index for gpu in view.health.gpus}
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
        for each in list(view.events.store.events)[: -EVENTS - 1 : -1]
    )
    shown = pods(view, held) if view.configuration.settings.pod_metrics else off
    return replace(built(view, held), pods=shown, links=view.links()[0], events=events)


def as_reply(status: Status, **more: object) -> Mapping[str, object]:
    """Return a status with further fields as plain data."""
    return cast("Mapping[str, object]", msgspec.to_builtins(replace(status, **more)))


def _unwritten(view: "NodeView") -> str:
    """Return why a restart would lose state, such as a failed write; empty if it would lose nothing."""
    troubles = (
        view.now.memory,
        view.recorder.trouble,
        view.configuration.storage_trouble,
        view.events.store.trouble,
    )
    return "; ".join(filter(None, troubles))


def _process(started: float) -> model.Process:
    """Return the entry of this process, which started at this Unix time in seconds."""
    return model.Process(
        version=__version__,
        python=platform.python_version(),
        pid=os.getpid(),
        started=started,
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
