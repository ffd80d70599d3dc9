"""`gpu-plugin cdi`: CDI specifications without a daemon: made, listed, judged, removed."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from gpu_plugin.cli.options import given_flags, settings_from, with_hidden_options
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import CDI_DIR

if TYPE_CHECKING:
    from gpu_plugin.access.cdi.spec import Spec

DIRECTORIES = (Path("/etc/cdi"), Path(CDI_DIR))
"""Where runtimes look for specifications (CDI's specification); in the later ones those that win."""

_dirs_option = click.option(
    "--cdi-dir",
    "directories",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="DIR",
    help=f"A directory of specifications, may stand several times. [default: {', '.join(map(str, DIRECTORIES))}]",
)


@click.group("cdi", help="CDI specifications: what container runtimes are told that a container needs for a GPU.")
def command() -> None:
    """What `gpu-plugin run` writes with the device list strategies cdi-cri and cdi-annotations."""


@command.command(
    "generate",
    help="Print the specification that `gpu-plugin run` would write for this node, without a daemon and without writing it.",
    epilog="Takes the flags of `gpu-plugin run` too: --nvidia-driver-root, --gds-enabled, --nvidia-cdi-hook-path and so on. "
    "Such as: gpu-plugin cdi generate --simulate hgx-h100 --format yaml. What was left out is said on standard error. Exit "
    "status 1 where there is no specification.",
)
@click.option(
    "--root",
    metavar="DIR",
    help="A directory that has a node's files: usr, dev, and proc/driver/nvidia/gpus unless --simulate names the GPUs.",
)
@click.option("--format", "form", type=click.Choice(["json", "yaml"]), default="json", help="[default: json]")
@click.option(
    "--class", "device_class", metavar="CLASS", default="gpu", help="gpu, imex-channel, gdrcopy, gds or mofed."
)
@click.option(
    "--output", metavar="DIR", type=click.Path(path_type=Path), help="Write every class to this directory instead."
)
@with_hidden_options
def generate(root: str | None, form: str, device_class: str, output: Path | None, **given: object) -> int:
    """Prints or writes specifications."""
    from gpu_plugin.access.cdi import names  # noqa: PLC0415 - usage and help need none of it
    from gpu_plugin.cli.cdi_source import built  # noqa: PLC0415

    if output is not None and _given("form", "device_class"):
        raise click.UsageError("--output writes every class, as JSON: leave --format and --class out")
    if device_class not in names.CLASSES:
        raise click.UsageError(f"--class: {device_class!r} is none of {', '.join(names.CLASSES)}")
    try:
        settings = settings_from(given_flags(given), os.environ)
        made = built(settings, root)
    except ConfigError as error:
        raise click.UsageError(str(error), click.get_current_context()) from None
    for sentence in (*made.complaints, *_missing(made.missing)):
        click.echo(f"gpu-plugin cdi generate: {sentence}", err=True)
    if made.trouble:
        raise click.ClickException(made.trouble)
    if output is not None:
        return _write(output, made.specs)
    spec = made.specs.get(names.file_name(device_class))
    if spec is None:
        raise click.ClickException(f"this node has nothing of class {device_class}, or it was not asked for")
    click.echo(_text(spec, form), nl=False)
    return 0


def _given(*parameters: str) -> bool:
    context = click.get_current_context()
    return any(context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in parameters)


def _missing(missing: Mapping[str, str]) -> Iterator[str]:
    yield from (f"{name} is left out: {why}" for name, why in missing.items())


def _text(spec: "Spec", form: str) -> str:
    from gpu_plugin.access.cdi.spec import to_json  # noqa: PLC0415

    written = to_json(spec).decode()
    if form == "json":
        return written
    import yaml  # noqa: PLC0415

    return str(yaml.safe_dump(json.loads(written), sort_keys=False, width=120))


def _write(output: Path, specs: "Mapping[str, Spec]") -> int:
    from gpu_plugin.cdi_specs.directory import SpecDirectory  # noqa: PLC0415

    outcome = SpecDirectory(output).write(specs)
    for name in outcome.changed:
        click.echo(f"{output / name}: {'written' if name in specs else 'removed'}")
    if outcome.refused:
        raise click.ClickException(f"--output: {'; '.join(outcome.refused.values())}")
    if not outcome.changed:
        click.echo(f"{output}: nothing to change")
    return 0


@command.command(
    "list",
    help="List the CDI devices that the specifications on this node have, of whatever vendor.",
    epilog="Exit status 1 where a specification cannot be used; which and why is said on standard error.",
)
@_dirs_option
@click.option("--json", "as_json", is_flag=True, help="A JSON list of objects instead of a line each.")
def list_devices(directories: tuple[Path, ...], as_json: bool) -> int:  # noqa: FBT001 - click hands it over so
    """Prints every device's qualified name."""
    from gpu_plugin.cli.cdi_file import judge, printable  # noqa: PLC0415 - usage and help need none of it

    rows, faulty = [], False
    for file in _spec_files(directories or DIRECTORIES, named=bool(directories)):
        spec, faults = judge(file)
        for fault in faults:
            click.echo(f"{printable(str(file))}: {fault}", err=True)
        faulty |= bool(faults)
        if spec is not None and not faults:
            rows += [{"name": f"{spec.kind}={device.name}", "file": printable(str(file))} for device in spec.devices]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        for row in rows:
            click.echo(row["name"])
    return 1 if faulty else 0


@command.command(
    "validate",
    help="Judge CDI specifications by the JSON Schema and the rules of CDI 1.1.0. FILE - is standard input.",
    epilog="Exit status 2 if any of them is wrong.",
)
@click.argument("files", nargs=-1, metavar="[FILE]...", type=click.Path(path_type=Path))
@_dirs_option
@click.option("--host-paths", is_flag=True, help="Judge too whether what they name exists on this machine.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema, for editors, and nothing else.")
def validate(files: tuple[Path, ...], directories: tuple[Path, ...], host_paths: bool, schema: bool) -> int:  # noqa: FBT001
    """Prints a verdict on each file."""
    if schema:
        from gpu_plugin.access.cdi.spec import json_schema  # noqa: PLC0415

        click.echo(json.dumps(json_schema(), indent=2))
        return 0
    judged = files or tuple(_spec_files(directories or DIRECTORIES, named=bool(directories)))
    if not judged:
        raise click.UsageError(
            f"there is no specification in {', '.join(map(str, directories or DIRECTORIES))}: name a file, or - for "
            "standard input"
        )
    from gpu_plugin.access.cdi import reading  # noqa: PLC0415 - usage and help need none of it
    from gpu_plugin.cli.cdi_file import judge, printable  # noqa: PLC0415

    valid = True
    for file in judged:
        shown = printable(str(file))
        spec, faults = judge(file)
        if spec is not None and host_paths:
            gone = [path for path in reading.host_paths(spec) if not os.path.lexists(path)]
            faults += [f"{printable(path)} does not exist on this machine" for path in gone]
        for fault in faults:
            click.echo(f"{shown}: {fault}")
        if not faults and spec is not None:
            click.echo(f"{shown}: valid, {spec.kind} {spec.cdi_version}, {len(spec.devices)} devices")
        valid &= not faults
    return 0 if valid else 2


@command.command(
    "remove", help="Remove the specifications that `gpu-plugin run` wrote: for uninstalling it from a node."
)
@click.option(
    "--cdi-dir", "directory", type=click.Path(path_type=Path), envvar="CDI_DIR", default=Path(CDI_DIR),
    help=f"Where they are. [default: {CDI_DIR}] [$CDI_DIR]",
)  # fmt: skip
def remove(directory: Path) -> int:
    """Removes our files and no other."""
    from gpu_plugin.cdi_specs.directory import SpecDirectory  # noqa: PLC0415

    outcome = SpecDirectory(directory).remove()
    for name in outcome.changed:
        click.echo(f"{directory / name}: removed")
    if outcome.refused:
        raise click.ClickException(f"not removed: {'; '.join(outcome.refused.values())}")
    if not outcome.changed:
        click.echo(f"{directory}: nothing of this plugin's")
    return 0


def _spec_files(directories: Iterable[Path], *, named: bool) -> Iterator[Path]:
    """The files that runtimes take for specifications. A directory that somebody `named` must be there."""
    for directory in directories:
        try:
            yield from (path for path in sorted(directory.iterdir()) if path.suffix in {".json", ".yaml"})
        except FileNotFoundError:
            if named:
                raise click.UsageError(f"--cdi-dir: {directory}: there is no such directory") from None
        except OSError as error:
            raise click.ClickException(f"{directory}: {error.strerror}") from None
