"""Probes a simulated node in the same way as the daemon, in this process."""

import asyncio

import anyio

from bench.plan import PATIENCE
from gpu_plugin.devices.device import Device, whole_gpu
from gpu_plugin.devices.node import Node
from gpu_plugin.nvml.monitor import Monitor
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost
from gpu_plugin.simulation.profile import load


def probed(profile: str) -> Node:
    """Return the GPUs of a profile and their links, as the daemon finds them."""
    return asyncio.run(_probed(profile))


async def _probed(profile: str) -> Node:
    simulated = SimulatedNode(load(profile))
    driver, host = SimulatedDriver(simulated), SimulatedHost(simulated)
    monitor = Monitor(driver, host, PATIENCE, PATIENCE, (), lambda _, __: False, lambda _: None)
    node = await monitor.open()
    with anyio.move_on_after(0):
        await monitor.run()  # ends at once, and stops the monitor's threads
    return node


def whole_gpus(node: Node) -> list[Device]:
    """Return the devices that are whole GPUs, by index. GPUs in MIG mode are left out, since pods get only their slices."""
    return [whole_gpu(gpu) for gpu in sorted(node.gpus, key=lambda gpu: gpu.index) if not gpu.mig_enabled]
