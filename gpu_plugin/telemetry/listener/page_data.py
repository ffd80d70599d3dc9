"""The content of the status page as plain data, also for programs at /status.json, and the picture of the links. Pure."""

import math
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from gpu_plugin.config.words import are, counted
from gpu_plugin.devices.device import GPU
from gpu_plugin.devices.sharing import REPLICA
from gpu_plugin.kubelet.pod_listing import Holder, HoldersByDevice
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.views import matrix
from gpu_plugin.placement.views.groups import LinkGroups
from gpu_plugin.placement.views.picture import dark_style, picture
from gpu_plugin.placement.views.report import held_back, reported

FORMAT = 1
"""Version of the format of /status.json. It changes if programs must be changed; new keys do not change it."""

EVENTS = 50
"""Number of events that are shown; the newest."""

HOLDERS = 64
"""Largest number of containers that are named for a GPU or MIG device. `held` counts the devices of all containers."""

PODS = 1000
"""Largest number of containers that are listed for the node."""

READINGS = (
    "temperature_celsius",
    "slowdown_celsius",
    "shutdown_celsius",
    "power_watts",
    "power_limit_watts",
    "utilization_ratio",
    "memory_used_bytes",
    "memory_total_bytes",
)
"""Readings that are shown of a GPU, from the newest looks."""

# Severities of the node's state and of each complaint.
OK = "ok"
ATTENTION = "attention"
UNHEALTHY = "unhealthy"


STYLE_HASH = f"sha256-{b64encode(sha256(dark_style().encode()).digest()).decode()}"
"""The hash of the picture's own style, for a Content-Security-Policy."""


class Material(msgspec.Struct, frozen=True, kw_only=True):
    """The data for the page, from the parts of the daemon.

    `node` is the node's name. `status` is as in `gpu-plugin status`. `troubles` are sentences about problems of the node other
    than its GPUs. `explained` are the GPUs from `health.explain`. `topology` is a report of `placement.views.report`. `events`
    are the newest events, oldest first. `held` are the containers that hold each device; None if that is not known, with the
    reason in `why_unknown`.
    """

    node: str
    status: Mapping[str, Any]
    troubles: Sequence[str] = ()
    explained: Sequence[Mapping[str, Any]] = ()
    topology: Mapping[str, Any] = msgspec.field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()
    held: HoldersByDevice | None = None
    why_unknown: str = ""


def awaiting(why: str) -> Mapping[str, Any]:
    """Return the content before there is a daemon. `why` is the reason why it has not started."""
    return {
        "format": FORMAT,
        "node": "",
        "verdict": ATTENTION,
        "headline": "Nothing is served yet",
        "complaints": [{"severity": ATTENTION, "text": why, "gpu": None}],
        "pods": {"known": False, "why": "nothing is served yet", "containers": [], "left_out": 0},
        **dict.fromkeys(("daemon", "driver", "configuration", "strategy", "links")),
        **{name: [] for name in ("registrations", "resources", "gpus", "events")},
    }


def page_data(material: Material, links: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Return the page as objects for JSON; docs/status-page.md describes them. `links` is the result of `links` below.

    The result is equal as long as nothing has changed: it has Unix times in seconds instead of ages.
    """
    status = material.status
    hardware = _hardware(material.topology)
    held = None if material.held is None else _by_hardware(material.held)
    explained = {gpu["uuid"]: gpu for gpu in material.explained}
    gpus = [
        _gpu(gpu, explained.get(gpu["uuid"], {}), hardware.get(gpu["uuid"], ()), held)
        for gpu in status["health"]["gpus"]
    ]
    complaints = [{"severity": UNHEALTHY, "text": trouble, "gpu": None} for trouble in material.troubles]
    if not gpus:
        complaints.append({"severity": ATTENTION, "text": "No GPU is known", "gpu": None})
    worst_first = sorted(gpus, key=lambda gpu: _WORST.index(gpu["state"]))
    complaints += [_complaint(gpu) for gpu in worst_first if gpu["state"] != "healthy" or gpu["withheld"]]
    severities = {complaint["severity"] for complaint in complaints}
    daemon, configuration = status["daemon"], status["configuration"]
    return {
        "format": FORMAT,
        "node": material.node,
        "verdict": UNHEALTHY if UNHEALTHY in severities else ATTENTION if severities else OK,
        "headline": _headline(gpus, material.troubles, status),
        "complaints": complaints,
        "daemon": {"version": daemon["version"], "started": daemon["started"]},
        "driver": {key: status["driver"].get(key, "") for key in ("version", "trouble", "no_gpu")},
        "configuration": {key: configuration.get(key, "") for key in ("file", "since", "wanted", "refused", "unheard")},
        "strategy": {**status["device_list_strategy"]},
        "registrations": [
            {"resource": name, **{key: each[key] for key in ("registered", "since", "why")}}
            for name, each in status["kubelet"]["resources"].items()
            if status["kubelet"]["socket"]
        ],
        "resources": [
            {
                "name": name,
                **{key: counts[key] for key in ("devices", "healthy", "retired", "sharing")},
                "held": None
                if held is None
                else sum(sum(holders.values()) for key, holders in held.items() if key[0] == name),
            }
            for name, counts in status["resources"].items()
        ],
        "gpus": gpus,
        "pods": _pods(gpus, material),
        "links": links,
        "events": [_event(event) for event in reversed(material.events[-EVENTS:])],
    }


_WORST = ("unhealthy", "degraded", "healthy")

_Holdings = Mapping[tuple[str, str], Mapping[Holder, int]]
"""Number of devices that a container holds, by resource and the id of the hardware."""


def _hardware(topology: Mapping[str, Any]) -> Mapping[str, list[Mapping[str, Any]]]:
    """Return the devices that are listed to the kubelet, by GPU uuid: an entry for each GPU and MIG device of each resource."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for resource in topology.get("resources", ()):
        for each in resource["hardware"]:
            found.setdefault(each["gpu"], []).append({**each, "resource": resource["name"]})
    return found


def _by_hardware(held: HoldersByDevice) -> _Holdings:
    found: dict[tuple[str, str], Counter[Holder]] = {}
    # Tens of thousands of replicas are grouped by equal sets of containers first, which takes a third of the time.
    alike = Counter((key[0], key[1].partition(REPLICA)[0], holders) for key, holders in held.items())
    for (resource, hardware, holders), count in alike.items():
        counts = found.setdefault((resource, hardware), Counter())
        for holder in holders:
            counts[holder] += count
    return found


def _gpu(
    status: Mapping[str, Any],
    explained: Mapping[str, Any],
    hardware: Iterable[Mapping[str, Any]],
    held: _Holdings | None,
) -> dict[str, Any]:
    readings = status.get("readings") or {}
    devices = [_device(each, held) for each in hardware]
    return {
        **{key: status[key] for key in ("index", "uuid", "bus_id", "model", "health", "state", "since", "withheld")},
        "signals": [
            {key: signal.get(key) for key in ("name", "detail", "verdict", "since", "action", "clears", "device")}
            for signal in explained.get("signals", ())
        ],
        "readings": {name: _finite(readings.get(name)) for name in READINGS},
        "devices": devices,
        "listed": sum(device["listed"] for device in devices),
        "held": None if held is None else sum(device["held"] for device in devices),
    }


def _finite(value: Any) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if usable else None


def _device(hardware: Mapping[str, Any], held: _Holdings | None) -> dict[str, Any]:
    holders = {} if held is None else held.get((hardware["resource"], hardware["visible_id"]), {})
    named = sorted(holders.items())
    return {
        "resource": hardware["resource"],
        "id": hardware["visible_id"],
        **{key: hardware[key] for key in ("kind", "index", "listed", "healthy", "retired", "reason", "shared")},
        "held": None if held is None else min(sum(holders.values()), hardware["listed"]),
        "holders": [
            {"namespace": holder.namespace, "pod": holder.pod, "container": holder.container, "devices": count}
            for holder, count in named[:HOLDERS]
        ],
        "left_out": max(0, len(named) - HOLDERS),
    }


def _complaint(gpu: Mapping[str, Any]) -> dict[str, Any]:
    unhealthy = gpu["state"] == "unhealthy"
    how = "Unhealthy" if unhealthy else "Healthy, degraded" if gpu["state"] == "degraded" else "withheld"
    return {
        "severity": UNHEALTHY if unhealthy else ATTENTION,
        "text": f"GPU {gpu['index']} is {how}",
        "gpu": gpu["uuid"],
    }


def _headline(gpus: Sequence[Mapping[str, Any]], troubles: Sequence[str], status: Mapping[str, Any]) -> str:
    """Summarize the node in a sentence, with the worst problem first. If there is a problem, it is always named."""
    if status.get("waiting"):
        return "Another daemon has this node"
    states = Counter(gpu["state"] for gpu in gpus)
    count = len(gpus)
    parts = [] if gpus else ["No GPU is known"]
    if states["unhealthy"]:
        parts.append(f"{states['unhealthy']} of {counted(count, 'GPU')} {are(states['unhealthy'])} Unhealthy")
    if states["degraded"]:
        parts.append(f"{states['degraded']} degraded")
    if withheld := sum(gpu["state"] == "healthy" and bool(gpu["withheld"]) for gpu in gpus):
        parts.append(f"{withheld} withheld" if parts else f"{withheld} of {counted(count, 'GPU')} withheld")
    if troubles:
        parts.insert(0, troubles[0])
    if others := len(troubles[1:]):
        parts.append(f"{others} other {'thing needs' if others == 1 else 'things need'} attention")
    if not parts:
        parts.append("The GPU is Healthy" if count == 1 else f"All {count} GPUs are Healthy")
    return "; ".join(parts) if troubles else ", ".join(parts)


def _pods(gpus: Sequence[Mapping[str, Any]], material: Material) -> dict[str, Any]:
    """Return a row for each container that holds devices, those with a bad GPU first."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for gpu in gpus:
        for device in gpu["devices"]:
            for holder in device["holders"]:
                key = (holder["namespace"], holder["pod"], holder["container"])
                row = rows.setdefault(
                    key,
                    {**{name: holder[name] for name in ("namespace", "pod", "container")}, "gpus": {}, "resources": {}},
                )
                row["gpus"][gpu["index"]] = gpu["state"]
                row["resources"][device["resource"]] = row["resources"].get(device["resource"], 0) + holder["devices"]
    listed = [
        {
            **row,
            "gpus": [{"index": index, "state": state} for index, state in sorted(row["gpus"].items())],
            "state": min(row["gpus"].values(), key=_WORST.index),
        }
        for row in rows.values()
    ]
    listed.sort(key=lambda row: (_WORST.index(row["state"]), row["namespace"], row["pod"], row["container"]))
    return {
        "known": material.held is not None,
        "why": "" if material.held is not None else material.why_unknown,
        "containers": listed[:PODS],
        "left_out": max(0, len(listed) - PODS),
    }


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    fields = {key: event.get(key, "") for key in ("at", "kind", "text", "verdict", "by", "reason")}
    return {**fields, "gpu": event.get("index")}


def links(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the links in a report of `placement.views.report`; None with fewer than two GPUs or without a known link.

    `gpus` are the indices of GPUs, in the order of `rows`, which have nvidia-smi's word for the link of each pair. `words` are
    sentences about the groups, and `legend` has the meaning of each word.
    """
    node, _ = reported(report)
    if len(node.gpus) < 2 or not node.links:
        return None
    groups = LinkGroups.of(node)
    every = range(len(groups.gpus))
    return {
        "gpus": [gpu.index for gpu in groups.gpus],
        "rows": [[matrix.SELF if a == b else matrix.word(groups.links[a][b]) for b in every] for a in every],
        "words": list(matrix.words(groups)),
        "legend": dict(matrix.meanings(groups)),
    }


def drawn(report: Mapping[str, Any], name: str) -> str:
    """Return the picture as SVG. `name` is the node's name. GPUs that are not given to pods now are struck through."""
    node, resources = reported(report)
    struck = {each.visible_id: each.reason for each in held_back(node, resources) if each.kind == GPU}
    return picture(LinkGroups.of(node), Topology.of(node), name, struck)
