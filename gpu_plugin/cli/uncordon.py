"""`gpu-plugin uncordon`: lifts a cordon, or takes the operator's word that a GPU is fit."""

from pathlib import Path

import click

from gpu_plugin.cli.running_daemon import ask, gpu_option, reason_option, state_dir_option


@click.command(
    "uncordon",
    help="Lift the cordon of a GPU. Where it has none, nothing changes.",
    epilog="With --override what happened to the GPU is forgotten, and what still reads badly is no more than DEGRADED until "
    "that is over. A GPU that cannot be served at all, such as one that is lost, stays Unhealthy in any case.",
)
@state_dir_option
@gpu_option
@reason_option
@click.option("--override", is_flag=True, help="Also clear what is held against the GPU.")
def command(state_dir: Path, gpu: str, reason: str, override: bool) -> None:  # noqa: FBT001 - click hands it over so
    """Uncordons one GPU, and prints what was done and what still stands against it."""
    click.echo(ask(state_dir, "uncordon", gpu, override=override, reason=reason)["done"])
