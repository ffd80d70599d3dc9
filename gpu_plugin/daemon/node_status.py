"""What `gpu-plugin status` is told, put together from what the parts know. Pure: takes every clock as an argument."""

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
"""Device ids that are named where only some are."""

Standings = Sequence[tuple[LatchKey, AnyLatch, Verdict]]
"""What stands against a GPU, as `HealthLedger.standing` tells it."""

HardwareKey = tuple[str, str, bool]
"""The uuids of a GPU and of what a container is told to see, and whether no container could use it were it healthy."""


class Listed(msgspec.Struct, frozen=True):
    """What a snapshot's devices come to: made once for each snapshot, in some 50 ms where there are tens of thousands.

    `by_gpu` are all devices of each GPU, by its uuid; `distinct` the first of those that no status tells apart: they are retired
    or not, for the same reason. `resources` is what `resource` says of each. `unhealthy` counts the devices of each that the
    health of their hardware keeps from pods, by `HardwareKey`.
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
    """What the devices of each resource come to, with its counts, as `Inventory.status` has them.

    `unreachable` gives why no container could use a device of a resource though its hardware were healthy.
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
    """How many devices the health of their hardware keeps from pods. Replicas of the same hardware are asked about once."""
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
    """One GPU at a glance.

    Args:
        hardware: what it is.
        health: its entry of `Operations.health`: index, uuid, state, verdict, reasons.
        standing: what stands against it or a MIG device of it.
        devices: what of it is listed to the kubelet.
        holders: pods by device id, as `pods_by_id` gives them, or None where the kubelet does not say.
        readings: what looks read last; None before the first, and of a GPU that is at fault.

    Returns:
        The entry with `bus_id`, `model`, `health` (the kubelet's word), `since` (Unix time in seconds of the oldest of what is
        worst; None where nothing is wrong), `signals` (the verdicts of those that stand, by name), `held_back` (the
        orders that alone hold it back), `withheld` (why devices of
        healthy hardware are withheld), `notices` (`health.notices`),
        `holders` (pods as namespace/name; None where they are not known) and `readings`
        (`telemetry.readings.told`).
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
    """The notices about a GPU as objects: `found` and `remedy`."""
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
    """A GPU that the node should have and has not: `bus_id` and `uuid` (empty if not known), `model`, `why`, and its `name`."""
    return {
        "bus_id": short_bus_id(hardware.pci_bus_id),
        "uuid": hardware.uuid,
        "model": hardware.model,
        "why": hardware.unreadable or "",
        "name": absent.named(hardware),
    }


def held_back(standing: Standings) -> Sequence[str]:
    """The orders of operators that alone hold the whole GPU back, by name; none where a fault does, or it is still unseen."""
    fatal = {key.signal for key, _, verdict in standing if verdict is Verdict.FATAL and not key.device}
    orders = {signal for signal in fatal if SIGNALS[signal].kind is SignalKind.ORDER}
    rest = fatal - orders
    if MAINTENANCE in orders:  # who is released is not looked at
        rest = {signal for signal in rest if not SIGNALS[signal].of_process}
    return () if rest else sorted(orders)


def devices_held_back(unhealthy: Mapping[HardwareKey, int], standings: Mapping[str, Standings]) -> int:
    """How many devices nothing but orders of operators holds back: of those that `Listed.unhealthy` counts of a resource.

    `standings` is what stands against each GPU, by its uuid. A MIG device with a fault of its own is none of them, nor is what
    no container could use anyway; but of a GPU that is released for maintenance nothing else is expected.
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


def _verdicts(standing: Standings) -> Mapping[str, str]:
    """The worst verdict of each signal that stands, by its name."""
    worst: dict[str, Verdict] = {}
    for key, _, verdict in standing:
        worst[key.signal] = max(verdict, worst.get(key.signal, Verdict.OK))
    return {signal: verdict.name for signal, verdict in worst.items()}


def pods_by_id(holders: Mapping[tuple[str, str], frozenset[str]]) -> Mapping[str, frozenset[str]]:
    """The pods that hold each device id, whatever the resource: once for all GPUs, since there may be tens of thousands."""
    found: dict[str, frozenset[str]] = {}
    for (_, identifier), pods in holders.items():
        found[identifier] = found[identifier] | pods if identifier in found else pods
    return found


def resource(counts: Mapping[str, Any], devices: Sequence[Device]) -> Mapping[str, object]:
    """One resource: its counts, which of its devices are unhealthy or retired, the first few by id, and the first reasons."""
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
    """A sentence where a resource has devices and none of them is Healthy; empty where one is, or there are none."""
    present = counts["devices"] - counts.get("retired", 0)
    if not present or counts["healthy"]:
        return ""
    why = "; ".join(counts.get("reasons", ()))
    return f"{name}: none of its devices is Healthy{': ' if why else ''}{why}"


def registration(standing: ResourceRegistration, now: float, unix: float) -> Mapping[str, object]:
    """How a resource stands with the kubelet. `now` is the steady clock of the standing, `unix` the same moment's Unix time.

    Returns:
        `registered`, `since` (Unix time in seconds: registered, or lost, since then; None where it never was), `why` it is not,
        and `endpoint`, the socket that it is served on.
    """
    moment = standing.registered if standing.registered is not None else standing.lost
    return {
        "registered": standing.registered is not None,
        "since": None if moment is None else unix - (now - moment),
        "why": standing.why,
        "endpoint": "" if standing.socket is None else str(standing.socket),
    }


def complaints(status: Mapping[str, Any]) -> list[str]:
    """What is wrong, a sentence each; nothing where all is well. It decides the exit status of `gpu-plugin status`."""
    gpus = status["health"]["gpus"]
    return [*troubles(status), *(f"GPU {each['index']} is Unhealthy" for each in gpus if each["state"] == "unhealthy")]


def troubles(status: Mapping[str, Any]) -> list[str]:
    """What is wrong with the node beside its GPUs, a sentence each."""
    found = []
    configuration = status["configuration"]
    refused = configuration.get("faults") or filter(None, [configuration["refused"]])
    found += [f"configuration: {why}" for why in (*refused, *filter(None, [configuration.get("unheard")]))]
    if waiting := status.get("waiting"):  # what it would serve is not known yet
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
