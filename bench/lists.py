"""Event loop time of long device lists. All runs in this process, without a kubelet and without sockets."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench.calls import preferred
from bench.plan import MeasurementError, Plan
from bench.probed import probed, whole_gpus
from bench.quantiles import median, percentile
from bench.table import Judged, Row
from gpu_plugin.config.sharing import SharedResource
from gpu_plugin.containers.edits import Access
from gpu_plugin.devices.device import Device, Resource
from gpu_plugin.devices.node import Node
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Facts, Sample, XidEvent
from gpu_plugin.health.policy import HealthPolicy, XidPolicy
from gpu_plugin.health.xid_table import XID_TABLE
from gpu_plugin.kubelet import messages, wire
from gpu_plugin.kubelet.feed import ListFeed
from gpu_plugin.kubelet.service import DevicePluginService
from gpu_plugin.kubelet.snapshot import ResourceView, SnapshotStore
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.placement.topology import Topology
from gpu_plugin.runtime.pulse import Pulse

NAME = "nvidia.com/gpu"
DEVICES = 2_000
CHANGES = 200
GPUS = 8
MANY_IDS = 60_000
SIZES = (4, MANY_IDS // 2)
"""The numbers of devices that a container requests: a few, and half of the ids in the request."""

LINKED = "dgx1-v100"
LONG_CALLS = 5
TICK = 0.001
"""Seconds between two checks of the event loop's delay."""


def health_change(plan: Plan, directory: Path) -> list[Row]:
    """Measure a change of health of one device of 2,000."""
    del plan, directory
    return asyncio.run(_health_change())


def gpu_change(plan: Plan, directory: Path) -> list[Row]:
    """Measure a change of health of one GPU of eight with 250 devices each."""
    del plan, directory
    return asyncio.run(_gpu_change())


def many_ids(plan: Plan, directory: Path) -> list[Row]:
    """Measure GetPreferredAllocation of a few devices and of half of 60,000 devices, which are replicas of 8 GPUs."""
    del plan, directory
    return [row for size in SIZES for row in asyncio.run(_many_ids(probed(LINKED), size))]


async def _health_change() -> list[Row]:
    """Change the health of different devices, so that no Unhealthy device is encoded before."""
    uuids = [_uuid(at) for at in range(DEVICES)]
    store = _store([Device(uuid, uuid, uuid, str(at), numa=(at % 2,)) for at, uuid in enumerate(uuids)])
    feed = ListFeed(NAME, store)
    ledger = HealthLedger(HealthPolicy(XidPolicy(XID_TABLE)))
    for uuid in uuids:
        ledger.watch(uuid, Facts())
        ledger.observe(uuid, Sample(), 0.0)  # a first successful check
    await feed.refresh()
    publishing, whole = [], []
    for uuid in uuids[:: DEVICES // CHANGES]:
        began = time.perf_counter()
        ledger.observe(uuid, XidEvent(79), 0.0)
        view = store.current.resources[NAME].with_reasons({uuid: ledger.reason(uuid)})
        ready = time.perf_counter()
        store.publish({NAME: view})
        changed = await feed.refresh()
        ended = time.perf_counter()
        if not changed or uuid.encode() not in feed.payload:
            raise MeasurementError("a health change did not change the list")
        publishing.append((ended - ready) * 1000)
        whole.append((ended - began) * 1000)
    figure = f"health change in {DEVICES:,} devices"
    return [
        Row(
            f"{figure}: publish, list",
            "ms",
            len(publishing),
            median(publishing),
            percentile(publishing, 99),
            note="the last part of the row below",
            series={"ms": publishing},
        ),
        Row(
            f"{figure}: from the Xid on",
            "ms",
            len(whole),
            median(whole),
            percentile(whole, 99),
            1,
            note="event loop time: ledger, view, publishing, list",
            series={"ms": whole},
        ),
    ]


async def _gpu_change() -> list[Row]:
    """Make each GPU's devices Unhealthy for the first time."""
    taken = []
    store = _store([_replica(at) for at in range(DEVICES)])
    feed = ListFeed(NAME, store)
    await feed.refresh()
    for gpu in range(GPUS):
        began = time.perf_counter()
        store.publish({NAME: store.current.resources[NAME].with_reasons({_uuid(gpu): "Xid 79"})})
        changed = await feed.refresh()
        taken.append((time.perf_counter() - began) * 1000)
        if not changed:
            raise MeasurementError("a health change did not change the list")
    figure = f"health change of {DEVICES // GPUS} in {DEVICES:,} devices"
    note = "event loop time, one of 8 GPUs shared by 250"
    return [Row(figure, "ms", GPUS, median(taken), percentile(taken, 99), note=note, series={"ms": taken})]


async def _many_ids(node: Node, size: int) -> list[Row]:
    gpus = whole_gpus(node)
    shared = SharedResource(NAME, NAME, MANY_IDS // len(gpus))
    devices = [replace(gpu, id=f"{gpu.id}::{at}", sharing=shared) for at in range(shared.replicas) for gpu in gpus]
    ids = [device.id for device in devices]
    store = _store(devices, Placement.of(Topology.of(node)))
    service = DevicePluginService(ListFeed(NAME, store), store, Pulse())
    handle: Callable[[Any], Awaitable[None]] = service.__mapping__()[wire.PREFERRED].func
    request = preferred(ids, (), size)
    taken, stalls = [], []
    for _ in range(LONG_CALLS):
        stream = _OneCall(request)
        ticking = asyncio.create_task(longest_stall())
        await asyncio.sleep(2 * TICK)
        began = time.perf_counter()
        await handle(stream)
        taken.append((time.perf_counter() - began) * 1000)
        ticking.cancel()
        stalls.append(await ticking)
        [chosen] = messages.decode(messages.PreferredAllocationResponse, stream.answer).container_responses
        each = Counter(identifier.split("::")[0] for identifier in {*chosen.device_ids})
        if (each.total(), len(each)) != (size, min(size, len(gpus))):
            raise MeasurementError(f"{each.total()} devices of {len(each)} GPUs were preferred instead of {size}")
    figure = f"GetPreferredAllocation {size:,} of {MANY_IDS:,}"
    return [
        Row(
            figure,
            "ms",
            LONG_CALLS,
            median(taken),
            percentile(taken, 99),
            1000,
            note="on a thread",
            series={"ms": taken},
        ),
        Row(
            f"{figure}: loop stall",
            "ms",
            LONG_CALLS,
            median(stalls),
            percentile(stalls, 99),
            20,
            Judged.P99,
            note="longest of each call",
            series={"ms": stalls},
        ),
    ]


class _OneCall:
    """A stream with one request."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.answer = b""

    async def recv_message(self) -> bytes:
        return self._request

    async def send_message(self, answer: bytes) -> None:
        self.answer = answer


async def longest_stall() -> float:
    """Return the longest delay of the event loop in ms. Runs until cancelled."""
    longest = 0.0
    last = time.perf_counter()
    try:
        while True:
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            longest = max(longest, now - last - TICK)
            last = now
    except asyncio.CancelledError:
        return max(longest, time.perf_counter() - last - TICK) * 1000


def _uuid(at: int) -> str:
    return f"GPU-{at:08x}-0000-4000-8000-{at:012x}"


def _replica(at: int) -> Device:
    """Return a replica of one GPU among 8."""
    gpu = at % GPUS
    return Device(f"{_uuid(gpu)}::{at}", _uuid(gpu), _uuid(gpu), str(gpu), numa=(gpu // 4,))


def _store(devices: list[Device], placement: Placement | None = None) -> SnapshotStore:
    store = SnapshotStore()
    store.publish({NAME: ResourceView.of(Resource(NAME, tuple(devices)), Access(), placement or Placement())})
    return store
