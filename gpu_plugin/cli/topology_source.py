"""Where `topology` and `simulate-allocation` have a node's topology from: a simulated node, or the running daemon."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpu_plugin import control
from gpu_plugin.cli.running_daemon import NoDaemon
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices.node import Node

if TYPE_CHECKING:
    from gpu_plugin.placement.views.report import OfferedResource

simulate_option = click.option(
    "--simulate",
    metavar="PROFILE|FILE",
    help="Take the simulated node of this profile or YAML file. [default: ask the running daemon]",
)


def node_from(simulate: str | None, state_dir: Path) -> Node:
    """The simulated node, found as the daemon finds it, or without one the node that the daemon of `state_dir` knows.

    Raises:
        UsageError: no such simulated node.
        ClickException: no daemon answers, it is of another version, or it knows no GPU.
    """
    if simulate is None:
        return daemons_node(state_dir)[0]
    try:
        return _simulated(simulate)
    except ConfigError as error:
        raise click.UsageError(f"--simulate: {error}", click.get_current_context()) from None


def daemons_node(state_dir: Path) -> "tuple[Node, tuple[OfferedResource, ...] | None]":
    """The node that the daemon of `state_dir` knows, and what is served of it; None where the daemon does not say.

    Raises:
        ClickException: no daemon answers, it is of another version, or it knows no GPU.
    """
    from gpu_plugin.placement.views.report import reported, reported_resources  # noqa: PLC0415 - usage and help need none of it

    try:
        reply = control.request(state_dir, "topology")
        node, resources = reported(reply), reported_resources(reply)
    except (control.UnknownVerbError, ValueError) as error:
        raise NoDaemon(f"the running daemon is of another version: {error}") from None
    except control.NoDaemonError as error:
        raise NoDaemon(f"{error} (or name a simulated node with --simulate)") from None
    except control.ControlError as error:
        raise click.ClickException(f"{error} (or name a simulated node with --simulate)") from None
    if not node.gpus:
        raise click.ClickException("the running daemon knows no GPU of this node yet: its log says why")
    return node, resources


def _simulated(profile: str) -> Node:
    from gpu_plugin.nvml.topology import probe_links  # noqa: PLC0415
    from gpu_plugin.nvml.traits import probe_gpu  # noqa: PLC0415
    from gpu_plugin.simulation.driver import SimulatedDriver  # noqa: PLC0415
    from gpu_plugin.simulation.hardware import SimulatedNode  # noqa: PLC0415
    from gpu_plugin.simulation.host import SimulatedHost  # noqa: PLC0415
    from gpu_plugin.simulation.profile import load  # noqa: PLC0415

    hardware = SimulatedNode(load(profile))
    driver, host = SimulatedDriver(hardware), SimulatedHost(hardware)
    driver.open()
    try:
        probed = [probe_gpu(driver, host, index) for index in range(driver.device_count())]
        gpus = tuple(gpu for _, gpu in probed)
        handles = {gpu.uuid: handle for handle, gpu in probed}
        found = probe_links(driver, host, handles, gpus)
        return Node(gpus, found.links, cliques=found.cliques)
    finally:
        driver.close()
