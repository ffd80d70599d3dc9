"""The cost of checking GPUs, in this process: the thread that calls the driver, and the event loop that judges the answers."""

import asyncio
import time
from pathlib import Path

import anyio
import msgspec

from bench.lists import longest_stall
from bench.plan import PATIENCE, MeasurementError, Plan
from bench.process import PROFILE
from bench.quantiles import median, percentile
from bench.table import Judged, Row
from gpu_plugin.devices.node import Node
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Observation, Sample, facts
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.nvml.monitor import Monitor
from gpu_plugin.nvml.sample import look
from gpu_plugin.nvml.traits import probe_gpu
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost
from gpu_plugin.simulation.profile import Profile, load

GPUS = 16
WARM_UP = 5
"""Rounds that are not measured. In the first round, the monitor detects the calls that a GPU does not support."""

UNSEEN = {"retired_pending", "retired_pages", "unrepairable_memory"}
"""Fields of a sample without a value on an H100: it remaps rows instead of retiring pages, and this driver's NVML does not report
unrepairable memory."""


def every_signal(plan: Plan, directory: Path) -> list[Row]:
    """Measure every signal of 16 simulated H100 behind NVSwitches."""
    del directory
    profile = _sixteen(load(PROFILE))
    thread = _on_the_thread(SimulatedNode(profile), 5 * plan.rounds)
    loop = anyio.run(_on_the_loop, SimulatedNode(profile), 5 * plan.rounds)
    figure = f"one poll of {GPUS} GPUs, every signal"
    return [
        Row(
            f"{figure}: poll thread",
            "ms",
            len(thread),
            median(thread),
            percentile(thread, 99),
            10,
            note="a simulated driver's answers, which are slower than a real one's",
            series={"ms": thread},
        ),
        Row(
            f"{figure}: loop stall",
            "ms",
            len(loop),
            median(loop),
            percentile(loop, 99),
            2,
            Judged.P50,
            note="longest of each round",
            series={"ms": loop},
        ),
    ]


def _sixteen(profile: Profile) -> Profile:
    """Return the profile with twice its eight GPUs."""
    twins = tuple(
        msgspec.structs.replace(
            gpu, uuid=f"GPU-{at:08x}{gpu.uuid[12:]}", minor=8 + at, pci_bus_id=f"00000001:{0x10 + at:02X}:00.0"
        )
        for at, gpu in enumerate(profile.gpus)
    )
    pairs = {(low, high): 50 for high in range(GPUS) for low in range(high)}
    return msgspec.structs.replace(
        profile,
        gpus=(*profile.gpus, *twins),
        remotes=profile.remotes * 2,
        ancestors=pairs | profile.ancestors,
        device_nodes=profile.device_nodes | {f"/dev/nvidia{gpu.minor}" for gpu in twins},
    )


def _on_the_thread(node: SimulatedNode, rounds: int) -> list[float]:
    """Return the milliseconds of each round of checks, one after the other as on the monitor's thread."""
    driver, host = SimulatedDriver(node), SimulatedHost(node)
    driver.open()
    probed = [probe_gpu(driver, host, index) for index in range(GPUS)]
    skip: dict[str, frozenset[str]] = {gpu.uuid: frozenset() for _, gpu in probed}
    taken = []
    for at in range(WARM_UP + rounds):
        began = time.perf_counter()
        for handle, gpu in probed:
            found = look(driver, handle, gpu, opening=1, skip=skip[gpu.uuid], binding=1)
            skip[gpu.uuid] |= found.unsupported
        if at >= WARM_UP:
            taken.append((time.perf_counter() - began) * 1000)
    answers = (name for name in Sample.__struct_fields__ if name not in ("counting", "asked"))
    silent = {name for name in answers if getattr(found.sample, name) is None}
    if found.sample.fault or silent - UNSEEN:
        raise MeasurementError(f"these fields of the sample have no value: {', '.join(sorted(silent - UNSEEN))}")
    driver.close()
    return taken


async def _on_the_loop(node: SimulatedNode, rounds: int) -> list[float]:
    """Return the longest delay of the event loop in ms, for each round of checks that are judged as in the daemon."""
    ledger = HealthLedger(HealthPolicy())
    seen = 0
    news = asyncio.Event()

    def observe(uuid: str, observation: Observation) -> bool:
        nonlocal seen
        ledger.observe(uuid, observation, time.time())
        seen += 1
        if not seen % GPUS:
            news.set()
        return False

    def found(node: Node) -> None:
        for gpu in node.gpus:
            ledger.watch(gpu.uuid, facts(gpu))

    monitor = Monitor(SimulatedDriver(node), SimulatedHost(node), 3600.0, PATIENCE, (), observe, found)
    await monitor.open()
    stalls = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(monitor.run)
        for at in range(WARM_UP + rounds):
            news.clear()
            ticking = asyncio.create_task(longest_stall())
            monitor.look_now()
            with anyio.fail_after(PATIENCE):
                await news.wait()
            await asyncio.sleep(0.01)  # the work of a round after its last check
            ticking.cancel()
            if at >= WARM_UP:
                stalls.append(await ticking)
        tasks.cancel_scope.cancel()
    return stalls
