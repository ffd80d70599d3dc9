"""The entries of GPUs and resources in the status, from the ledger, the device lists and the holders of devices. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gpu_plugin.devices import absent, node
from gpu_plugin.devices.device import Device
from gpu_plugin.devices.gpu_names import short_bus_id
from gpu_plugin.devices.sharing import REPLICA
from gpu_plugin.health.explain import Explained
from gpu_plugin.health.latch import AnyLatch, LatchKey, Verdict
from gpu_plugin.health.notices import Notice, notices
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.signals import SIGNALS, SignalKind
from gpu_plugin.health.signals.orders import MAINTENANCE
from gpu_plugin.kubelet.pod_listing import Holder, HoldersByDevice
from gpu_plugin.kubelet.registrations import ResourceRegistration
from gpu_plugin.kubelet.snapshot import ResourceView
from gpu_plugin.placement.views.report import Offered
from gpu_plugin.status.model import Devices, Gpu, GpuState, HolderCount, Missing, Registration, Resource
from gpu_plugin.status.readings import Newest, told

MAX_REASONS = 8  # in the entry of a resource
MAX_HOLDERS = 64  # containers in the entry of a GPU or MIG device

# The open latches of a GPU, as `HealthLedger.standing` returns them.
Standings = Sequence[tuple[LatchKey, AnyLatch, Verdict]]

# The uuid of a GPU, the id that makes a device visible to a container, and whether no container could use the device even if
# its hardware were healthy.
HardwareKey = tuple[str, str, bool]

# The number of devices that a container holds, by resource and the id of the hardware.
Holdings = Mapping[tuple[str, str], Mapping[Holder, int]]


class Listed(msgspec.Struct, frozen=True):
    """A summary of a snapshot's devices. It is made once for each snapshot and takes about 50 ms for tens of thousands.

    `resources` has the entry of each resource, without its registration and held devices. `unhealthy` counts, for each resource,
    the devices that the health of their hardware keeps from pods, by `HardwareKey`. `withheld` has, by the uuid of a GPU, the
    reasons why devices of sound hardware are kept from pods.
    """

    resources: Mapping[str, Resource] = {}
    unhealthy: Mapping[str, Mapping[HardwareKey, int]] = {}
    withheld: Mapping[str, tuple[str, ...]] = {}


def listed(views: Mapping[str, ResourceView], withheld: Mapping[str, tuple[str, ...]]) -> Listed:
    """Return the summary of each resource's devices. `withheld` is `Inventory.withheld`."""
    return Listed(
        {name: _resource(view.resource.devices) for name, view in views.items()},
        {name: _unhealthy(view) for name, view in views.items()},
        withheld,
    )


def _resource(devices: Sequence[Device]) -> Resource:
    reasons = dict.fromkeys(device.reason for device in devices if not device.healthy and not device.retired)
    return Resource(
        devices=len(devices),
        healthy=sum(device.healthy for device in devices),
        retired=sum(device.retired for device in devices),
        sharing=tuple(sorted({device.shared for device in devices if device.shared and not device.retired})),
        reasons=tuple(reasons)[:MAX_REASONS],
    )


def _unhealthy(view: ResourceView) -> Mapping[HardwareKey, int]:
    """Count the devices that the health of their hardware keeps from pods. Call `unreachable` once for replicas."""
    unfit = [each for each in view.resource.devices if not (each.healthy or each.retired or each.withheld)]
    blocked = {
        key: bool(view.unreachable(each)) for key, each in {(each.gpu, each.visible_id): each for each in unfit}.items()
    }
    return Counter((each.gpu, each.visible_id, blocked[each.gpu, each.visible_id]) for each in unfit)


def holdings(held: HoldersByDevice) -> Holdings:
    """Return the number of devices that each container holds, by resource and hardware."""
    found: dict[tuple[str, str], Counter[Holder]] = {}
    # Tens of thousands of replicas are grouped by equal sets of containers first, which takes a third of the time.
    alike = Counter((key[0], key[1].partition(REPLICA)[0], holders) for key, holders in held.items())
    for (resource, hardware, holders), count in alike.items():
        counts = found.setdefault((resource, hardware), Counter())
        for holder in holders:
            counts[holder] += count
    return found


def held_devices(held: HoldersByDevice) -> Mapping[str, int]:
    """Return the number of devices that containers hold, by resource."""
    return Counter(resource for resource, _ in held)


def gpu(
    hardware: node.Gpu,
    explained: Explained,
    standing: Standings,
    withheld: tuple[str, ...] = (),
    offered: Iterable[tuple[str, Offered]] = (),
    held: Holdings | None = None,
    readings: Newest | None = None,
) -> Gpu:
    """Return the entry of one GPU.

    Args:
        hardware: the GPU.
        explained: its open signals.
        standing: the open latches of the GPU and of its MIG devices.
        withheld: its entry in `Listed.withheld`.
        offered: its hardware in the device lists, with the resource.
        held: the containers that hold devices; None if they are not known.
        readings: the newest readings; None before the first look, and for a GPU with a fault.
    """
    worst = max((verdict for _, _, verdict in standing), default=Verdict.OK)
    orders = held_back(standing)
    return Gpu(
        index=hardware.index,
        uuid=hardware.uuid,
        bus_id=short_bus_id(hardware.pci_bus_id),
        model=hardware.model,
        state=_state(explained, orders, withheld),
        healthy=explained.healthy,
        verdict=explained.verdict.name,
        since=min((latch.since for _, latch, verdict in standing if verdict is worst), default=None),
        signals=explained.signals,
        held_back=tuple(orders),
        withheld=withheld,
        notices=_notices(hardware, readings),
        holders=None if held is None else _pods(offered, held),
        devices=tuple(_devices(resource, each, held) for resource, each in offered),
        readings=told(hardware, readings),
    )


def _state(explained: Explained, orders: Sequence[str], withheld: Sequence[str]) -> GpuState:
    if not explained.healthy:
        return "held-back" if orders else "unhealthy"
    if withheld:
        return "withheld"
    return "degraded" if explained.verdict >= Verdict.DEGRADED else "healthy"


def _notices(hardware: node.Gpu, readings: Newest | None) -> tuple[Notice, ...]:
    sample = Sample() if readings is None else readings.sample
    return tuple(
        notices(
            hardware.uuid,
            mig_pending=hardware.mig_pending,
            vgpu_licensed=sample.vgpu_licensed,
            persistent=sample.counting == 0,
        )
    )


def _pods(offered: Iterable[tuple[str, Offered]], held: Holdings) -> tuple[str, ...]:
    """Return the pods that hold devices of this hardware, as namespace/name."""
    holders = (holder for resource, each in offered for holder in held.get((resource, each.visible_id), ()))
    return tuple(sorted({f"{holder.namespace}/{holder.pod}" for holder in holders}))


def _devices(resource: str, offered: Offered, held: Holdings | None) -> Devices:
    holders = {} if held is None else held.get((resource, offered.visible_id), {})
    named = sorted(holders.items())
    return Devices(
        resource=resource,
        id=offered.visible_id,
        kind=offered.kind,
        index=offered.index,
        listed=offered.listed,
        healthy=offered.healthy,
        retired=offered.retired,
        reason=offered.reason,
        shared=offered.shared,
        held=None if held is None else min(sum(holders.values()), offered.listed),
        holders=tuple(
            HolderCount(namespace=each.namespace, pod=each.pod, container=each.container, devices=count)
            for each, count in named[:MAX_HOLDERS]
        ),
        left_out=max(0, len(named) - MAX_HOLDERS),
    )


def missing(hardware: node.Gpu) -> Missing:
    """Return the entry of a missing GPU."""
    return Missing(
        name=absent.named(hardware),
        why=hardware.unreadable or "",
        bus_id=short_bus_id(hardware.pci_bus_id),
        uuid=hardware.uuid,
        model=hardware.model,
    )


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


def registration(standing: ResourceRegistration, now: float, unix: float) -> Registration:
    """Return the entry of a resource's registration. `now` is the steady clock, and `unix` the Unix time of the same moment."""
    moment = standing.registered if standing.registered is not None else standing.lost
    return Registration(
        registered=standing.registered is not None,
        since=None if moment is None else unix - (now - moment),
        why=standing.why,
        endpoint="" if standing.socket is None else str(standing.socket),
    )
