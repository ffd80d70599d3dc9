"""Computes the data for Allocate from the settings and the node."""

from collections.abc import Iterator

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings
from gpu_plugin.config.values import AUTO
from gpu_plugin.containers.cdi_names import CLASS_NODES
from gpu_plugin.containers.edits import CONTROL_NODES, REQUIRED_NODES, Access, imex_node, is_cdi, missing_node_reason
from gpu_plugin.devices.node import Node

# The driver that makes the device nodes of a class.
_CLASS_DRIVERS = {
    "gdrcopy": "the gdrdrv module",
    "gds": "the nvidia-fs module",
    "mofed": "MOFED's or another RDMA driver",
}


def plan_access(settings: Settings, node: Node, dev_root: str | None) -> Access:
    """Return the data for Allocate on this node.

    `dev_root` is the host directory whose dev/ has the device nodes. If it is None, each device node has its own root.

    Raises ConfigError if an IMEX channel is required and the node does not have it.
    """
    assert AUTO not in settings.device_list_strategy, "the strategy must be chosen before"
    features = enabled_features(settings, node.device_nodes)
    missing = missing_channels(settings, node)
    if missing and settings.imex_required:
        raise ConfigError(
            f"IMEX channel {missing[0]} is required and {imex_node(missing[0])} does not exist on this node: "
            "start nvidia-imex, or run with --imex-required=false"
        )
    channels = (0,) if settings.imex_channel_ids == AUTO else settings.imex_channel_ids
    return Access(
        strategies=settings.device_list_strategy,
        id_strategy=settings.device_id_strategy,
        pass_device_specs=settings.pass_device_specs,
        dev_root=dev_root,
        device_roots=node.device_roots,
        annotation_prefix=settings.cdi_annotation_prefix,
        features=features,
        cdi_classes=cdi_classes(features, node.device_nodes),
        imex_channels=tuple(c for c in channels if imex_node(c) in node.device_nodes),
        control_nodes=tuple(path for path in CONTROL_NODES if path in node.device_nodes),
        required_nodes=required_nodes(settings, node),
    )


def access_warnings(settings: Settings, node: Node) -> Iterator[str]:
    """Yield a sentence for each feature and device node that the settings require and the node does not have."""
    asked = tuple(name for name, enabled in _wanted(settings).items() if enabled is True)
    found = cdi_classes(asked, node.device_nodes)
    for name in asked:
        if name not in found:
            yield (
                f"--{name}-enabled is set and there is no device node {CLASS_NODES[name][0]}* on this node: containers get "
                f"NVIDIA_{name.upper()}=enabled nevertheless; load {_CLASS_DRIVERS[name]}, or run with --{name}-enabled=auto"
            )
    for path in required_nodes(settings, node):
        if path not in node.device_nodes:
            yield missing_node_reason(path)
    for channel in missing_channels(settings, node):
        yield (
            f"IMEX channel {channel} is left out: {imex_node(channel)} does not exist on this node; start nvidia-imex, "
            "or run with --imex-channel-ids=auto"
        )


def required_nodes(settings: Settings, node: Node) -> tuple[str, ...]:
    """Return the device nodes that every container with a GPU must get from this plugin.

    The result is empty if a runtime of NVIDIA's adds them. It is also empty if this process sees no device node of any GPU, for
    example on WSL or in a container without the host's /dev.
    """
    given_here = settings.pass_device_specs or any(map(is_cdi, settings.device_list_strategy))
    seen = any(f"/dev/nvidia{gpu.minor}" in node.device_nodes for gpu in node.gpus)
    return REQUIRED_NODES if given_here and seen else ()


def enabled_features(settings: Settings, device_nodes: frozenset[str]) -> tuple[str, ...]:
    """Return the names of GDRCopy, GPUDirect Storage and MOFED that are enabled, or set to `auto` and present on the node."""
    wanted = _wanted(settings)
    there = cdi_classes(tuple(wanted), device_nodes)
    return tuple(name for name, enabled in wanted.items() if enabled is True or (enabled == AUTO and name in there))


def missing_channels(settings: Settings, node: Node) -> tuple[int, ...]:
    """Return the IMEX channels of the settings that have no device node on this node; empty for `auto`."""
    if settings.imex_channel_ids == AUTO:
        return ()
    return tuple(c for c in settings.imex_channel_ids if imex_node(c) not in node.device_nodes)


def cdi_classes(features: tuple[str, ...], device_nodes: frozenset[str]) -> tuple[str, ...]:
    """Return the features whose device nodes exist. They are the CDI classes that a container gets in addition to gpu."""
    return tuple(f for f in features if any(node.startswith(CLASS_NODES[f]) for node in device_nodes))


def _wanted(settings: Settings) -> dict[str, object]:
    return {"gdrcopy": settings.gdrcopy_enabled, "gds": settings.gds_enabled, "mofed": settings.mofed_enabled}
