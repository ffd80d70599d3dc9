"""What verbs share that talk to the running daemon: how it is found, how a GPU or a time is named, what a refusal looks like."""

import time
from pathlib import Path
from typing import Any

import click

from gpu_plugin import control
from gpu_plugin.config.settings import STATE_DIR

state_dir_option = click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    envvar="STATE_DIR",
    default=Path(STATE_DIR),
    help=f"The daemon's state directory. [default: {STATE_DIR}] [$STATE_DIR]",
)

gpu_option = click.option("--gpu", required=True, metavar="ID", help="Which GPU: its index or its uuid.")

gpus_option = click.option("--gpu", metavar="ID", help="Which GPU: its index or its uuid.  [default: all]")


def utc(seconds: float) -> str:
    """Unix time for people: 2026-11-21 09:26:49 UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def ask(state_dir: Path, verb: str, gpu: str | None, **fields: object) -> dict[str, Any]:
    """The daemon's reply about one GPU, or about all (None). Raises ClickException with the sentence of a refusal."""
    if gpu is not None:
        fields["gpu"] = int(gpu) if gpu.isdecimal() and len(gpu) < 6 else gpu
    try:
        return control.request(state_dir, verb, **fields)
    except control.UnknownVerbError as error:
        raise click.ClickException(f"the running daemon is of another version: {error}") from None
    except control.ControlError as error:
        raise click.ClickException(str(error)) from None
