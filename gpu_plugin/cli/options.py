"""The options that `run` and its companions take, and the settings that a command line asks for with them."""

import errno
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from gpu_plugin.config import document
from gpu_plugin.config.document import Document
from gpu_plugin.config.errors import ConfigError, Fault
from gpu_plugin.config.options import OPTIONS, Option
from gpu_plugin.config.resolve import chosen, resolve
from gpu_plugin.config.settings import Settings
from gpu_plugin.config.values import AUTO

_NULL = os.makedev(1, 3)
"""/dev/null (devices.txt of the kernel's documentation), which some name to have no file."""


def settings_from(flags: Mapping[str, object], environ: Mapping[str, str], file: str | Path | None = None) -> Settings:
    """Settings from the command line, the environment and a file.

    Args:
        flags: values by option name, as `given_flags` returns them.
        environ: environment variables.
        file: the config file; None: the one that flags and environment name, if any.

    Raises:
        ConfigError: a file that cannot be read, or a value that cannot be, with the place it stands at.
    """
    name = file or chosen(flags, environ)
    content = read_document(name, "--config-file ") if name else None
    return resolve(flags, environ, content)


def read_document(file: str | Path, named_by: str = "") -> Document:
    """What a config file says: a regular file or /dev/null, since a pipe could keep a reader waiting for ever.

    Raises ConfigError where it cannot be read (told with what named it) or is no YAML.
    """
    try:
        written = _read(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError.of([Fault(reason or "cannot be read", f"{named_by}{file}")]) from None
    return document.parse(written, str(file))


def _read(file: str | Path) -> bytes:
    """As much of a file as tells that it is too long. Raises OSError or ValueError."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        there = os.fstat(descriptor)
        if stat.S_ISDIR(there.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(there.st_mode) and there.st_rdev != _NULL:
            raise ValueError("is no regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            return stream.read(document.MAX_BYTES + 1)
    finally:
        os.close(descriptor)


def given_flags(given: Mapping[str, object]) -> dict[str, object]:
    """Click's values as `settings_from` takes them: None for a flag that was not given, repeated ones joined by commas."""
    return {
        name: (",".join(value) if value else None) if isinstance(value, tuple) else value
        for name, value in given.items()
    }


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command every flag of `options.OPTIONS`."""
    for option in reversed(OPTIONS):
        if option.flags:
            command = _flag(option)(command)
    return command


def with_hidden_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command those flags without a word in its help."""
    for option in reversed(OPTIONS):
        if option.flags:
            command = _flag(option, hidden=True)(command)
    return command


def _flag(option: Option, *, hidden: bool = False) -> Callable[[Any], Any]:
    names = [f"--{flag}" for flag in option.flags]
    envs = ", ".join(f"${env}" for env in option.envs)
    default = "" if option.default in (None, "") else f" [default: {str(option.default).lower()}]"
    text = f"{option.help}{default} [{envs}]"
    more: dict[str, Any] = {}
    if option.switch:
        metavar = "[true|false|auto]" if AUTO in getattr(option.parse, "schema", {}).get("enum", ()) else "[true|false]"
        more = {"is_flag": False, "flag_value": "true", "metavar": metavar}
    elif option.many:
        more = {"multiple": True, "metavar": "LIST"}
    elif words := getattr(option.parse, "schema", {}).get("enum"):
        more = {"metavar": f"[{'|'.join(words)}]"}
    return click.option(*names, option.name, default=None, help=text, hidden=hidden, **more)
