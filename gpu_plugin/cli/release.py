"""`gpu-plugin release`: lets go of GPUs so that they can be reset or their driver replaced."""

from pathlib import Path

import click

from gpu_plugin.cli.running_daemon import ask, gpus_option, reason_option, state_dir_option


@click.command(
    "release",
    help="Let go of a GPU, or of all: it is held back from new pods and its NVML handles are dropped, so that it can be "
    "reset or, where all are released, the driver be replaced. Prints once the handles are dropped.",
    epilog="Stays in force until gpu-plugin resume, across restarts of the daemon; a reboot ends it. Exit status 1 where "
    "the driver "
    "does not let go: the GPU is held back all the same.",
)
@state_dir_option
@gpus_option
@reason_option
def command(state_dir: Path, gpu: str | None, reason: str) -> None:
    """Releases GPUs and prints what was done."""
    click.echo(ask(state_dir, "release", gpu, reason=reason)["done"])
