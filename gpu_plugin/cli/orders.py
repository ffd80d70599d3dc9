"""`gpu-plugin cordon`, `uncordon`, `release` and `resume`: an operator's orders to the running daemon."""

from pathlib import Path

import click

from gpu_plugin.cli.running_daemon import ask, find_gpu, gpu_argument, reason_option, state_dir_option, status_of
from gpu_plugin.runtime.printable import printable
from gpu_plugin.status.model import Gpu

all_option = click.option("--all", "every", is_flag=True, help="All GPUs of the node.")


def _order(verb: str, text: str, epilog: str) -> click.Command:
    """Return a command that sends the order for a GPU, or for all, and prints the result and the pods that hold the GPUs."""

    @click.command(verb, help=text, epilog=epilog)
    @state_dir_option
    @gpu_argument(required=False)
    @all_option
    @reason_option
    def command(state_dir: Path, gpu: str | None, every: bool, reason: str, **more: object) -> None:  # noqa: FBT001
        if (gpu is None) is not every:
            raise click.UsageError(f"name the GPU, as in `gpu-plugin {verb} 3`, or give --all, and not both")
        fields = {**more, "reason": reason} if reason else more
        if gpu is not None or verb in _FOR_ALL_AT_ONCE:
            click.echo(ask(state_dir, verb, gpu, fields)["done"])
        else:
            for each in status_of(state_dir).gpus:
                click.echo(ask(state_dir, verb, each.uuid, fields)["done"])
        if verb in _WITH_PODS:
            _print_pods(state_dir, gpu)

    return command


_FOR_ALL_AT_ONCE = frozenset({"release", "resume"})
"""Orders for which `--all` is one request to the daemon, which includes GPUs that it does not know yet."""

_WITH_PODS = frozenset({"cordon", "release"})


def _print_pods(state_dir: Path, name: str | None) -> None:
    """Print the pods that still hold the GPU, or any GPU."""
    status = status_of(state_dir)
    asked = status.gpus if name is None else (find_gpu(name, status),)
    for gpu in asked:
        if isinstance(gpu, Gpu) and gpu.holders is None:
            click.echo(f"Which pods hold GPU {gpu.index} is not known: make sure that none does before a reset.")
        elif isinstance(gpu, Gpu) and gpu.holders:
            click.echo(
                printable(f"GPU {gpu.index} is still held by {', '.join(gpu.holders)}: end them before a reset.")
            )


_CORDON = _order(
    "cordon",
    "Hold a GPU back: no new pod gets it, pods that have it keep it.",
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
    "Release a GPU, or all: it is held back from new pods and its NVML handles are dropped, so that it can be "
    "reset or, if all are released, the driver can be replaced. Prints once the handles are dropped, with the pods that hold it.",
    "Stays in force until gpu-plugin resume, across restarts of the daemon; a reboot ends it. Exit status 1 if the driver "
    "does not drop them: the GPU is held back nevertheless.",
)
_RESUME = _order(
    "resume",
    "Take a released GPU back, or all of them. It is healthy after a successful check, unless it has another fault.",
    "If the driver does not work yet, the daemon keeps trying without another command.",
)
_OVERRIDE = click.option("--override", is_flag=True, help="Also clear the GPU's faults.")

COMMANDS = {"cordon": _CORDON, "uncordon": _OVERRIDE(_UNCORDON), "release": _RELEASE, "resume": _RESUME}
