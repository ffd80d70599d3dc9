"""What verbs share that talk to the running daemon: how it is found, how a GPU or a time is named, what a refusal looks like."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from gpu_plugin.config.places import STATE_DIR
from gpu_plugin.devices.gpu_names import HOW
from gpu_plugin.runtime import control

state_dir_option = click.option(
    "--state-dir",
    type=click.Path(path_type=Path, readable=False),  # whoever may not look is told so by `control`
    metavar="DIR",
    envvar="STATE_DIR",
    default=Path(STATE_DIR),
    help=f"The daemon's state directory. [default: {STATE_DIR}] [$STATE_DIR]",
)

gpu_option = click.option("--gpu", required=True, metavar="GPU", help=f"Which GPU: {HOW}.")

gpus_option = click.option("--gpu", metavar="GPU", help=f"Which GPU: {HOW}. [default: all]")

reason_option = click.option(
    "--reason", default="", metavar="TEXT", help="Why, for who reads `gpu-plugin events` later: up to 200 characters."
)


class NoDaemon(click.ClickException):
    """No daemon answers."""

    exit_code = 3


def ask(
    state_dir: Path,
    verb: str,
    gpu: str | None = None,
    fields: Mapping[str, object] | None = None,
    *,
    unknown_verb: click.ClickException | None = None,
    hint: str = "",
) -> dict[str, Any]:
    """The daemon's reply about one GPU, or about all (None). `hint` ends the sentence where it does not answer, or refuses.

    Raises:
        NoDaemon: none answers, or one that does not know the verb; of such a one `unknown_verb` where it is given.
        UsageError: what is asked cannot be, such as a GPU that the node does not have.
        ClickException: it refuses, with its sentence.
    """
    asked = dict(fields or {})
    if gpu is not None:
        asked["gpu"] = int(gpu) if gpu.isdecimal() and gpu.isascii() and len(gpu) < 6 else gpu
    try:
        return control.request(state_dir, verb, **asked)
    except control.UnknownVerbError as error:
        raise unknown_verb or NoDaemon(f"the running daemon is of another version: {error}") from None
    except control.NoDaemonError as error:
        raise NoDaemon(f"{error}{hint}") from None
    except control.BadRequestError as error:
        raise click.UsageError(str(error)) from None
    except control.ControlError as error:
        raise click.ClickException(f"{error}{hint}") from None
