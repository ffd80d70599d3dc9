"""`gpu-plugin cdi`: generate, list, validate and remove CDI specifications, without a daemon."""

import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import click
import msgspec
from click.core import ParameterSource

from gpu_plugin.cli.options import given_flags, settings_from, with_hidden_options
from gpu_plugin.cli.output import DATA, output_options, structured
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import CDI_DIR
from gpu_plugin.containers import cdi_names
from gpu_plugin.containers.cdi.build import Built
from gpu_plugin.containers.cdi.spec import MAX_BYTES, Spec, host_paths, to_json
from gpu_plugin.containers.cdi.written import encoded
from gpu_plugin.containers.cdi_files.directory import Outcome, SpecDirectory, not_ours
from gpu_plugin.containers.cdi_files.files import SUFFIXES, Judged, Judgement, found, judge, judge_content, unread
from gpu_plugin.containers.driver_root.inside import resolve
from gpu_plugin.runtime.printable import printable
from gpu_plugin.runtime.regular_file import content

# Runtimes look for specifications in these directories, and the last one wins (CDI's specification)
DIRECTORIES = (Path("/etc/cdi"), Path(CDI_DIR))

_dirs_option = click.option(
    "--cdi-dir",
    "directories",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="DIR",
    help="A directory of specifications; may be repeated, the last one wins. "
    f"[default: {', '.join(map(str, DIRECTORIES))}]",
)
_root_option = click.option(
    "--root", metavar="DIR", help="A directory that has a node's files: specifications are looked for below it."
)
_simulate_option = click.option(
    "--simulate",
    metavar="PROFILE",
    help="The specifications that `gpu-plugin cdi generate` makes for this simulated node instead.",
)


@click.group("cdi", help="CDI specifications, from which container runtimes read what a container needs for a GPU.")
def command() -> None:
    """Handle the specifications that `gpu-plugin run` writes with the strategies cdi-cri and cdi-annotations."""


@command.command(
    "generate",
    help="Print the specification that `gpu-plugin run` would write for this node, without a daemon and without writing it.",
    epilog="Takes the flags of `gpu-plugin run` too: --nvidia-driver-root, --gds-enabled, --nvidia-cdi-hook-path and so on. "
    "Example: gpu-plugin cdi generate --simulate hgx-h100 --format yaml. Devices that are left out are reported on standard "
    "error. Exit status 1 if there is no specification.",
)
@click.option(
    "--root",
    metavar="DIR",
    help="A directory that has a node's files: usr, dev, and proc/driver/nvidia unless --simulate names the GPUs; of a WSL node "
    "usr/lib/wsl and dev, of a Tegra etc, usr and dev.",
)
@click.option("--format", "form", type=click.Choice(["json", "yaml"]), default="json", help="[default: json]")
@click.option(
    "--class",
    "device_class",
    metavar="CLASS",
    default="gpu",
    help="Which one to print: gpu, imex-channel, gdrcopy, gds or mofed. [default: gpu]",
)
@click.option(
    "--output",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Write every class to this directory instead; files with this plugin's names for other classes are removed.",
)
@with_hidden_options
def generate(root: str | None, form: str, device_class: str, output: Path | None, **given: object) -> int:
    """Print or write specifications."""
    source = click.get_current_context().get_parameter_source
    if output is not None and ParameterSource.COMMANDLINE in (source("form"), source("device_class")):
        raise click.UsageError("--output writes every class, as JSON: leave --format and --class out")
    if device_class not in cdi_names.CLASSES:
        raise click.UsageError(f"--class: {device_class!r} is unknown; there are {', '.join(cdi_names.CLASSES)}")
    made = _built(given_flags(given), root)
    if output is not None:
        _report(output, SpecDirectory(output).write(made.specs), made.specs, "--output", "nothing to change")
        if given["simulate"] and root is None:
            _say(
                "a simulated node has its files on no machine: these specifications can be read, and no runtime can use them"
            )
        return 0
    spec = made.specs.get(cdi_names.file_name(device_class))
    if spec is None:
        flag = "--imex-channel-ids" if device_class == cdi_names.IMEX else f"--{device_class}-enabled"
        hint = "" if device_class == cdi_names.GPU else f", or {flag} does not enable it"
        raise click.ClickException(f"this node has no device of class {device_class}{hint}")
    try:
        written = encoded(spec).decode()
    except ValueError as error:
        raise click.ClickException(f"the specification is invalid: {error}") from None
    if form == "yaml":
        import yaml  # noqa: PLC0415 - only this format needs it

        written = yaml.safe_dump(json.loads(written), sort_keys=False, width=120)
    click.echo(written, nl=False)
    return 0


def _built(flags: Mapping[str, object], root: str | None) -> Built:
    """Return the specifications for flags and `root`. Print to standard error what they leave out."""
    from gpu_plugin.cli.cdi_source import built  # noqa: PLC0415 - takes 100 ms, and only this needs it

    try:
        made = built(settings_from(flags, os.environ), root)
    except ConfigError as error:
        raise click.UsageError(str(error), click.get_current_context()) from None
    missing = (f"{name} is left out: {why}" for name, why in made.missing.items())
    for sentence in (*made.complaints, *missing):
        _say(sentence)
    if made.trouble:
        raise click.ClickException(made.trouble)
    return made


@command.command(
    "list",
    help="List the CDI devices that the specifications on this node have, of any vendor.",
    epilog="A name that several directories have is listed once: the last directory's counts. Exit status 1 where a "
    "specification cannot be used, or two files of one directory have the same name; the reasons are on standard error.",
)
@_dirs_option
@_root_option
@_simulate_option
@output_options
def list_devices(directories: tuple[Path, ...], root: str | None, simulate: str | None, output: str) -> int:
    """Print every device's qualified name."""
    files = _judged((), directories, root, simulate)
    known = found(files)
    faults = [
        f"{printable(each.file)}: {fault}"
        for each in files
        for fault in (*each.refused, *known.conflicts.get(each.file, ()))
    ]
    for fault in faults:
        click.echo(fault, err=True)
    if output in DATA:
        rows = [{"name": name, "file": printable(each.file)} for name, each in known.owners.items()]
        click.echo(structured(rows, output))
    else:
        for name in known.owners:
            click.echo(name)
        if not files:
            _say(_none_in(directories, root))
    return 1 if faults else 0


@command.command(
    "validate",
    help="Check CDI specifications against the JSON Schema and the rules of CDI 1.1.0. FILE - is standard input.",
    epilog="Exit status 2 if any of them is wrong, or, for directories, two files of one directory have a device of "
    "one name.",
)
@click.argument("files", nargs=-1, metavar="[FILE]...", type=click.Path(path_type=Path))
@_dirs_option
@_root_option
@_simulate_option
@click.option(
    "--host-paths",
    "check_paths",
    is_flag=True,
    help="Also check that what they name exists on this machine, or below --root.",
)
@click.option("--schema", is_flag=True, help="Print the JSON Schema, for editors, and nothing else.")
def validate(
    files: tuple[Path, ...],
    directories: tuple[Path, ...],
    root: str | None,
    simulate: str | None,
    check_paths: bool,  # noqa: FBT001 - click passes it by keyword
    schema: bool,  # noqa: FBT001
) -> int:
    """Print a verdict on each file."""
    if schema:
        click.echo(json.dumps(msgspec.json.schema(Spec), indent=2))
        return 0

    specs = _judged(files, directories, root, simulate)
    if not specs:
        raise click.UsageError(f"{_none_in(directories, root)}: name a file, or - for standard input")
    conflicts = {} if files else found(specs).conflicts
    valid = True
    for each in specs:
        shown, spec = printable(each.file), each.spec
        faults = [*each.faults, *conflicts.get(each.file, ())]
        if spec is not None and check_paths:
            below = _below(root)
            place = f"below {below}" if below else "on this machine"
            gone = [path for path in host_paths(spec) if resolve(below, f"{below}{path}") is None]
            faults += [f"{printable(path)} does not exist {place}" for path in gone]
        for fault in faults:
            click.echo(f"{shown}: {fault}")
        if not faults and spec is not None:
            click.echo(f"{shown}: valid, {spec.kind} {spec.cdi_version}, {len(spec.devices)} devices")
        valid &= not faults
    return 0 if valid else 2


def _below(root: str | None) -> str:
    """Return a root without a slash at the end, empty for this machine's own."""
    return (root or "").rstrip("/")


def _none_in(directories: tuple[Path, ...], root: str | None) -> str:
    places = ", ".join(f"{_below(root)}{directory}" for directory in directories or DIRECTORIES)
    return f"there is no specification in {places}"


def _judged(
    files: tuple[Path, ...], directories: tuple[Path, ...], root: str | None, simulate: str | None
) -> list[Judged]:
    """Return the specifications in files of any directory, or else in `directories`, or of a simulated node."""
    if simulate is not None and (files or directories):
        others = "FILE" if files else "--cdi-dir"
        raise click.UsageError(
            f"--simulate makes specifications, and {others} names other files: leave one of them out"
        )
    if simulate is not None:
        specs = sorted(_built({"simulate": simulate}, root).specs.items())
        return [Judged(name, *judge_content(to_json(spec))) for name, spec in specs]
    if files:
        return [Judged(str(file), *(_standard_input() if str(file) == "-" else judge(file))) for file in files]
    below = _below(root)
    if below and not Path(below).is_dir():
        raise click.UsageError(f"--root: {below}: there is no such directory")
    nowhere = f"it is a link without a target below {below}"
    return [
        Judged(shown, *(judge(Path(at)) if at is not None else unread(nowhere)), priority)
        for priority, directory in enumerate(directories or DIRECTORIES)
        for shown, at in _files(below, directory, named=bool(directories))
    ]


def _files(root: str, directory: Path, *, named: bool) -> Iterator[tuple[str, str | None]]:
    """Yield the displayed path of each file, and its real path; None for a link without a target below the root.

    Raises UsageError if a `named` directory does not exist, and ClickException if a directory cannot be read.
    """
    shown = Path(f"{root}/{directory}") if root else directory
    at = resolve(root, f"{root}/{directory}") if root else str(directory)
    try:
        names = sorted(path.name for path in Path(at).iterdir() if path.suffix in SUFFIXES) if at is not None else None
    except FileNotFoundError:
        names = None
    except OSError as error:
        raise click.ClickException(f"{shown}: {error.strerror}") from None
    if names is None and named:
        raise click.UsageError(f"--cdi-dir: {shown}: there is no such directory")
    for name in names or ():
        yield str(shown / name), resolve(root, f"{at}/{name}") if root else str(shown / name)


def _standard_input() -> Judgement:
    if sys.stdin is None:
        return unread("standard input is closed")
    try:
        return judge_content(content(sys.stdin.buffer, MAX_BYTES))
    except OSError as error:
        return unread(error.strerror or str(error))


def _say(sentence: str) -> None:
    """Print a sentence to standard error."""
    click.echo(f"{click.get_current_context().command_path}: {sentence}", err=True)


@command.command(
    "remove", help="Remove the specifications that `gpu-plugin run` wrote: for uninstalling it from a node."
)
@click.option(
    "--cdi-dir", "directory", type=click.Path(path_type=Path), envvar="CDI_DIR", default=Path(CDI_DIR),
    help=f"Where they are. [default: {CDI_DIR}] [$CDI_DIR]",
)  # fmt: skip
def remove(directory: Path) -> int:
    """Remove the files of this plugin, and no others."""
    _report(directory, SpecDirectory(directory).remove(), (), "not removed", "nothing of this plugin's")
    return 0


def _report(directory: Path, outcome: Outcome, written: Collection[str], refused: str, nothing: str) -> None:
    """Print the changes in a directory. Raise ClickException, which begins with `refused`, if changes failed."""
    for name in outcome.changed:
        click.echo(f"{directory / name}: {'written' if name in written else 'removed'}")
    for name in outcome.foreign:
        click.echo(f"left: {not_ours(directory / name)}", err=True)
    invalid = [f"{directory / name}: the specification is invalid: {why}" for name, why in outcome.invalid.items()]
    if outcome.refused or invalid:
        raise click.ClickException(f"{refused}: {'; '.join([*outcome.refused.values(), *invalid])}")
    if not outcome.changed and not outcome.foreign:
        click.echo(f"{directory}: {nothing}")
