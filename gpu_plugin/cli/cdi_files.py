"""Files of CDI specifications of any program: the faults of each file, and the order in which runtimes read directories."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from gpu_plugin.containers.cdi.spec import MAX_BYTES
from gpu_plugin.containers.cdi_files import files
from gpu_plugin.containers.cdi_files.files import SUFFIXES, Judged, Judgement, judge_content, unread
from gpu_plugin.containers.driver_root.inside import resolve
from gpu_plugin.runtime.regular_file import content


def judged(directories: Sequence[Path], root: str, *, named: bool) -> list[Judged]:
    """Return the files in these directories below a root, in the order in which runtimes read them. Blocks.

    Args:
        directories: their paths on the node, the lowest priority first.
        root: the directory with the node's files, without a slash at the end; empty for this node's own. Links are followed
            within it.
        named: True if the user named the directories, so that they must exist.

    Raises:
        UsageError: a named directory, or the root, does not exist.
        ClickException: a directory cannot be read.
    """
    if root and not Path(root).is_dir():
        raise click.UsageError(f"--root: {root}: there is no such directory")
    return [
        Judged(
            shown,
            *(judge(Path(at)) if at is not None else unread(f"it is a link without a target below {root}")),
            priority,
        )
        for priority, directory in enumerate(directories)
        for shown, at in _files(root, directory, named=named)
    ]


def gone(paths: Iterable[str], root: str) -> list[str]:
    """Return the paths of a node that do not exist below a root, as in `judged`. Blocks."""
    return [path for path in paths if resolve(root, f"{root}{path}") is None]


def _files(root: str, directory: Path, *, named: bool) -> Iterator[tuple[str, str | None]]:
    """Yield the displayed path of each file, and its real path; None for a link without a target below the root."""
    shown = Path(f"{root}/{directory}") if root else directory
    at = resolve(root, f"{root}/{directory}") if root else str(directory)
    try:
        names = sorted(path.name for path in Path(at).iterdir() if path.suffix in SUFFIXES) if at is not None else None
    except FileNotFoundError:
        names = None
    except OSError as error:
        raise click.ClickException(f"{shown}: {error.strerror}") from None
    if names is None and named:
        raise click.UsageError(f"--cdi-dir: {shown}: there is no such directory")
    for name in names or ():
        yield str(shown / name), resolve(root, f"{at}/{name}") if root else str(shown / name)


STANDARD_INPUT = "-"


def judge(file: Path) -> Judgement:
    """Return the judgement of a file, or of standard input."""
    if str(file) != STANDARD_INPUT:
        return files.judge(file)
    try:
        return judge_content(_standard_input())
    except OSError as error:
        return unread(error.strerror or str(error))


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise OSError("standard input is closed")
    return content(sys.stdin.buffer, MAX_BYTES)
