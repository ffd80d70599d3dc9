"""The topology for `topology` and `simulate-allocation`: of a simulated node, or from the running daemon."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpu_plugin.cli.options import PROFILE
from gpu_plugin.cli.running_daemon import NoDaemon, ask
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices.node import Node
from gpu_plugin.nvml.links import probe_links
from gpu_plugin.nvml.traits import probe_gpu
from gpu_plugin.placement.views.report import OfferedResource, reported

if TYPE_CHECKING:
    from gpu_plugin.simulation.driver import SimulatedDriver
    from gpu_plugin.simulation.host import SimulatedHost

simulate_option = click.option(
    "--simulate",
    metavar="PROFILE|FILE",
    type=PROFILE,
    help="Take the simulated node of this profile or YAML file. [default: ask the running daemon]",
)


def simulated_hardware(profile: str) -> "tuple[SimulatedDriver, SimulatedHost]":
    """Return driver and host of a simulated node without stored state. Raises ConfigError for an unknown node."""
    from gpu_plugin.simulation.driver import SimulatedDriver  # noqa: PLC0415 - only simulated nodes need it
    from gpu_plugin.simulation.hardware import SimulatedNode  # noqa: PLC0415
    from gpu_plugin.simulation.host import SimulatedHost  # noqa: PLC0415
    from gpu_plugin.simulation.profile import load  # noqa: PLC0415

    hardware = SimulatedNode(load(profile))
    return SimulatedDriver(hardware), SimulatedHost(hardware)


def simulated_node(profile: str) -> Node:
    """Return a simulated node with its links. Raises UsageError for an unknown node."""
    try:
        driver, host = simulated_hardware(profile)
    except ConfigError as error:
        raise click.UsageError(f"--simulate: {error}") from None
    driver.open()
    try:
        probed = [probe_gpu(driver, host, index) for index in range(driver.device_count())]
        gpus = tuple(gpu for _, gpu in probed)
        found = probe_links(driver, host, {gpu.uuid: handle for handle, gpu in probed}, gpus)
        return Node(gpus, found.links, cliques=found.cliques)
    finally:
        driver.close()


def daemons_node(state_dir: Path) -> tuple[Node, tuple[OfferedResource, ...]]:
    """Return the node of the daemon of `state_dir`, and its resources.

    Raises:
        ClickException: no daemon answers, it has another version, or it knows no GPU.
    """
    reply = ask(state_dir, "topology", hint=" (or name a simulated node with --simulate)")
    try:
        node, resources = reported(reply)
    except ValueError as error:
        raise NoDaemon(f"the running daemon is of another version: {error}") from None
    if not node.gpus:
        raise click.ClickException("the running daemon knows no GPU of this node yet: its log says why")
    return node, resources
