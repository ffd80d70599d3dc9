"""The record of the specifications that this plugin wrote, in their directory. Every call blocks.

This plugin removes a file only if its SHA-256 is in the record. The record has the form of sha256sum(1). The specifications
themselves cannot have it, since CDI has annotations only from 0.6.0 on, and older runtimes refuse newer files.
"""

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from gpu_plugin.runtime.regular_file import read_file, replace_file

FILE = ".gpu-plugin.sha256"  # runtimes read only names that end in .json or .yaml

Digests = Mapping[str, frozenset[str]]
"""The hexadecimal SHA-256 of each content that this plugin wrote, by file name. A file has two while it is replaced."""

_MAX_BYTES = 64 * 1024  # a record of all classes has 1 KiB
MODE = 0o644  # of the record and of the specifications
_LINE = re.compile(rb"([0-9a-f]{64})  ([\w.-]+)", re.ASCII)


def digest(content: bytes) -> str:
    """Return the hexadecimal SHA-256 of a content."""
    return sha256(content).hexdigest()


def read(directory: Path) -> Digests:
    """Read the record of a directory. It is empty if it cannot be read, so that no file counts as ours."""
    try:
        content = read_file(directory / FILE, _MAX_BYTES)
    except OSError:
        return {}
    found: dict[str, frozenset[str]] = {}
    for match in filter(None, map(_LINE.fullmatch, content.splitlines())):
        name = match[2].decode()
        found[name] = found.get(name, frozenset()) | {match[1].decode()}
    return found


def write(directory: Path, digests: Digests) -> None:
    """Replace the record of a directory, or remove it if it would be empty. Raises OSError, which names the record."""
    lines = [f"{digest}  {name}\n" for name in sorted(digests) for digest in sorted(digests[name])]
    if lines:
        replace(directory / FILE, "".join(lines).encode())
    else:
        (directory / FILE).unlink(missing_ok=True)


def replace(file: Path, content: bytes) -> None:
    """Replace a file, which every user may read then. Raises OSError, which names the file itself and not the temporary file."""
    try:
        replace_file(file, content, MODE)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(file)) from None
