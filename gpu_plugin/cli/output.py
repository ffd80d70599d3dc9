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
NO_OUTPUT = 4  # the output could not be written, although the command succeeded

DATA = ("json", "yaml")  # formats for programs

# Keys whose numbers are Unix times, which are printed in the format of RFC 3339
TIMES = frozenset({"at", "since", "started"})

_COLOURS = {"Healthy": "green", "Unhealthy": "red", "degraded": "yellow", "attention": "yellow", "note": "cyan"}


def output_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb `--output`, and `--json` as the short form of `--output json`. Both are passed as `output`."""

    @functools.wraps(function)
    def merged(*arguments: Any, as_json: bool, output: str, **given: Any) -> Any:
        return function(*arguments, output="json" if as_json else output, **given)

    short = click.option("--json", "as_json", is_flag=True, help="The same as -o json.")(merged)
    return click.option(
        "-o",
        "--output",
        "output",
        type=click.Choice(["text", "wide", *DATA]),
        default="text",
        show_default=True,
        metavar="[text|wide|json|yaml]",
        help="Text for people, with more columns if wide; JSON or YAML for programs, with times as 2026-11-22T02:40:13.123Z.",
    )(short)


def structured(data: object, output: str) -> str:
    """Return the data as JSON or YAML, with times as text."""
    data = _with_times(data)
    if output == "yaml":
        import yaml  # noqa: PLC0415 - only this format needs it

        text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
        return text.rstrip("\n")
    return json.dumps(data, indent=2, ensure_ascii=False)


def _with_times(data: object, key: str = "") -> object:
    """Return the data with Unix times in the format of RFC 3339; `key` is the key of the data."""
    if isinstance(data, Mapping):
        return {name: _with_times(value, name) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_with_times(value) for value in data]
    if key in TIMES and isinstance(data, int | float) and not isinstance(data, bool):
        return rfc3339_milliseconds(data)
    return data


def width() -> int | None:
    """Return the columns of the terminal, or None if standard output is not a terminal, so that lines are not wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def wrapped(text: str, indent: str = "", columns: int | None = None) -> Iterator[str]:
    """Yield the lines of a text, wrapped between words, with `indent` before all lines but the first."""
    if columns is None or len(text) <= columns:
        yield text
        return
    yield from textwrap.wrap(
        text, max(columns, len(indent) + 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


NARROWEST = 5  # the least width of a narrowed column


def table(rows: list[list[str]], columns: int | None = None, cut_first: Sequence[int] = ()) -> list[str]:
    """Return rows in aligned columns with two blanks between them. Lines are cut at the end of the terminal.

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
    """Return the data with each text made safe for a terminal."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, Mapping):
        return {displayable(name): displayable(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [displayable(value) for value in data]
    return data


def coloured(text: str, word: str) -> str:
    """Return the text in the colour of a state if standard output is a terminal and NO_COLOR is not set."""
    plain = os.environ.get("NO_COLOR") or word not in _COLOURS or not sys.stdout.isatty()
    return text if plain else click.style(text, fg=_COLOURS[word])


class _LossyDescriptor(io.RawIOBase):
    """A descriptor whose writes never fail: it drops data that it cannot write, and keeps the first error in `failed`."""

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
    """Replace standard output and error, so that a full disk or a reader that has left does not abort a command.

    Yield a function that returns a sentence if output was lost; empty if only the reader left, as `head` does.
    """
    out, err = _lossy(sys.stdout), _lossy(sys.stderr)

    def lost() -> str:
        if out is None or out.failed is None or out.failed.errno == errno.EPIPE:
            return ""
        return f"the output could not be written: {out.failed.strerror}; the command itself has completed"

    with contextlib.ExitStack() as stack:
        for raw, redirect in ((out, contextlib.redirect_stdout), (err, contextlib.redirect_stderr)):
            if raw is not None:
                buffer, at_once = io.BufferedWriter(raw), raw is err or raw.isatty()
                stream = io.TextIOWrapper(buffer, "utf-8", errors="backslashreplace", line_buffering=at_once)
                stack.enter_context(redirect(stream))
                stack.callback(stream.flush)
        yield lost


def _lossy(stream: TextIO | None) -> _LossyDescriptor | None:
    """Return the replacement of a stream; None if the stream was already replaced by an object without a descriptor."""
    if stream is None:  # the parent process closed it; its descriptor may be of another file by now
        return _LossyDescriptor(-1, OSError(errno.EBADF, os.strerror(errno.EBADF)))
    try:
        stream.flush()
        return _LossyDescriptor(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None


def reader_left() -> bool:
    """Return True if the reader of standard output has left, so that a command that repeats itself may end."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, _LossyDescriptor) and raw.failed is not None
