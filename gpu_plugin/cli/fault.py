"""`gpu-plugin fault`: makes a GPU of a running simulated node fail, or heals it."""

from pathlib import Path

import click

from gpu_plugin import control

_FLAGS = ("xid", "temperature", "lost", "hang", "mig", "heal")


@click.command(
    "fault",
    help="Make a GPU of a running simulated node fail, heal it, or cut it anew. The daemon must run with --simulate.",
    epilog="Faults outlive the daemon: only --heal ends --lost and --temperature, and only another --mig ends a --mig.",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    envvar="STATE_DIR",
    default=Path("/var/lib/gpu-plugin"),
    show_default=True,
    show_envvar=True,
    help="The daemon's state directory.",
)
@click.option("--gpu", required=True, help="Which GPU: its index or its uuid.")
@click.option("--xid", type=int, help="Raise this Xid.")
@click.option("--temperature", type=int, metavar="CELSIUS", help="Hold this temperature.")
@click.option("--lost", is_flag=True, default=None, help="Fall off the bus.")
@click.option("--hang", type=float, metavar="SECONDS", help="Block every driver call for so long.")
@click.option(
    "--mig",
    metavar="PROFILES",
    help="Cut into these MIG devices, such as 3g.20gb,1c.3g.20gb,1g.5gb+me; empty: MIG mode without any; none: no MIG mode.",
)
@click.option("--heal", is_flag=True, default=None, help="Repair and reset: all of the above but --mig is over.")
def command(state_dir: Path, gpu: str, **faults: float | str | bool | None) -> None:
    """Sends one fault to the daemon and prints what was done."""
    asked = {name: faults[name] for name in _FLAGS if faults[name] is not None}
    if len(asked) != 1:
        flags = ", ".join(f"--{name}" for name in _FLAGS)
        given = " and ".join(f"--{name}" for name in asked) or "none"
        raise click.UsageError(f"one fault at a time, of {flags}: {given} given")
    index_or_uuid = int(gpu) if gpu.isdecimal() and len(gpu) < 6 else gpu
    try:
        reply = control.request(state_dir, "fault", gpu=index_or_uuid, **asked)
    except control.UnknownVerbError:
        raise click.ClickException("the daemon runs on real GPUs: only one with --simulate takes faults") from None
    except control.ControlError as error:
        raise click.ClickException(str(error)) from None
    click.echo(reply["done"])
