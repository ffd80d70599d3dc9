"""Files that are replaced whole or not at all."""

import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path


def replace_file(file: Path, content: bytes, mode: int, *, durable: bool = False) -> None:
    """Gives a file this content and mode; whoever reads it sees all of the old one or all of the new one. Blocks.

    The new content is first written beside it, under a name that begins with a dot and the file's own name and has another
    ending. `durable`: it is on disk when this returns.

    Raises:
        OSError: it cannot be written; the old one stays, and nothing lies beside it.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            if durable:
                os.fsync(stream.fileno())
        Path(temporary).replace(file)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise


def leftovers(directory: Path, names: Iterable[str]) -> Iterator[Path]:
    """What processes that were killed while they replaced files of these names left beside them. Blocks.

    What a process writes that is replacing one now is among them.

    Raises:
        OSError: the directory cannot be read.
    """
    temporary = re.compile(rf"\.({'|'.join(map(re.escape, names))})\.[a-z0-9_]{{8}}")  # as tempfile makes names
    with os.scandir(directory) as entries:
        for entry in entries:
            if temporary.fullmatch(entry.name) and stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                yield Path(entry.path)
