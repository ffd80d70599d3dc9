"""The daemon's reply as a typed status, and its GPUs by name."""

from collections.abc import Mapping, Sequence

import click
import msgspec

from gpu_plugin.cli.running_daemon import NoDaemon
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices import node
from gpu_plugin.devices.gpu_names import named
from gpu_plugin.status.model import Gpu, Missing, Status


def converted(reply: Mapping[str, object]) -> Status:
    """Return a reply as a status. A newer daemon may have more fields, and an older one fewer."""
    try:
        return msgspec.convert(reply, Status)
    except msgspec.ValidationError as error:
        raise NoDaemon(f"the running daemon is of another version: its status cannot be read: {error}") from None


def gpu_named(name: str, status: Status) -> Gpu | Missing:
    """Return the GPU with this name, also a missing one. Raises UsageError if none or several have it."""
    known: list[Gpu | Missing] = [*status.gpus, *status.missing]
    described = [_described(each) for each in known]
    try:
        found = named(name, described)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    if found is None:
        there = ", ".join(str(gpu.index) for gpu in status.gpus)
        raise click.UsageError(
            f"GPU {name}: no GPU of this node has this name; "
            + (f"the indices are {there}" if there else "no GPU is known yet")
        )
    return known[described.index(found)]


def _described(gpu: Gpu | Missing) -> node.Gpu:
    if isinstance(gpu, Missing):
        return node.Gpu(gpu.uuid, -1, pci_bus_id=gpu.bus_id)
    migs = tuple(node.MigDevice(each.id, 0, 0, 0, "") for each in gpu.devices if each.kind == "mig")
    return node.Gpu(gpu.uuid, gpu.index, pci_bus_id=gpu.bus_id, mig_devices=migs)


def holders(pods: Sequence[str] | None) -> str:
    """Return the pods that hold a GPU as text."""
    return "not known" if pods is None else ", ".join(pods) or "none"
