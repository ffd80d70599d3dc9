"""The output of verbs: text that fits the terminal, JSON or YAML; and standard streams that cannot be written."""

import contextlib
import errno
import functools
import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import click

from gpu_plugin.config.times import rfc3339_milliseconds
from gpu_plugin.config.words import shortened
from gpu_plugin.runtime.printable import printable

# Exit statuses of every verb
SUCCESS = 0
PROBLEM_FOUND = 1  # something is Unhealthy, was refused or could not be done
USAGE = 2
NO_DAEMON = 3
NO_OUTPUT = 4  # the output could not be written; what was asked for is done all the same

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


def structured(data: object, output: str) -> str:
    """The data as JSON or YAML, with times as text."""
    data = _with_times(data)
    if output == "yaml":
        import yaml  # noqa: PLC0415 - paid for only by those who ask for it

        text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
        return text.rstrip("\n")
    return json.dumps(data, indent=2, ensure_ascii=False)


def _with_times(data: object, key: str = "") -> object:
    """The same data with Unix times as RFC 3339 has them; `key` is the one that it stands under."""
    if isinstance(data, Mapping):
        return {name: _with_times(value, name) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_with_times(value) for value in data]
    if key in TIMES and isinstance(data, int | float) and not isinstance(data, bool):
        return rfc3339_milliseconds(data)
    return data


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


NARROWEST = 5
"""Characters that are left of a cell of a column that is cut."""


def table(rows: list[list[str]], columns: int | None = None, cut_first: Sequence[int] = ()) -> list[str]:
    """Rows in columns as wide as they need be, two blanks apart; where the terminal ends, lines are cut.

    Before that, the columns `cut_first` are narrowed, in their order, down to `NARROWEST`.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for at in cut_first if columns is not None else ():
        over = max(0, sum(widths) + 2 * (len(widths) - 1) - (columns or 0))
        widths[at] = max(min(widths[at], NARROWEST), widths[at] - over)
        rows = [[shortened(cell, widths[at]) if i == at else cell for i, cell in enumerate(row)] for row in rows]
    lines = ["  ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)).rstrip() for row in rows]
    if columns is None:
        return lines
    return [shortened(line, columns) for line in lines]


def displayable(data: Any) -> Any:
    """Data with each text in it as a terminal may show it."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, Mapping):
        return {displayable(name): displayable(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [displayable(value) for value in data]
    return data


def coloured(text: str, word: str) -> str:
    """The text in the colour of a state, where standard output is a terminal and NO_COLOR is not set."""
    plain = os.environ.get("NO_COLOR") or word not in _COLOURS or not sys.stdout.isatty()
    return text if plain else click.style(text, fg=_COLOURS[word])


class _LossyDescriptor(io.RawIOBase):
    """A descriptor that takes all it is given: what it cannot write is dropped, and why is kept."""

    def __init__(self, descriptor: int, closed: OSError | None = None) -> None:
        self._descriptor = descriptor
        self._closed = closed
        self.failed: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return self._closed is None and self.failed is None and os.isatty(self._descriptor)

    def write(self, content: Any) -> int:
        size = memoryview(content).nbytes
        if self.failed is None and self._closed is not None:
            self.failed = self._closed if size else None
        elif self.failed is None:
            try:
                return os.write(self._descriptor, content)
            except OSError as error:
                self.failed = error
        return size


@contextlib.contextmanager
def lossy_output() -> Iterator[Callable[[], str]]:
    """Standard output and error for the time of a command: a full disk or a reader that has left ends no command halfway.

    Gives what says, in a sentence, that output was lost which somebody wanted; empty where a reader simply left, as `head` does.
    """
    out, err = _lossy(sys.stdout), _lossy(sys.stderr)

    def lost() -> str:
        if out is None or out.failed is None or out.failed.errno == errno.EPIPE:
            return ""
        return f"the output could not be written: {out.failed.strerror}; what was asked for is done all the same"

    with contextlib.ExitStack() as stack:
        for raw, redirect in ((out, contextlib.redirect_stdout), (err, contextlib.redirect_stderr)):
            if raw is not None:
                buffer, at_once = io.BufferedWriter(raw), raw is err or raw.isatty()
                stream = io.TextIOWrapper(buffer, "utf-8", errors="backslashreplace", line_buffering=at_once)
                stack.enter_context(redirect(stream))
                stack.callback(stream.flush)
        yield lost


def _lossy(stream: TextIO | None) -> _LossyDescriptor | None:
    """What takes the place of a stream; None for something that stands in for it already, and is no file."""
    if stream is None:  # closed by whoever started us; its number may be that of another file by now
        return _LossyDescriptor(-1, OSError(errno.EBADF, os.strerror(errno.EBADF)))
    try:
        stream.flush()
        return _LossyDescriptor(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None


def reader_left() -> bool:
    """Whether whoever read standard output has left, so that a command that repeats itself may end."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, _LossyDescriptor) and raw.failed is not None
