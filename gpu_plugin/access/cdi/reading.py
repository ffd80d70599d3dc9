"""What a CDI specification says of the host, and what containers get by it."""

from collections.abc import Iterator, Mapping

from gpu_plugin.access.cdi import names
from gpu_plugin.access.cdi.spec import DeviceNode, Spec


def device_nodes(spec: Spec) -> Iterator[DeviceNode]:
    """Every device node in it; one that several devices have comes as often."""
    for edits in (spec.container_edits, *(device.container_edits for device in spec.devices)):
        yield from edits.device_nodes


def host_paths(spec: Spec) -> tuple[str, ...]:
    """What must be on the host for its devices, each path once."""
    edits = [spec.container_edits, *(device.container_edits for device in spec.devices)]
    paths = [mount.host_path for each in edits for mount in each.mounts]
    paths += [node.host_path or node.path for node in device_nodes(spec)]
    paths += [hook.path for each in edits for hook in each.hooks]
    return tuple(dict.fromkeys(paths))


def gpu_nodes(specs: Mapping[str, Spec]) -> dict[str, frozenset[str]]:
    """The device nodes that a container gets with each device of the class gpu, by its name; `specs` are by file name."""
    spec = specs.get(names.file_name(names.GPU))
    if spec is None:
        return {}
    common = [node.path for node in spec.container_edits.device_nodes]
    return {
        device.name: frozenset([*common, *(node.path for node in device.container_edits.device_nodes)])
        for device in spec.devices
    }


def other_names(specs: Mapping[str, Spec]) -> frozenset[str]:
    """The qualified names of all devices that are of other classes; `specs` are by file name."""
    return frozenset(
        f"{spec.kind}={device.name}"
        for file, spec in specs.items()
        if file != names.file_name(names.GPU)
        for device in spec.devices
    )
