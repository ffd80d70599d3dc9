"""The longest stall of the event loop with 5,376 devices, in this process, with offering, health and lists."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import anyio

from bench.lists import NAME, TICK
from bench.plan import PATIENCE, MeasurementError, Plan
from bench.probed import probed
from bench.process import PROFILE
from bench.quantiles import median, percentile
from bench.table import Judged, Row
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import Settings, SettingsStore
from gpu_plugin.daemon.offering import Offering
from gpu_plugin.devices.node import Node
from gpu_plugin.health.latch import Health
from gpu_plugin.kubelet.feed import ListFeed
from gpu_plugin.kubelet.inventory import Inventory
from gpu_plugin.kubelet.offer import offer
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.kubelet.snapshot import SnapshotStore
from gpu_plugin.runtime.pulse import Pulse

REPLICAS = 672
"""The number of replicas of each of 8 GPUs."""

OTHER = "nvidia.com/renamed"


def measure(plan: Plan, directory: Path) -> list[Row]:
    """Measure the first list, the list after a GPU became Unhealthy, and the list after a rename of the resource."""
    node = probed(PROFILE)
    logging.getLogger("gpu_plugin").setLevel(logging.CRITICAL)  # the cost of a line depends on where it goes
    taken: dict[str, list[float]] = {"first list": [], "health change": [], "rename": []}
    for at in range(plan.rounds):
        for what, stall in anyio.run(_once, node, directory / str(at)).items():
            taken[what].append(stall)
    devices = len(node.gpus) * REPLICAS
    return [
        Row(
            f"longest stall with {devices:,} devices: {what}",
            "ms",
            len(stalls),
            median(stalls),
            percentile(stalls, 99),
            20,
            Judged.P99,
            note="CPU time of the event loop's thread between two of its turns, until the list is encoded",
            series={"ms": stalls},
        )
        for what, stalls in taken.items()
    ]


async def _once(node: Node, directory: Path) -> dict[str, float]:
    """Return the longest stall of each step in ms."""
    settings, renamed = (_settings(directory, name) for name in (NAME, OTHER))
    sick: set[str] = set()
    store = SnapshotStore()
    inventory = Inventory(store, lambda gpu, _: Health(reason="Xid 79" if gpu in sick else ""))
    registrations = Registrations()
    for name in (NAME, OTHER):
        registrations.taken(name)
    offering = Offering(inventory, SettingsStore(settings), Pulse(), registrations)
    feeds = {name: ListFeed(name, store) for name in (NAME, OTHER)}
    gpu = node.gpus[0].uuid

    def unhealthy() -> None:
        sick.add(gpu)
        inventory.health_changed(gpu)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(offering.settle)
        for feed in feeds.values():
            tasks.start_soon(feed.run)
        found = {
            "first list": await _stalled(lambda: offering.publish(offer(node, settings, "/")), feeds[NAME]),
            "health change": await _stalled(unhealthy, feeds[NAME]),
            "rename": await _stalled(lambda: offering.publish(offer(node, renamed, "/")), feeds[OTHER]),
        }
        tasks.cancel_scope.cancel()
    if not feeds[OTHER].payload:
        raise MeasurementError("the renamed resource has no list")
    return found


async def _stalled(act: Callable[[], object], feed: ListFeed) -> float:
    """Return the longest stall in ms from an action to its list."""
    version, longest = feed.version, 0.0
    await asyncio.sleep(TICK)
    last = time.thread_time()
    act()
    with anyio.fail_after(PATIENCE):
        while feed.version == version or not feed.payload:
            await asyncio.sleep(TICK)
            now = time.thread_time()
            longest, last = max(longest, now - last), now
    return longest * 1000


def _settings(directory: Path, name: str) -> Settings:
    shared: dict[str, object] = {"name": NAME, "replicas": REPLICAS} | ({} if name == NAME else {"rename": name})
    file = {"version": "v1", "sharing": {"timeSlicing": {"resources": [shared]}}}
    return resolve({"socket_dir": str(directory), "state_dir": str(directory)}, {}, file)
