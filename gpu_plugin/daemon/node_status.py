"""Build the entries of `gpu-plugin status` from the state of the parts. Pure: every clock is an argument."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import msgspec

from gpu_plugin.devices import absent
from gpu_plugin.devices.device import Device
from gpu_plugin.devices.gpu_names import short_bus_id
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.latch import AnyLatch, LatchKey, Verdict
from gpu_plugin.health.notices import notices
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.signals import SIGNALS, SignalKind
from gpu_plugin.health.signals.orders import MAINTENANCE
from gpu_plugin.kubelet.registrations import ResourceRegistration
from gpu_plugin.telemetry.readings import Newest, told

MAX_NAMED_IDS = 8
"""Limit of device ids and reasons in the entry of a resource."""

Standings = Sequence[tuple[LatchKey, AnyLatch, Verdict]]
"""The open latches of a GPU, as `HealthLedger.standing` returns them."""

HardwareKey = tuple[str, str, bool]
"""The uuid of a GPU, the id that makes a device visible to a container, and whether no container could use the device even if
its hardware were healthy."""


class Listed(msgspec.Struct, frozen=True):
    """A summary of a snapshot's devices. It is made once for each snapshot and takes about 50 ms for tens of thousands.

    `by_gpu` has all devices of each GPU, by its uuid. `distinct` has only the first of the devices that have the same reason
    and the same value of `retired`. `resources` has the entry `resource` of each resource. `unhealthy` counts, for each
    resource, the devices that the health of their hardware keeps from pods, by `HardwareKey`.
    """

    by_gpu: Mapping[str, Sequence[Device]] = msgspec.field(default_factory=dict)
    distinct: Mapping[str, Sequence[Device]] = msgspec.field(default_factory=dict)
    resources: Mapping[str, Mapping[str, object]] = msgspec.field(default_factory=dict)
    unhealthy: Mapping[str, Mapping[HardwareKey, int]] = msgspec.field(default_factory=dict)


def listed(
    devices: Mapping[str, Sequence[Device]],
    counts: Mapping[str, Mapping[str, Any]],
    unreachable: Callable[[str, Device], str],
) -> Listed:
    """Return the summary of each resource's devices. `counts` is `Inventory.status`.

    `unreachable` returns why no container could use a device of a resource even if its hardware were healthy.
    """
    found: dict[str, list[Device]] = {}
    for device in chain.from_iterable(devices.values()):
        found.setdefault(device.gpu, []).append(device)
    distinct: dict[str, Sequence[Device]] = {}
    for uuid, each in found.items():
        by_state: dict[tuple[bool, str], Device] = {}
        for device in each:
            by_state.setdefault((device.retired, device.reason), device)
        distinct[uuid] = [*by_state.values()]
    unhealthy = {name: _unhealthy(some, partial(unreachable, name)) for name, some in devices.items()}
    return Listed(found, distinct, {name: resource(each, devices[name]) for name, each in counts.items()}, unhealthy)


def _unhealthy(devices: Sequence[Device], unreachable: Callable[[Device], str]) -> Mapping[HardwareKey, int]:
    """Count the devices that the health of their hardware keeps from pods. Call `unreachable` once for replicas."""
    unfit = [each for each in devices if not (each.healthy or each.retired or each.withheld)]
    blocked = {
        key: bool(unreachable(each)) for key, each in {(each.gpu, each.visible_id): each for each in unfit}.items()
    }
    return Counter((each.gpu, each.visible_id, blocked[each.gpu, each.visible_id]) for each in unfit)


def gpu(
    hardware: Gpu,
    health: Mapping[str, Any],
    standing: Standings,
    devices: Sequence[Device],
    holders: Mapping[str, frozenset[str]] | None,
    readings: Newest | None = None,
) -> Mapping[str, object]:
    """Return the entry of one GPU.

    Args:
        hardware: the GPU.
        health: its entry of `Operations.health`: index, uuid, state, verdict, reasons.
        standing: the open latches of the GPU and of its MIG devices.
        devices: its devices in the lists for the kubelet.
        holders: pods by device id, as `pods_by_id` returns them; None if the kubelet does not report them.
        readings: the newest readings; None before the first look, and for a GPU with a fault.

    Returns:
        The entry, with the fields of `health` and these:
        `bus_id` and `model`;
        `health`: Healthy or Unhealthy, as for the kubelet;
        `since`: Unix time in seconds at which the oldest latch with the worst verdict opened; None without an open latch;
        `signals`: the verdicts of the open signals, by name;
        `held_back`: the orders of operators, if only orders hold the GPU back;
        `withheld`: why devices of healthy hardware are withheld;
        `notices`: see `health.notices`;
        `holders`: pods as namespace/name; None if they are not known;
        `readings`: see `telemetry.readings.told`.
    """
    worst = max((verdict for _, _, verdict in standing), default=Verdict.OK)
    since = min((latch.since for _, latch, verdict in standing if verdict is worst), default=None)
    sound = (device for device in devices if not device.retired and health["state"] != "unhealthy")
    return {
        **health,
        "bus_id": short_bus_id(hardware.pci_bus_id),
        "model": hardware.model,
        "health": "Unhealthy" if health["state"] == "unhealthy" else "Healthy",
        "since": since,
        "signals": _verdicts(standing),
        "held_back": held_back(standing),
        "withheld": list(dict.fromkeys(device.reason for device in sound if device.reason and not device.healthy)),
        "holders": None if holders is None else sorted({pod for each in devices for pod in holders.get(each.id, ())}),
        "notices": gpu_notices(hardware, readings, released=MAINTENANCE in _verdicts(standing)),
        "readings": told(hardware, readings),
    }


def gpu_notices(hardware: Gpu, readings: Newest | None, *, released: bool) -> Sequence[Mapping[str, str]]:
    """Return the notices about a GPU as objects with `found` and `remedy`."""
    sample = Sample() if readings is None else readings.sample
    found = notices(
        hardware.uuid,
        mig_pending=hardware.mig_pending,
        vgpu_licensed=sample.vgpu_licensed,
        persistent=sample.counting == 0,
        released=released,
    )
    return [msgspec.structs.asdict(notice) for notice in found]


def missing(hardware: Gpu) -> Mapping[str, object]:
    """Return the entry of a missing GPU: `bus_id` and `uuid` (empty if not known), `model`, `why`, and `name`."""
    return {
        "bus_id": short_bus_id(hardware.pci_bus_id),
        "uuid": hardware.uuid,
        "model": hardware.model,
        "why": hardware.unreadable or "",
        "name": absent.named(hardware),
    }


def held_back(standing: Standings) -> Sequence[str]:
    """Return the names of the orders that hold the whole GPU back; empty if a fault or a missing first look does, too."""
    fatal = {key.signal for key, _, verdict in standing if verdict is Verdict.FATAL and not key.device}
    orders = {signal for signal in fatal if SIGNALS[signal].kind is SignalKind.ORDER}
    rest = fatal - orders
    if MAINTENANCE in orders:  # a released GPU is not read
        rest = {signal for signal in rest if not SIGNALS[signal].of_process}
    return () if rest else sorted(orders)


def devices_held_back(unhealthy: Mapping[HardwareKey, int], standings: Mapping[str, Standings]) -> int:
    """Return how many of a resource's devices in `Listed.unhealthy` only orders of operators hold back.

    `standings` has the open latches of each GPU, by its uuid. MIG devices with their own fault do not count. Devices that no
    container could use anyway count only if their GPU is released for maintenance, because that is expected then.
    """
    orders = {uuid: by for uuid, standing in standings.items() if (by := held_back(standing))}
    faulty = {
        (uuid, key.device)
        for uuid in orders
        for key, _, verdict in standings[uuid]
        if verdict is Verdict.FATAL and key.device
    }
    return sum(
        count
        for (gpu, visible, unreachable), count in unhealthy.items()
        if gpu in orders and (gpu, visible) not in faulty and (not unreachable or MAINTENANCE in orders[gpu])
    )


def devices_faulty(unhealthy: Mapping[HardwareKey, int], standings: Mapping[str, Standings]) -> int:
    """Return how many of a resource's devices in `Listed.unhealthy` have a fault of their GPU or MIG device.

    `standings` has the open latches of each GPU, by its uuid.
    """
    faulty = {
        (uuid, key.device)
        for uuid, standing in standings.items()
        for key, _, verdict in standing
        if verdict is Verdict.FATAL and (key.device or not held_back(standing))
    }
    return sum(
        count for (gpu, visible, _), count in unhealthy.items() if (gpu, "") in faulty or (gpu, visible) in faulty
    )


def _verdicts(standing: Standings) -> Mapping[str, str]:
    """Return the worst verdict of each open signal, by its name."""
    worst: dict[str, Verdict] = {}
    for key, _, verdict in standing:
        worst[key.signal] = max(verdict, worst.get(key.signal, Verdict.OK))
    return {signal: verdict.name for signal, verdict in worst.items()}


def pods_by_id(holders: Mapping[tuple[str, str], frozenset[str]]) -> Mapping[str, frozenset[str]]:
    """Return the pods that hold each device id, of any resource. Call it once for all GPUs: there may be tens of thousands."""
    found: dict[str, frozenset[str]] = {}
    for (_, identifier), pods in holders.items():
        found[identifier] = found[identifier] | pods if identifier in found else pods
    return found


def resource(counts: Mapping[str, Any], devices: Sequence[Device]) -> Mapping[str, object]:
    """Return the entry of a resource: `counts`, and the first ids and reasons of its unhealthy and retired devices."""
    unhealthy = [device.id for device in devices if not device.healthy and not device.retired]
    retired = [device.id for device in devices if device.retired]
    reasons = dict.fromkeys(device.reason for device in devices if not device.healthy and not device.retired)
    return {
        **counts,
        "unhealthy_ids": unhealthy[:MAX_NAMED_IDS],
        "retired_ids": retired[:MAX_NAMED_IDS],
        "reasons": [*reasons][:MAX_NAMED_IDS],
    }


def unusable(name: str, counts: Mapping[str, Any]) -> str:
    """Return a sentence if a resource has devices but no Healthy device; else return an empty text."""
    present = counts["devices"] - counts.get("retired", 0)
    if not present or counts["healthy"]:
        return ""
    why = "; ".join(counts.get("reasons", ()))
    return f"{name}: none of its devices is Healthy{': ' if why else ''}{why}"


def registration(standing: ResourceRegistration, now: float, unix: float) -> Mapping[str, object]:
    """Return the entry of a resource's registration. `now` is the steady clock, and `unix` the Unix time of the same moment.

    Returns:
        `registered`; `since`, the Unix time in seconds of the registration or of its loss, None if there was no registration;
        `why` the resource is not registered; and `endpoint`, the path of its socket.
    """
    moment = standing.registered if standing.registered is not None else standing.lost
    return {
        "registered": standing.registered is not None,
        "since": None if moment is None else unix - (now - moment),
        "why": standing.why,
        "endpoint": "" if standing.socket is None else str(standing.socket),
    }


def complaints(status: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each problem. `gpu-plugin status` exits with 1 if there is a problem."""
    gpus = status["health"]["gpus"]
    return [*troubles(status), *(f"GPU {each['index']} is Unhealthy" for each in gpus if each["state"] == "unhealthy")]


def troubles(status: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each problem of the node, except unhealthy GPUs."""
    found = []
    configuration = status["configuration"]
    refused = configuration.get("faults") or filter(None, [configuration["refused"]])
    found += [f"configuration: {why}" for why in (*refused, *filter(None, [configuration.get("unheard")]))]
    if waiting := status.get("waiting"):  # the other entries are not known yet
        return [f"waiting: {waiting}", *found]
    kubelet = status.get("kubelet") or {}
    if kubelet.get("socket"):
        found += [f"{name}: {each['why']}" for name, each in kubelet["resources"].items() if not each["registered"]]
    cdi = status["cdi"]
    if cdi is not None and cdi["trouble"]:
        found.append(f"CDI: {cdi['trouble']}")
    state = status.get("state") or {}
    if state.get("trouble"):
        named = state["directory"] in state["trouble"]
        found.append(state["trouble"] if named else f"{state['directory']}: {state['trouble']}")
    cluster = status.get("cluster") or {}
    found += [f"cluster: {trouble}" for trouble in cluster.get("trouble", ())]
    if trouble := (status.get("labels") or {}).get("trouble"):
        found.append(f"labels: {trouble}")
    driver = status.get("driver", {})
    if trouble := driver.get("trouble"):
        found.append(f"driver: {trouble}")
    elif not driver.get("answered", True):
        found.append("driver: it has not answered yet, so no GPU is known to be usable")
    if restart := driver.get("restart"):
        found.append(f"driver: {restart}")
    found += [f"{each['name']} is missing: {each['why']}" for each in status.get("missing", ())]
    found += [f"not served as asked: {why}" for why in status.get("unoffered", ())]
    found += filter(None, (unusable(name, counts) for name, counts in status.get("resources", {}).items()))
    return found
