"""Files of CDI specifications, whoever wrote them: what is wrong with each, and what runtimes make of a node's directories."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click
import msgspec

from gpu_plugin.access.cdi.spec import MAX_BYTES, Spec, faults, from_plain
from gpu_plugin.config import document
from gpu_plugin.config.document import Limits
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.host.driver_root.inside import resolve
from gpu_plugin.runtime.printable import printable
from gpu_plugin.runtime.regular_file import UnfitFileError, content, read_file

SUFFIXES = frozenset({".json", ".yaml"})
"""What the names of files end in that runtimes take for specifications (CDI's library, pkg/cdi/spec-dirs.go)."""


class Judged(msgspec.Struct, frozen=True):
    """A file by the name that people know it by, what it says (None where that makes no sense), and what is wrong with it.

    `priority` is that of its directory: the later one's is higher.
    """

    file: str
    spec: Spec | None
    faults: tuple[str, ...] = ()
    priority: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its devices, such as nvidia.com/gpu=0, if runtimes take the file, which they do whole or not at all."""
        if self.spec is None or self.faults:
            return ()
        return tuple(f"{self.spec.kind}={device.name}" for device in self.spec.devices)


class Found(msgspec.Struct, frozen=True):
    """What runtimes know once they have read all files: the file that counts for each name, in the order of the files.

    `conflicts` says of files by name which of their devices no runtime gives to a container, and why.
    """

    owners: dict[str, Judged]
    conflicts: dict[str, tuple[str, ...]]


def found(files: Sequence[Judged]) -> Found:
    """What runtimes make of these files, by the rules of CDI's library (pkg/cdi/cache.go, refresh).

    A name counts in the directory of the highest priority. Two files of one directory that have it are a conflict, after which
    the name is nobody's, not even a later directory's.

    Args:
        files: in the order in which they are read, directories of the lowest priority first.
    """
    owners: dict[str, Judged] = {}
    refused: dict[str, None] = {}
    pairs: dict[tuple[str, str], list[str]] = {}
    for file in files:
        for name in file.names:
            other = owners.setdefault(name, file)
            if other is file:
                continue
            if other.priority < file.priority:
                owners[name] = file
                continue
            refused[name] = None
            for one, another in ((other, file), (file, other)):
                pairs.setdefault((one.file, another.file), []).append(name)
    conflicts: dict[str, tuple[str, ...]] = {}
    for (file_name, another_name), names in pairs.items():
        sentence = _conflict(another_name, names)
        conflicts[file_name] = (*conflicts.get(file_name, ()), sentence)
    counting: dict[str, Judged] = {
        name: file for file in files for name in file.names if owners[name] is file and name not in refused
    }
    return Found(counting, conflicts)


def _conflict(other: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    verb = "are" if more else "is"
    return (
        f"conflict: {names[0]}{more} {verb} in {other} too; runtimes refuse a name that two files of one directory have: remove "
        "one of the files"
    )


def judged(directories: Sequence[Path], root: str, *, named: bool) -> list[Judged]:
    """The files in these directories below a root, in the order in which runtimes read them. Blocks.

    Args:
        directories: those of the lowest priority first, by their paths on the node.
        root: the directory that has the node's files, without a slash at the end; empty for this node's own. Links are
            followed within it.
        named: somebody named the directories, so they must be there.

    Raises:
        UsageError: a directory that was named, or the root, is not there.
        ClickException: a directory cannot be read.
    """
    if root and not Path(root).is_dir():
        raise click.UsageError(f"--root: {root}: there is no such directory")
    return [
        Judged(
            shown,
            *(judge(Path(at)) if at is not None else (None, (f"it is a link that leads to nothing below {root}",))),
            priority,
        )
        for priority, directory in enumerate(directories)
        for shown, at in _files(root, directory, named=named)
    ]


def gone(paths: Iterable[str], root: str) -> list[str]:
    """Paths of a node that lead to nothing below a root, such as `judged` takes. Blocks."""
    return [path for path in paths if resolve(root, f"{root}{path}") is None]


def _files(root: str, directory: Path, *, named: bool) -> Iterator[tuple[str, str | None]]:
    """Each file as people know it, and where it is; None for a link that leads to nothing below the root."""
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

YAML_LIMITS = Limits(4 * 1024 * 1024, 200_000, "more than any CDI specification in YAML has")
"""Less than of JSON, which is read a hundred times as fast: nvidia-ctk's specifications of 8 GPUs have some 60 KiB."""


def judge(file: Path) -> tuple[Spec | None, tuple[str, ...]]:
    """What a file says, None where it makes no sense, and a sentence for each thing that is wrong with it."""
    try:
        content = _standard_input() if str(file) == STANDARD_INPUT else read_file(file, MAX_BYTES)
    except UnfitFileError as error:
        return None, (f"it {error.strerror}",)
    except OSError as error:
        return None, (printable(error.strerror or str(error)),)
    return judge_content(content)


def judge_content(content: bytes) -> tuple[Spec | None, tuple[str, ...]]:
    """What these bytes say, JSON or YAML, as `judge` has it of a file."""
    try:
        spec = from_plain(_plain(content))
    except ConfigError as error:
        return None, tuple(printable(_sentence(fault.line, fault.path, fault.reason)) for fault in error.faults)
    except UnicodeEncodeError:
        return None, ("an unpaired surrogate is not a character",)
    except ValueError as error:
        return None, (printable(str(error)),)
    return spec, tuple(map(printable, faults(spec)))


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise OSError("standard input is closed")
    return content(sys.stdin.buffer, MAX_BYTES)


class _DuplicateKeyError(ValueError):
    """A key appears twice: which value counts is up to the reader, and CDI's library takes neither."""


def _plain(content: bytes) -> object:
    """JSON or YAML as plain values. Raises ValueError, and ConfigError with lines for what is no JSON."""
    if content.lstrip()[:1] == b"{":
        try:
            return json.loads(content.decode(), object_pairs_hook=_once)
        except RecursionError:
            raise ValueError("nested too deep") from None
        except _DuplicateKeyError:
            raise
        except ValueError:  # no JSON: it is YAML that begins so, or the YAML reader tells the line of the fault
            return document.parse(content, "", YAML_LIMITS).content
    return document.parse(content, "", YAML_LIMITS).content


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _DuplicateKeyError(f"the key {twice!r} appears twice in one object")
    return found


def _sentence(line: int, path: str, reason: str) -> str:
    place = ": ".join([*([f"line {line}"] if line else []), *([path] if path else [])])
    return f"{place}: {reason}" if place else reason
