"""From the settings and what the node has to what Allocate needs to know."""

import logging

from gpu_plugin.access.container import CONTROL_NODES, Access, imex_node
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings
from gpu_plugin.devices.node import Node

log = logging.getLogger(__name__)

# What a CDI class stands for exists where one of its device nodes does.
_CLASS_NODES = {"gdrcopy": "/dev/gdrdrv", "gds": "/dev/nvidia-fs", "mofed": "/dev/infiniband/"}


def plan_access(settings: Settings, node: Node, dev_root: str) -> Access:
    """What Allocate gives containers on this node; `dev_root` is the host directory whose dev/ holds the device nodes.

    Raises:
        ConfigError: an IMEX channel is required and the node has none.
    """
    wanted = {"gdrcopy": settings.gdrcopy_enabled, "gds": settings.gds_enabled, "mofed": settings.mofed_enabled}
    features = tuple(name for name, enabled in wanted.items() if enabled)
    missing = missing_channels(settings, node)
    if missing and settings.imex_required:
        raise ConfigError(
            f"IMEX channel {missing[0]} is required and {imex_node(missing[0])} does not exist on this node: "
            "start nvidia-imex, or run with --imex-required=false",
        )
    for channel in missing:
        log.warning("IMEX channel %d is left out: %s does not exist on this node", channel, imex_node(channel))
    return Access(
        strategies=settings.device_list_strategy,
        id_strategy=settings.device_id_strategy,
        pass_device_specs=settings.pass_device_specs,
        dev_root=dev_root,
        annotation_prefix=settings.cdi_annotation_prefix,
        features=features,
        cdi_classes=cdi_classes(features, node.device_nodes),
        imex_channels=tuple(c for c in settings.imex_channel_ids if c not in missing),
        control_nodes=existing(node.device_nodes),
    )


def missing_channels(settings: Settings, node: Node) -> tuple[int, ...]:
    """IMEX channels that are asked for and whose device node the node does not have."""
    return tuple(c for c in settings.imex_channel_ids if imex_node(c) not in node.device_nodes)


def existing(device_nodes: frozenset[str]) -> tuple[str, ...]:
    """Those of the control nodes that the node has."""
    return tuple(path for path in CONTROL_NODES if path in device_nodes)


def cdi_classes(features: tuple[str, ...], device_nodes: frozenset[str]) -> tuple[str, ...]:
    """The CDI classes beside gpu that a container is given: each feature asked for whose device nodes exist."""
    return tuple(f for f in features if any(node.startswith(_CLASS_NODES[f]) for node in device_nodes))
