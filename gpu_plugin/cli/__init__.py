"""The `gpu-plugin` command. Each verb has its own module, which is only imported if the verb is used."""

import importlib
import sys

import click

from gpu_plugin import __version__
from gpu_plugin.runtime.printable import printable

VERBS = {
    "run": "serve this node's GPUs to its kubelet until a signal ends it",
    "mps": "run the MPS daemons of this node's shared GPUs",
    "status": "what the running daemon serves, and under which configuration",
    "doctor": "what is wrong with this node and what to do, without a daemon",
    "topology": "how this node's GPUs are linked, as a matrix, as JSON or as a picture",
    "simulate-allocation": "which GPUs a container would get, and why",
    "cdi": "generate, list, validate and remove CDI specifications, without a daemon",
    "events": "what happened on this node, and who asked for it",
    "explain": "why a GPU is in its state, since when, and what would clear it",
    "cordon": "hold a GPU back from new pods",
    "uncordon": "lift a cordon; with --override also clear the GPU's faults",
    "release": "release GPUs (drop their NVML handles), so that they can be reset or the driver replaced",
    "resume": "take released GPUs back",
    "validate": "check config files without a node, and print the resulting settings",
    "cleanup": "remove the files that the daemon left on this node",
    "uninstall": "delete a DaemonSet, and remove the files that it left on its nodes",
    "man": "print the manual page of all verbs",
    "fault": "make a GPU of a running simulated node fail, or heal it",
}


ORDER_VERBS = frozenset({"cordon", "uncordon", "release", "resume"})  # verbs of `gpu_plugin.cli.orders`


class Verbs(click.Group):
    """Verbs by name: `gpu_plugin.cli.NAME`, with _ for each -, has a click command called `command`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Options without a verb are options of `run`.

        A pod's `args` replace the `run` of the image, and those in manifests for NVIDIA's plugin only have options.
        """
        own = {name for param in self.get_params(ctx) for name in param.opts}
        if args and f"-{args[0]}" in own:
            args = [f"-{args[0]}", *args[1:]]  # a single dash works, as with Go's flag package in NVIDIA's plugin
        if args and args[0].startswith("-") and args[0] not in {*own, "--"}:
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the verbs, in the order of `VERBS`."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import and return the verb's command; None for an unknown verb."""
        if cmd_name not in VERBS:
            return None
        if cmd_name in ORDER_VERBS:
            from gpu_plugin.cli.orders import COMMANDS  # noqa: PLC0415

            return COMMANDS[cmd_name]
        command: click.Command = importlib.import_module(f"gpu_plugin.cli.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the verbs without importing their modules."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="Exit status of all verbs: 0 all is well; 1 something is Unhealthy or refused, or could not be done; 2 bad usage; "
    "3 no daemon answers; 4 the output could not be written.",
)
@click.version_option(__version__, "--version", message="gpu-plugin %(version)s")
def group() -> None:
    """An NVIDIA GPU device plugin for the kubelet."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status, the same for all verbs (`cli.output`)."""
    from gpu_plugin.cli.output import NO_OUTPUT, lossy_output  # noqa: PLC0415 - not needed to import a verb's module

    with lossy_output() as lost:
        status = _run(arguments)
        sys.stdout.flush()
        if sentence := lost():
            print(f"gpu-plugin: {sentence}", file=sys.stderr, flush=True)
            status = status or NO_OUTPUT
    return status


def _run(arguments: list[str] | None) -> int:
    """Run the verb and return its exit status. Print a line for each usage error."""
    try:
        result = group.main(arguments, prog_name="gpu-plugin", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return 2
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        named = context.command_path if context is not None else "gpu-plugin"
        for line in error.format_message().splitlines():
            print(f"{named}: {printable(' '.join(line.split()))}", file=sys.stderr)
        return error.exit_code
    except click.Abort:
        return 130
    return result if isinstance(result, int) else 0
