"""`gpu-plugin cordon`, `uncordon`, `release` and `resume`: an operator's orders to the running daemon."""

from collections.abc import Iterator
from pathlib import Path

import click

from gpu_plugin.cli.output import displayable
from gpu_plugin.cli.running_daemon import OfGpu, ask, gpu_argument, reason_option, state_dir_option
from gpu_plugin.cli.typed_status import converted, gpu_named, holders
from gpu_plugin.devices.gpu_names import HOW
from gpu_plugin.status.model import Gpu, Status

_EACH = ("cordon", "uncordon")  # orders for a single GPU


def _order(verb: str, text: str, epilog: str) -> click.Command:
    """Return a command that sends the order and prints the result."""

    @click.command(verb, cls=OfGpu, help=text, epilog=f"GPU is {HOW}. {epilog}")
    @state_dir_option
    @gpu_argument
    @click.option("--all", "every", is_flag=True, help="All GPUs of the node.")
    @reason_option
    def command(state_dir: Path, gpu: str | None, every: bool, reason: str, **more: object) -> None:  # noqa: FBT001
        if (gpu is None) is not every:
            raise click.UsageError("name a GPU, or give --all" if gpu is None else "name a GPU or give --all, not both")
        fields = {**more, "reason": reason} if reason else more
        names = [gpu]
        if every and verb in _EACH:
            names = [each.uuid for each in _status(state_dir).gpus]
        for name in names:
            click.echo(ask(state_dir, verb, name, fields)["done"])
        if verb in ("cordon", "release"):
            for line in _held(_status(state_dir), gpu, verb):
                click.echo(line)

    return command


def _status(state_dir: Path) -> Status:
    return converted(displayable(ask(state_dir, "status")))


def _held(status: Status, name: str | None, verb: str) -> Iterator[str]:
    """Yield the pods that hold the GPUs of an order, and whether a reset may follow."""
    found = status.gpus if name is None else (gpu_named(name, status),)
    gpus = [gpu for gpu in found if isinstance(gpu, Gpu)]
    for gpu in gpus:
        if gpu.holders != ():
            yield f"Pods that hold GPU {gpu.index}: {holders(gpu.holders)}."
    if all(gpu.holders == () for gpu in gpus):
        yield "No pod holds it." if len(gpus) == 1 else "No pod holds them."
        if verb == "release":
            yield (
                "It can be reset now." if name is not None else "GPUs can be reset now, and the driver can be replaced."
            )
    elif verb == "release":
        yield "Do not reset a GPU before the pods that hold it have ended."


_CORDON = _order(
    "cordon",
    "Hold a GPU back: no new pod gets it, pods that have it keep it. Prints these pods.",
    "Stays in force until gpu-plugin uncordon, across restarts of the daemon and of the node. Exit status 1 if the cordon could "
    "not be stored: the GPU is held back nevertheless, until the daemon restarts.",
)
_UNCORDON = _order(
    "uncordon",
    "Lift the cordon of a GPU. Without a cordon, nothing changes.",
    "With --override, past events of the GPU no longer count, and readings that are still bad are no more than DEGRADED until "
    "they are good. A GPU that cannot be served at all, such as a lost GPU, stays Unhealthy in any case.",
)
_RELEASE = _order(
    "release",
    "Release a GPU, or all: it is held back from new pods and its NVML handles are dropped, so that, once no pod holds it, it "
    "can be reset or, if all are released, the driver can be replaced. Prints the pods once the handles are dropped.",
    "Stays in force until gpu-plugin resume, across restarts of the daemon; a reboot ends it. Exit status 1 if the driver "
    "does not drop them: the GPU is held back nevertheless.",
)
_RESUME = _order(
    "resume",
    "Take a released GPU back, or all of them. It is healthy after a good look, unless it has another fault.",
    "If the driver does not work yet, the daemon keeps trying without another command.",
)
_OVERRIDE = click.option("--override", is_flag=True, help="Also clear the GPU's faults.")

COMMANDS = {"cordon": _CORDON, "uncordon": _OVERRIDE(_UNCORDON), "release": _RELEASE, "resume": _RESUME}
