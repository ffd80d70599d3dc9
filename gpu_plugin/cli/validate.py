"""`gpu-plugin validate`: checks config files without a node."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import click
import yaml

from gpu_plugin.cli.options import given_flags, read_document, with_hidden_options
from gpu_plugin.cli.output import DATA, output_options, structured
from gpu_plugin.config import json_schema
from gpu_plugin.config.device_names import resource_name
from gpu_plugin.config.document import MAX_BYTES, Document, at, parse
from gpu_plugin.config.errors import ConfigError, Fault
from gpu_plugin.config.names import DOMAIN
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.schema_v1 import FOREIGN
from gpu_plugin.config.settings import Settings
from gpu_plugin.config.sharing import SECTIONS
from gpu_plugin.config.written import written
from gpu_plugin.kubelet.offer import require_functions


@click.command(
    "validate",
    help="Check config files as `gpu-plugin run` would, without a node, and print the resulting settings. FILE - is standard "
    "input.",
    epilog="Takes the flags of `gpu-plugin run` too, for files that need some: --mps-root above all. Looks at environment "
    "variables only with --env. Exit status 2 if any file is wrong.",
)
@click.argument("files", nargs=-1, metavar="FILE...")
@output_options
@click.option("--schema", is_flag=True, help="Print the JSON Schema of config files, for editors, and nothing else.")
@click.option(
    "--env",
    "heed_environment",
    is_flag=True,
    help="Apply environment variables as `gpu-plugin run` does; without FILE, check the one that CONFIG_FILE names.",
)
@with_hidden_options
def command(files: tuple[str, ...], output: str, schema: bool, heed_environment: bool, **given: object) -> int:  # noqa: FBT001
    """Print a verdict on each file. The exit status is 0 if all are valid."""
    if schema:
        click.echo(json_schema.text(), nl=False)
        return 0
    environ = dict(os.environ) if heed_environment else {}
    if not files and environ.get("CONFIG_FILE"):
        files = (environ["CONFIG_FILE"],)
    if not files and not heed_environment:
        raise click.UsageError("name a file, or - for standard input")
    flags = given_flags(given)
    for name in ("config_file", "config_file_srcdir"):
        if flags.get(name):
            raise click.UsageError(f"--{name.replace('_', '-')}: name files without it")
    verdicts = [_judge(file, flags, environ) for file in files or ("",)]
    as_data = output in DATA
    if as_data:
        click.echo(structured([_as_json(verdict) for verdict in verdicts], output))
    for verdict in () if as_data else verdicts:
        for fault in verdict.faults:
            click.echo(str(fault))
        for warning in verdict.warnings:
            click.echo(str(warning._replace(reason=f"warning: {warning.reason}")))
        if not verdict.faults:
            click.echo(f"{verdict.file}: valid")
            click.echo(yaml.safe_dump(verdict.config, sort_keys=False, width=120), nl=False)
    return 2 if any(verdict.faults for verdict in verdicts) else 0


class _Verdict(NamedTuple):
    """The verdict on one file."""

    file: str
    faults: Sequence[Fault]
    warnings: Sequence[Fault]
    config: Mapping[str, object]


def _judge(file: str, flags: Mapping[str, object], environ: Mapping[str, str]) -> _Verdict:
    """Return the verdict on a file with these flags and variables, or on these alone without a file."""
    document = Document({})
    name = file or "flags and environment"
    try:
        if file == "-":
            document = parse(sys.stdin.buffer.read(MAX_BYTES + 1), "<stdin>")
        elif file:
            document = read_document(file)
        settings = resolve(flags, environ, document)
        require_functions(settings)
    except ConfigError as error:
        return _Verdict(name, error.faults or (Fault(str(error), name),), _by_line(_without_effect(document)), {})
    warnings = [
        *_without_effect(document),
        *settings.remarks,
        *settings.without_effect,
        *_unknown_resources(settings, document),
    ]
    return _Verdict(name, (), _by_line(warnings), written(settings))


def _by_line(faults: Iterable[Fault]) -> list[Fault]:
    return sorted(faults, key=attrgetter("line"))


def _without_effect(document: Document) -> list[Fault]:
    """Return the keys of the file that have no effect in this plugin."""
    reason = "read by gpu-feature-discovery, not by this plugin"
    return [document.fault(place, reason) for place in FOREIGN if at(document.content, place) is not None]


def _unknown_resources(settings: Settings, document: Document) -> list[Fault]:
    """Return faults for shared resources that no node can have, such as nvidia.com/gpus."""
    known = {f"{DOMAIN}/gpu", *(pattern.name for pattern in (*settings.gpu_names, *settings.mig_names))}
    found = []
    for section in SECTIONS:
        entries = at(document.content, ("sharing", section, "resources"))
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            name = resource_name(entry["name"])
            if name not in known and not name.startswith(f"{DOMAIN}/mig-"):
                place = ("sharing", section, "resources", index, "name")
                names = ", ".join(sorted(known))
                reason = f"no node counts a device under {name}; there are {names} and {DOMAIN}/mig-..."
                found.append(document.fault(place, reason))
    return found


def _as_json(verdict: _Verdict) -> dict[str, object]:
    lists = {
        key: [{"line": each.line, "column": each.column, "path": each.path, "reason": each.reason} for each in faults]
        for key, faults in (("faults", verdict.faults), ("warnings", verdict.warnings))
    }
    return {"file": verdict.file, "valid": not verdict.faults, **lists, "config": verdict.config}
