"""`gpu-plugin doctor`: prints the problems of this node, and their remedies."""

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from gpu_plugin import __version__
from gpu_plugin.cli.options import given_flags, read_written, seconds, settings_without_file, with_hidden_options
from gpu_plugin.cli.output import DATA, PROBLEM_FOUND, SUCCESS, coloured, output_options, structured, width, wrapped
from gpu_plugin.config import document
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.resolve import chosen, resolve
from gpu_plugin.config.settings import Settings
from gpu_plugin.doctor.child_process import ChildError, ChildTimeoutError, in_child
from gpu_plugin.doctor.finding import Finding, Known, Status, Unknown
from gpu_plugin.runtime import control
from gpu_plugin.runtime.printable import encodable, printable

_COLOURS = {"failed": "Unhealthy", "warning": "degraded"}


@click.command(
    "doctor",
    help="What is wrong with this node, and what to do: the driver, its device nodes, the kubelet, the container runtime, "
    "directories, clock and rights, looked at without a daemon; where one runs it is asked, too. Changes nothing. Takes the "
    "options of `run`, and should be given the same.",
    epilog="Exit status 0 if nothing failed, warnings or not; 1 if something failed. Run it as root, on the node or with "
    "kubectl exec in the plugin's container.",
)
@output_options
@click.option(
    "--timeout",
    "timeout",
    default="10s",
    show_default=True,
    metavar="DURATION",
    help="How long each probe may take; the driver has --nvml-timeout if that is longer.",
)
@with_hidden_options
def command(output: str, timeout: str, **given: object) -> int:
    """Print the findings of all checks."""
    patience = seconds("--timeout", timeout, 0.1, 600)
    asked = _asked(given_flags(given), patience)
    found = _found(asked, patience)
    if output not in DATA:
        click.echo("\n".join(lines(found, width())))
    else:
        click.echo(structured(_as_data(found, asked.settings), output))
    return PROBLEM_FOUND if any(each.status == "failed" for _, each in found) else SUCCESS


def _found(asked: "_ResolvedSettings", patience: float) -> list[tuple[str, Finding]]:
    """Return the findings of all checks. They run in a child process, because a driver may hold their process in the kernel.

    Raises UsageError if the simulated node cannot be loaded, and ClickException if the child does not answer.
    """
    from gpu_plugin.doctor.checks import examined  # noqa: PLC0415 - takes 200 ms; usage and help do not need it
    from gpu_plugin.doctor.node import Node, longest  # noqa: PLC0415

    def examine() -> list[tuple[str, Finding]]:
        logging.getLogger("gpu_plugin").addHandler(logging.NullHandler())  # the findings have the same facts
        return examined(Node(asked.settings, patience, asked.refused, asked.file))

    try:
        return in_child(examine, longest(asked.settings, patience) + 10)
    except ChildError as error:
        raise click.ClickException(str(error)) from None
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def lines(found: Sequence[tuple[str, Finding]], columns: int | None = None) -> Iterator[str]:
    """Yield the findings as text: problems first with their remedies, then other findings, then the summary.

    `columns` is the greatest width of a line, None for no limit.
    """
    label = max(len(name) for name, _ in found) + 2
    head = max(len(status) for status in Status) + 2
    indent = " " * (head if columns is not None and columns < 72 else head + label)
    for statuses in ((Status.FAILED, Status.WARNING), (Status.NOTE, Status.OK, Status.SKIPPED)):
        shown = [(name, each) for status in statuses for name, each in found if each.status is status]
        for name, each in shown:
            begin = f"{each.status:<{head}}{name:<{label}}"
            text = [*wrapped(f"{begin}{printable(each.found)}", indent, columns)]
            yield coloured(text[0], _COLOURS.get(each.status, ""))
            yield from text[1:]
            if each.remedy and each.status not in (Status.OK, Status.SKIPPED):
                yield from wrapped(f"{indent}do: {printable(each.remedy)}", f"{indent}    ", columns)
        if shown:
            yield ""
    yield from wrapped(_summary(found), "", columns)


def _summary(found: Sequence[tuple[str, Finding]]) -> str:
    """Return a line that summarizes the findings."""
    failed = list(dict.fromkeys(name for name, each in found if each.status == "failed"))
    warned = list(dict.fromkeys(name for name, each in found if each.status == "warning" and name not in failed))
    if failed:
        return f"{len(failed)} failed: {', '.join(failed)}" + (f"; {len(warned)} with warnings" if warned else "")
    if warned:
        return f"nothing failed; {len(warned)} with warnings: {', '.join(warned)}"
    return "nothing failed"


def _as_data(found: Sequence[tuple[str, Finding]], settings: Settings) -> dict[str, object]:
    """Return the findings for programs."""
    return {
        "version": __version__,
        "node": settings.node_name or socket.gethostname(),
        "healthy": not any(each.status == "failed" for _, each in found),
        "findings": [
            {"check": name} | {key: encodable(text) for key, text in msgspec.to_builtins(each).items()}
            for name, each in found
        ],
    }


class _ResolvedSettings(NamedTuple):
    """Settings, and the config file that they come from; or, if they do without the file, the error in it (`refused`)."""

    settings: Settings
    refused: Known[str] = ""
    file: str = ""


def _asked(flags: dict[str, object], patience: float) -> _ResolvedSettings:
    """Return the settings of flags, environment and file. Raises UsageError if they are invalid even without the file."""
    try:
        named = chosen(flags, os.environ)
        settings = resolve(flags, os.environ, _document(named, patience) if named else None)
        labelled = _labelled(settings, patience)
        if labelled:
            return _ResolvedSettings(resolve(flags, os.environ, _document(labelled, patience)), file=labelled)
        return _ResolvedSettings(settings, file=settings.config_file)
    except ChildTimeoutError as error:
        refused: Known[str] = Unknown(str(error), hung=True)
    except ConfigError as error:
        refused = " ".join(str(error).split())
    try:
        return _ResolvedSettings(settings_without_file(flags, os.environ), refused)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def _document(file: str, patience: float) -> document.Document:
    """Return the content of a config file. A child process reads it, because its disk may hang.

    Raises ChildTimeoutError, and ConfigError if the file cannot be read or is not YAML.
    """
    try:
        written = in_child(lambda: read_written(file, "--config-file "), patience)
    except ChildTimeoutError:
        raise ChildTimeoutError(f"--config-file {file}: no answer within {round(patience, 1):g} s") from None
    except ChildError as error:
        raise ConfigError(f"--config-file {file}: {error}") from None
    return document.parse(written, file)


def _labelled(settings: Settings, patience: float) -> str:
    """Return the file that a label of the Node names, from a running daemon's status; empty if there is no answer in time."""
    if not settings.config_file_srcdir:
        return ""
    try:
        status = in_child(lambda: control.request(Path(settings.state_dir), "status"), patience)
    except (ChildError, control.ControlError):
        return ""
    configuration = status.get("configuration")  # a daemon of another version may send another type
    file = configuration.get("file") if isinstance(configuration, dict) else None
    return file if isinstance(file, str) else ""
