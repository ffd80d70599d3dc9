"""Options and requests of the verbs that talk to the running daemon, and their errors."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpu_plugin.config.places import STATE_DIR
from gpu_plugin.devices.gpu_names import HOW
from gpu_plugin.runtime import control

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from gpu_plugin.status.model import Gpu, Missing, Status

COMPLETED_WITHIN = 0.5  # seconds that the completion of a GPU's name waits for the daemon

state_dir_option = click.option(
    "--state-dir",
    type=click.Path(path_type=Path, readable=False),  # `control` reports missing permissions
    metavar="DIR",
    envvar="STATE_DIR",
    default=Path(STATE_DIR),
    help=f"The daemon's state directory. [default: {STATE_DIR}] [$STATE_DIR]",
)

gpus_option = click.option("--gpu", metavar="GPU", help=f"Which GPU: {HOW}. [default: all]")

reason_option = click.option(
    "--reason", default="", metavar="TEXT", help="Why, for who reads `gpu-plugin events` later: up to 200 characters."
)


def gpu_argument(*, required: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the argument GPU, which the shell completes from the running daemon's status."""
    return click.argument(
        "gpu", metavar="GPU" if required else "[GPU]", required=required, shell_complete=_complete_gpu
    )


def _complete_gpu(context: click.Context, _parameter: click.Parameter, begun: str) -> "list[CompletionItem]":
    """Return the indices and uuids of the GPUs that begin so; none if no daemon answers soon."""
    import msgspec  # noqa: PLC0415 - verbs that only send an order are light
    from click.shell_completion import CompletionItem  # noqa: PLC0415

    from gpu_plugin.status.model import Status  # noqa: PLC0415

    state_dir = context.params.get("state_dir") or Path(STATE_DIR)
    try:
        gpus = msgspec.convert(control.request(state_dir, "status", patience=COMPLETED_WITHIN), Status).gpus
    except (control.ControlError, msgspec.ValidationError):
        return []
    names = [(str(gpu.index), gpu.model) for gpu in gpus] + [(gpu.uuid, f"GPU {gpu.index}") for gpu in gpus if begun]
    return [CompletionItem(name, help=about) for name, about in names if name.startswith(begun)]


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
    asked: dict[str, Any] = dict(fields or {})
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


def status_of(state_dir: Path) -> "Status":
    """Return the daemon's status.

    Raises:
        NoDaemon: no daemon answers, or its status is of another version.
        ClickException: the daemon refuses.
    """
    import msgspec  # noqa: PLC0415 - as above

    from gpu_plugin.status.model import FORMAT, Status  # noqa: PLC0415

    reply = ask(state_dir, "status")
    if reply.get("format") != FORMAT:
        raise NoDaemon(f"the running daemon is of another version: its status does not have format {FORMAT}")
    try:
        return msgspec.convert(reply, Status)
    except msgspec.ValidationError as error:
        raise NoDaemon(f"the running daemon is of another version: its status cannot be read: {error}") from None


def find_gpu(name: str, status: "Status") -> "Gpu | Missing":
    """Return the GPU with this name, which may be missing. Raises UsageError if none or several GPUs have it."""
    from gpu_plugin.config.errors import ConfigError  # noqa: PLC0415 - as above
    from gpu_plugin.devices import node  # noqa: PLC0415
    from gpu_plugin.devices.gpu_names import named  # noqa: PLC0415

    known = [node.Gpu(gpu.uuid, gpu.index, pci_bus_id=gpu.bus_id) for gpu in status.gpus]
    known += [node.Gpu(gpu.uuid, -1 - at, pci_bus_id=gpu.bus_id) for at, gpu in enumerate(status.missing)]
    if name.strip().isdecimal() and len([gpu for gpu in status.gpus if gpu.index == int(name)]) > 1:
        raise click.UsageError(f"several GPUs have the index {name}: give the uuid")
    try:
        found = named(name, known)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    if found is None:
        there = ", ".join(str(gpu.index) for gpu in status.gpus) or "none"
        mig = next((gpu for gpu in status.gpus for each in gpu.devices if each.id == name and each.kind == "mig"), None)
        if mig is not None:
            raise click.UsageError(f"{name} is a MIG device of GPU {mig.index}: name the GPU")
        raise click.UsageError(f"GPU {name}: no GPU of this node has this name; the indices are {there}")
    at = known.index(found)
    return status.gpus[at] if at < len(status.gpus) else status.missing[at - len(status.gpus)]
