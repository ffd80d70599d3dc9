"""Directories whose paths leave room for sockets."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree  # by name: tests replace the module's own


@contextmanager
def short_directory() -> Iterator[Path]:
    """A directory of one's own, removed at the end: the address of a socket in it fits the 107 bytes that unix(7) allows.

    The fixture `short_path` is this for one test; what outlives a test asks for it here.
    """
    path = Path(tempfile.mkdtemp(prefix="gp", dir="/tmp"))
    try:
        yield path
    finally:
        rmtree(path, ignore_errors=True)
