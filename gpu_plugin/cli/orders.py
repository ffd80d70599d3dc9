"""`gpu-plugin cordon`, `uncordon`, `release` and `resume`: an operator's orders to the running daemon."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gpu_plugin.cli.running_daemon import ask, gpu_option, gpus_option, reason_option, state_dir_option


def _order(verb: str, gpu_or_all: Callable[..., Any], text: str, epilog: str) -> click.Command:
    """Return a command that sends the order and prints the result."""

    @click.command(verb, help=text, epilog=epilog)
    @state_dir_option
    @gpu_or_all
    @reason_option
    def command(state_dir: Path, gpu: str | None, reason: str, **more: object) -> None:
        fields = {**more, "reason": reason} if reason else more
        click.echo(ask(state_dir, verb, gpu, fields)["done"])

    return command


_CORDON = _order(
    "cordon",
    gpu_option,
    "Hold a GPU back: no new pod gets it, pods that have it keep it.",
    "Stays in force until gpu-plugin uncordon, across restarts of the daemon and of the node. Exit status 1 if the cordon could "
    "not be stored: the GPU is held back nevertheless, until the daemon restarts.",
)
_UNCORDON = _order(
    "uncordon",
    gpu_option,
    "Lift the cordon of a GPU. Without a cordon, nothing changes.",
    "With --override, past events of the GPU no longer count, and readings that are still bad are no more than DEGRADED until "
    "they are good. A GPU that cannot be served at all, such as a lost GPU, stays Unhealthy in any case.",
)
_RELEASE = _order(
    "release",
    gpus_option,
    "Release a GPU, or all: it is held back from new pods and its NVML handles are dropped, so that it can be "
    "reset or, if all are released, the driver can be replaced. Prints once the handles are dropped.",
    "Stays in force until gpu-plugin resume, across restarts of the daemon; a reboot ends it. Exit status 1 if the driver "
    "does not drop them: the GPU is held back nevertheless.",
)
_RESUME = _order(
    "resume",
    gpus_option,
    "Take a released GPU back, or all of them. It is healthy after a good look, unless it has another fault.",
    "If the driver does not work yet, the daemon keeps trying without another command.",
)
_OVERRIDE = click.option("--override", is_flag=True, help="Also clear the GPU's faults.")

COMMANDS = {"cordon": _CORDON, "uncordon": _OVERRIDE(_UNCORDON), "release": _RELEASE, "resume": _RESUME}
