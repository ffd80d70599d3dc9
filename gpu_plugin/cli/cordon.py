"""`gpu-plugin cordon`: holds a GPU back from new pods."""

from pathlib import Path

import click

from gpu_plugin.cli.running_daemon import ask, gpu_option, reason_option, state_dir_option


@click.command(
    "cordon",
    help="Hold a GPU back: no new pod gets it, pods that have it keep it.",
    epilog="Stays in force until gpu-plugin uncordon, across restarts of the daemon and of the node. Exit status 1 where "
    "that could not be "
    "written down: the GPU is held back all the same, until the daemon restarts.",
)
@state_dir_option
@gpu_option
@reason_option
def command(state_dir: Path, gpu: str, reason: str) -> None:
    """Cordons one GPU and prints what was done."""
    click.echo(ask(state_dir, "cordon", gpu, reason=reason)["done"])
