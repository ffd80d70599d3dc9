"""`gpu-plugin resume`: takes GPUs back that were released."""

from pathlib import Path

import click

from gpu_plugin.cli.running_daemon import ask, gpus_option, reason_option, state_dir_option


@click.command(
    "resume",
    help="Take a released GPU back, or all of them. It is healthy after a good look, unless something else is held against it.",
    epilog="If the driver does not work yet, the daemon keeps trying without another command.",
)
@state_dir_option
@gpus_option
@reason_option
def command(state_dir: Path, gpu: str | None, reason: str) -> None:
    """Resumes GPUs and prints what was done."""
    click.echo(ask(state_dir, "resume", gpu, reason=reason)["done"])
