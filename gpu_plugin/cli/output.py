"""How verbs show what they were told: as text that fits the terminal, JSON or YAML; and what becomes of output nobody takes."""

import errno
import functools
import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import click

from gpu_plugin.cli.running_daemon import utc

FINE, AMISS, USAGE, NO_DAEMON, NO_OUTPUT = 0, 1, 2, 3, 4
"""Exit statuses of every verb: all is well; something is unhealthy, or was refused; bad usage; no daemon answers; what was
to be said could not be written (what was asked for is done all the same)."""

TIMES = frozenset({"at", "since", "started"})
"""Keys whose numbers are Unix times: they are shown as RFC 3339 has it."""

_COLOURS = {"Healthy": "green", "Unhealthy": "red", "degraded": "yellow", "attention": "yellow"}


def output_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a verb `--output`, and `--json` as the short way to say `--output json`; both arrive as `output`."""

    @functools.wraps(function)
    def merged(*arguments: Any, as_json: bool, output: str, **given: Any) -> Any:
        return function(*arguments, output="json" if as_json else output, **given)

    short = click.option("--json", "as_json", is_flag=True, help="The same as -o json.")(merged)
    return click.option(
        "-o",
        "--output",
        "output",
        type=click.Choice(["text", "json", "yaml"]),
        default="text",
        show_default=True,
        metavar="[text|json|yaml]",
        help="Text for people; JSON or YAML for programs, with times as 2026-11-22T02:40:13.123Z.",
    )(short)


def structured(told: object, output: str) -> str:
    """What was told, as JSON or YAML."""
    told = _shown(told)
    if output == "yaml":
        import yaml  # noqa: PLC0415 - paid for only by those who ask for it

        text: str = yaml.safe_dump(told, sort_keys=False, allow_unicode=True, width=120)
        return text.rstrip("\n")
    return json.dumps(told, indent=2, ensure_ascii=False)


def _shown(told: object, key: str = "") -> object:
    """The same with times as text."""
    if isinstance(told, Mapping):
        return {name: _shown(value, name) for name, value in told.items()}
    if isinstance(told, list | tuple):
        return [_shown(value) for value in told]
    if key in TIMES and isinstance(told, int | float) and not isinstance(told, bool):
        return rfc3339(told)
    return told


def rfc3339(seconds: float) -> str:
    """Unix time as 2026-11-22T02:40:13.123Z."""
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    return f"{utc(whole)[:-4].replace(' ', 'T')}.{milliseconds:03d}Z"


def width() -> int | None:
    """Columns of the terminal; None where standard output is none, and lines stay as long as they are."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def wrapped(text: str, indent: str = "", columns: int | None = None) -> Iterator[str]:
    """The lines of a text, broken between words to fit, all but the first after `indent`."""
    if columns is None or len(text) <= columns:
        yield text
        return
    yield from textwrap.wrap(
        text, max(columns, len(indent) + 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def table(rows: list[list[str]], columns: int | None = None) -> list[str]:
    """Rows in columns as wide as they need be, two blanks apart; the last column is cut where the terminal ends."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)).rstrip() for row in rows]
    if columns is None:
        return lines
    return [line if len(line) <= columns else f"{line[: columns - 3]}..." for line in lines]


def coloured(text: str, word: str) -> str:
    """The text in the colour of a state, where standard output is a terminal and NO_COLOR is not set."""
    plain = os.environ.get("NO_COLOR") or word not in _COLOURS or not sys.stdout.isatty()
    return text if plain else click.style(text, fg=_COLOURS[word])


class _Patient(io.RawIOBase):
    """A descriptor that takes all it is given: what it cannot write is dropped, and why is kept."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.failed: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, content: Any) -> int:
        size = memoryview(content).nbytes
        if self.failed is None:
            try:
                return os.write(self._descriptor, content)
            except OSError as error:
                self.failed = error
        return size


class Output:
    """Standard output for the time of a command: a full disk or a reader that has left ends no command halfway.

    Attributes:
        failed: why something could not be written; None where all was.
    """

    def __init__(self) -> None:
        self._raw: _Patient | None = None
        self._before = sys.stdout

    def __enter__(self) -> Self:
        try:
            descriptor = sys.stdout.fileno()
        except (AttributeError, OSError, ValueError):  # closed, or something that stands in for it
            return self
        sys.stdout.flush()
        self._raw = _Patient(descriptor)
        buffered = io.BufferedWriter(self._raw)
        terminal = self._raw.isatty()
        sys.stdout = io.TextIOWrapper(buffered, "utf-8", errors="backslashreplace", line_buffering=terminal)
        return self

    def __exit__(self, *_raised: object) -> None:
        if self._raw is not None:
            sys.stdout.flush()
            sys.stdout = self._before

    @property
    def failed(self) -> OSError | None:
        """Why something could not be written."""
        return None if self._raw is None else self._raw.failed

    @property
    def lost(self) -> str:
        """A sentence where output was lost that somebody wanted; empty where a reader simply left, as `head` does."""
        if self.failed is None or self.failed.errno == errno.EPIPE:
            return ""
        return f"the output could not be written: {self.failed.strerror}; what was asked for is done all the same"


def nobody_reads() -> bool:
    """Whether standard output is taken by nobody any more: what goes on for ever may end."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, _Patient) and raw.failed is not None
