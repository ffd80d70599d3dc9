"""The options of `run` and of verbs that take the same, and the settings made of them."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from gpu_plugin.config import document, values
from gpu_plugin.config.document import Document
from gpu_plugin.config.errors import ConfigError, Fault
from gpu_plugin.config.resolve import chosen, resolve
from gpu_plugin.config.settings import HEADINGS, OPTIONS, Option, Settings
from gpu_plugin.config.values import AUTO
from gpu_plugin.runtime.regular_file import open_file


def settings_from(flags: Mapping[str, object], environ: Mapping[str, str], file: str | Path | None = None) -> Settings:
    """Return the settings from the command line, the environment and a file.

    Args:
        flags: values by option name, as `given_flags` returns them.
        environ: environment variables.
        file: the config file; None: the file that flags and environment name, if any.

    Raises:
        ConfigError: the file cannot be read, or a value is invalid; the error has its place.
    """
    name = file or chosen(flags, environ)
    content = read_document(name, "--config-file ") if name else None
    return resolve(flags, environ, content)


def settings_without_file(flags: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
    """Return the settings from the command line and the environment, without the file that they name. Raises ConfigError."""
    without = {name: value for name, value in flags.items() if name != "config_file"}
    return resolve(without, {name: value for name, value in environ.items() if name != "CONFIG_FILE"})


def read_document(file: str | Path, named_by: str = "") -> Document:
    """Return the content of a config file. It must be a regular file or /dev/null, because a pipe could block for ever.

    Raises ConfigError if it cannot be read (the fault begins with `named_by`) or is not YAML.
    """
    return document.parse(read_written(file, named_by), str(file))


def read_written(file: str | Path, named_by: str = "") -> bytes:
    """Read a config file, up to a byte more than its greatest length. Raises ConfigError if it cannot be read."""
    try:
        with open_file(file, null=True) as stream:
            return stream.read(document.MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)  # a name with a zero byte is a ValueError
        raise ConfigError.of([Fault(reason or "cannot be read", f"{named_by}{file}")]) from None


def given_flags(given: Mapping[str, object]) -> dict[str, object]:
    """Return click's values for `settings_from`: None for a missing flag, repeated values joined by commas."""
    return {
        name: (",".join(value) if value else None) if isinstance(value, tuple) else value
        for name, value in given.items()
    }


def seconds(option: str, written: str, low: float, high: float) -> float:
    """Return the value of an option in seconds. Raises UsageError if it is not a duration between `low` and `high` seconds."""
    try:
        return values.duration(low, high)(written)
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}") from None


def refusal(error: ConfigError) -> click.UsageError:
    """Return the error for a verb whose configuration is invalid, with a line for each fault."""
    faults = [" ".join(str(each).split()) for each in error.faults or (error,)]
    return click.UsageError("\n".join(faults))


class Suggested(click.ParamType[str]):
    """A text. Completion offers `words`; other values may be valid, too, or are refused later."""

    name = "text"

    def __init__(self, words: Iterable[str]) -> None:
        self._words = words

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """Return the words that begin so."""
        return [CompletionItem(word) for word in self._words if word.startswith(incomplete)]


class Profiles:
    """The names of the simulated nodes, read when they are needed."""

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        from gpu_plugin.simulation.profile import names  # noqa: PLC0415 - only completion needs them

        return iter(names())


PROFILE = Suggested(Profiles())

_DURATION = re.compile(r"\d+(ms|s|m|h)")


class Grouped(click.Command):
    """A command whose help has the options of `run` under headings, and its own under Options.

    It accepts long options with a single dash, as Go's flag package in NVIDIA's plugin does: -mig-strategy=single.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, after adding the second dash of long options."""
        names = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        return super().parse_args(ctx, with_two_dashes(args, names))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options."""
        records = {param.name: record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))}
        headings = {option.name: option.heading for option in OPTIONS}
        sections: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*HEADINGS, "Options")}
        for name, record in records.items():
            sections[headings.get(str(name), "Options")].append(record)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def with_two_dashes(args: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the arguments with two dashes for -name and -name=value if --name is in `names`; arguments after -- unchanged."""
    end = args.index("--") if "--" in args else len(args)
    long = [
        f"-{arg}" if arg.startswith("-") and f"-{arg.partition('=')[0]}" in names and arg not in names else arg
        for arg in args[:end]
    ]
    return [*long, *args[end:]]


def with_options(command: Callable[..., Any], *, hidden: bool = False) -> Callable[..., Any]:
    """Give a command every flag of `settings.OPTIONS`. `hidden` flags are not in its help."""
    for option in reversed(OPTIONS):
        if option.flags:
            command = _flag(option, hidden=hidden)(command)
    return command


with_hidden_options = partial(with_options, hidden=True)


def _flag(option: Option, *, hidden: bool) -> Callable[[Any], Any]:
    names = [f"--{flag}" for flag in option.flags]
    envs = ", ".join(f"${env}" for env in option.envs)
    default = "" if option.default in (None, "") else f" [default: {str(option.default).lower()}]"
    text = f"{option.help}{default} [{envs}]"
    more: dict[str, Any] = {}
    if option.switch:
        metavar = "[true|false|auto]" if AUTO in getattr(option.parse, "schema", {}).get("enum", ()) else "[true|false]"
        more = {
            "is_flag": False,
            "flag_value": "true",
            "metavar": metavar,
            "type": Suggested(metavar.strip("[]").split("|")),
        }
    elif option.many:
        more = {"multiple": True, "metavar": "LIST"}
    elif words := getattr(option.parse, "schema", {}).get("enum"):
        more = {"metavar": f"[{'|'.join(words)}]", "type": Suggested(words)}
    elif option.name == "simulate":
        more = {"type": PROFILE, "metavar": "TEXT"}
    elif option.parse in (values.path, values.optional_path, values.root):
        more = {"metavar": "PATH"}
    elif _DURATION.fullmatch(str(option.default)):
        more = {"metavar": "DURATION"}
    return click.option(*names, option.name, default=None, help=text, hidden=hidden, **more)
