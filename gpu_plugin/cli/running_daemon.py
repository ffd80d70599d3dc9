"""Options and requests of the verbs that talk to the running daemon, and their errors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from gpu_plugin.config.places import STATE_DIR
from gpu_plugin.devices.gpu_names import HOW
from gpu_plugin.runtime import control

state_dir_option = click.option(
    "--state-dir",
    type=click.Path(path_type=Path, readable=False),  # `control` reports missing permissions
    metavar="DIR",
    envvar="STATE_DIR",
    default=Path(STATE_DIR),
    help=f"The daemon's state directory. [default: {STATE_DIR}] [$STATE_DIR]",
)

reason_option = click.option(
    "--reason", default="", metavar="TEXT", help="Why, for who reads `gpu-plugin events` later: up to 200 characters."
)


COMPLETION_SECONDS = 1.0


class GpuName(click.ParamType[str]):
    """The name of a GPU. Completion offers the GPUs of the running daemon."""

    name = "GPU"

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        """Return the names of the GPUs that begin so; none if no daemon answers within a second."""
        from gpu_plugin.cli.typed_status import converted  # noqa: PLC0415 - `fault` does not need it

        try:
            status = converted(
                control.request(Path(ctx.params.get("state_dir") or STATE_DIR), "status", COMPLETION_SECONDS)
            )
        except (control.ControlError, click.ClickException):
            return []
        found = [(str(gpu.index), f"{gpu.bus_id} {gpu.state}") for gpu in status.gpus]
        if incomplete.lower().startswith("g"):
            found = [(gpu.uuid, f"GPU {gpu.index} {gpu.state}") for gpu in status.gpus]
        return [CompletionItem(name, help=about) for name, about in found if name.startswith(incomplete)]


class OfGpu(click.Command):
    """A command whose argument is a GPU. Its usage error for the option --gpu says so."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name != "--gpu":
                raise
            raise click.UsageError(f"--gpu: name the GPU as an argument: {ctx.command_path} GPU", ctx) from None


gpus_option = click.option("--gpu", metavar="GPU", type=GpuName(), help=f"Which GPU: {HOW}. [default: all]")

gpu_argument = click.argument("gpu", metavar="[GPU]", required=False, type=GpuName())


class NoDaemon(click.ClickException):
    """No daemon answers, or the daemon does not know the verb."""

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
    """Return the daemon's reply about a GPU, or about all GPUs (None). `hint` ends the message if it does not answer or refuses.

    Raises:
        NoDaemon: no daemon answers, or it does not know the verb (then `unknown_verb` if it is given).
        UsageError: the request is invalid, such as for a GPU that the node does not have.
        ClickException: the daemon refuses; the message is its reason.
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
