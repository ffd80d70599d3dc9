"""Files of CDI specifications of all programs: their faults, and the devices that runtimes find in a directory. Blocks."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gpu_plugin.config import document
from gpu_plugin.config.document import Limits
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.containers import cdi_names
from gpu_plugin.containers.cdi.spec import MAX_BYTES, TYPED_KEYS, Spec, as_runtimes_read, faults, from_plain
from gpu_plugin.containers.strategy_choice import DEFAULT_SPEC_DIRS
from gpu_plugin.runtime.printable import printable
from gpu_plugin.runtime.regular_file import UnfitFileError, read_file

SUFFIXES = frozenset({".json", ".yaml"})
"""Suffixes of the files that runtimes read as specifications (CDI's library, pkg/cdi/spec-dirs.go)."""


class Judged(msgspec.Struct, frozen=True):
    """A file with its content and its faults."""

    file: str  # its path, as messages show it
    spec: Spec | None  # None if it cannot be read
    faults: tuple[str, ...] = ()  # by the JSON Schema and the rules of CDI
    refused: tuple[str, ...] = ()  # those for which runtimes refuse it: CDI's library accepts more than the schema
    priority: int = 0  # of its directory, higher for later directories

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its devices, such as nvidia.com/gpu=0; empty if runtimes refuse the file, which they refuse as a whole."""
        if self.spec is None or self.refused:
            return ()
        return tuple(f"{self.spec.kind}={device.name}" for device in self.spec.devices)


class Found(msgspec.Struct, frozen=True):
    """The devices that runtimes find in all files."""

    owners: dict[str, Judged]  # the file that counts for each name, in the order of the files
    conflicts: dict[str, tuple[str, ...]]  # by file name, sentences about its devices that no container gets
    refused: dict[str, tuple[str, ...]] = {}  # by device name, the files of each such device


def found(files: Sequence[Judged]) -> Found:
    """Return the devices that runtimes find in these files, by the rules of CDI's library (pkg/cdi/cache.go, refresh).

    If several directories have the same name, the directory with the highest priority counts. If two files of one directory have
    the same name, runtimes refuse the name, even if a later directory also has it.

    Args:
        files: in the order in which they are read, directories of the lowest priority first.
    """
    owners: dict[str, Judged] = {}
    refused: dict[str, tuple[str, ...]] = {}
    pairs: dict[tuple[str, str], list[str]] = {}
    for file in files:
        for name in file.names:
            other = owners.setdefault(name, file)
            if other is file:
                continue
            if other.priority < file.priority:
                owners[name] = file
                continue
            refused[name] = (*refused.get(name, (other.file,)), file.file)
            for one, another in ((other, file), (file, other)):
                pairs.setdefault((one.file, another.file), []).append(name)
    conflicts: dict[str, tuple[str, ...]] = {}
    for (file_name, another_name), names in pairs.items():
        sentence = _conflict(another_name, names)
        conflicts[file_name] = (*conflicts.get(file_name, ()), sentence)
    counting: dict[str, Judged] = {
        name: file for file in files for name in file.names if owners[name] is file and name not in refused
    }
    return Found(counting, conflicts, refused)


def _conflict(other: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    verb = "are" if more else "is"
    return (
        f"conflict: {names[0]}{more} {verb} in {printable(other)} too; runtimes refuse a name that two files of one directory "
        "have: remove one of the files"
    )


YAML_LIMITS = Limits(4 * 1024 * 1024, 200_000, "more than any CDI specification in YAML has")
"""Lower than for JSON, which is read a hundred times as fast. nvidia-ctk's specifications of 8 GPUs have some 60 KiB."""


Judgement = tuple[Spec | None, tuple[str, ...], tuple[str, ...]]


def judge(file: Path) -> Judgement:
    """Return the content of a file, its faults, and the faults for which runtimes refuse it, as in `Judged`."""
    try:
        content = read_file(file, MAX_BYTES)
    except UnfitFileError as error:
        return unread(f"it {error.strerror}")
    except OSError as error:
        return unread(error.strerror or str(error))
    return judge_content(content)


def judge_content(content: bytes) -> Judgement:
    """Judge these bytes, JSON or YAML; see `judge`."""
    try:
        spec = from_plain(_plain(content))
    except _RefusedError as error:
        return unread(str(error))
    except ConfigError as error:
        strict = tuple(_sentence(fault.line, fault.path, fault.reason) for fault in error.faults)
    except ValueError as error:
        strict = (str(error),)
    else:
        reasons = tuple(map(printable, faults(spec)))
        return spec, reasons, reasons
    try:
        spec = as_runtimes_read(_from_yaml(content, TYPED_KEYS))
    except _RefusedError as error:
        return unread(str(error))
    except ValueError:
        return unread(*strict)
    return spec, tuple(map(printable, strict)), tuple(map(printable, faults(spec)))


def unread(*reasons: str) -> Judgement:
    """Return the judgement of a file that cannot be read, with these reasons."""
    sentences = tuple(map(printable, reasons))
    return None, sentences, sentences


class _RefusedError(ValueError):
    """Runtimes refuse the file, although parsers of JSON or YAML in Python accept it."""


_TAB_BEFORE = re.compile(r"[ \r\n]*(\t)")
_TAB_AFTER = re.compile(r"[\r\n] *(\t)")
_SLASH = re.compile(r"(?<!\\)(?:\\\\)*(\\/)")
_NO_SLASH = r"YAML does not have the escape \/: write / alone"

# JSON that the YAML library of runtimes refuses (go.yaml.in/yaml/v3: scannerc.go, readerc.go), by the place of the fault. In JSON
# every backslash is in a string, and no line break or tab is.
_NOT_YAML = (
    (_SLASH, _NO_SLASH),
    (
        re.compile(r"(?<!\\)(?:\\\\)*(\\u[dD][89a-fA-F])"),
        "YAML does not have escapes of surrogates: write the character itself",
    ),
    (
        re.compile("([\x7f-\x84\x86-\x9f\ufffe\uffff])"),
        "YAML does not allow this control character: write its escape",
    ),
    (
        re.compile(r'"[ \t]*([\r\n])\s*:'),
        "YAML does not allow a line break between a key and its colon: remove it",
    ),
)


def _plain(content: bytes) -> object:
    """Parse JSON or YAML to plain values. Raises ValueError, or ConfigError with line numbers if the bytes are not JSON."""
    if content.lstrip()[:1] != b"{":
        return _from_yaml(content)
    try:
        text = content.decode()
        plain = json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except _RefusedError:
        raise
    except ValueError:  # it may be YAML; if not, the YAML reader gives the line of the fault
        return _from_yaml(content)
    # The tab is searched outside of the object only. Over the whole text, the time could grow with the square of its length.
    tab = _TAB_BEFORE.match(text) or _TAB_AFTER.search(text, text.rindex("}"))
    found = [(pattern.search(text), reason) for pattern, reason in _NOT_YAML]
    for match, reason in [(tab, "YAML does not allow a tab before or after the object: remove it"), *found]:
        if match:
            line = text.count("\n", 0, match.start(1)) + 1
            raise _RefusedError(f"line {line}: {reason}; runtimes read JSON as YAML")
    return plain


def _from_yaml(content: bytes, typed_keys: frozenset[str] | None = None) -> object:
    """Parse YAML. Raises ConfigError, and _RefusedError for an escape that PyYAML accepts and runtimes refuse."""
    import yaml  # noqa: PLC0415 - 9 ms and 1 MiB, only with a file

    plain = document.parse(content, "", YAML_LIMITS, typed_keys).content
    text = content.decode("utf-8-sig")
    if r"\/" in text:
        events: Iterator[Any] = yaml.parse(text, yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)
        for event in events:
            if isinstance(event, yaml.DocumentEndEvent):
                break
            quoted = isinstance(event, yaml.ScalarEvent) and event.style == '"'
            if quoted and _SLASH.search(text, event.start_mark.index, event.end_mark.index):
                raise _RefusedError(f"line {event.start_mark.line + 1}: {_NO_SLASH}")
    return plain


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _RefusedError(f"the key {twice!r} appears twice in one object")
    return found


def _sentence(line: int, path: str, reason: str) -> str:
    place = ": ".join([*([f"line {line}"] if line else []), *([path] if path else [])])
    return f"{place}: {reason}" if place else reason


class NameConflicts:
    """Finds devices of this plugin that runtimes do not use from its files because of other files."""

    def __init__(self, directory: Path, standard: Sequence[str | Path] = DEFAULT_SPEC_DIRS) -> None:
        """`directory` has this plugin's files. If it is in `standard`, runtimes read all of `standard`, and the last wins."""
        known = [Path(each) for each in standard]
        self._directories = known if directory in known else [directory]
        self._rank = self._directories.index(directory)
        self._judged: dict[str, tuple[tuple[int, int, int], Judged]] = {}  # files that name this plugin, by identity

    def find(self) -> Mapping[str, str]:
        """Return, by qualified name, why a device of ours does not count. A file is read again only after a change. Blocks."""
        looks = {}
        for rank, directory in enumerate(self._directories):
            try:
                paths = sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES)
            except OSError:
                continue  # a missing directory has no files; the next write reports an error of our directory
            looks.update({str(path): self._look(path, rank) for path in paths})
        self._judged = looks
        files = [judged for _, judged in looks.values()]
        known = found(files)
        ours = {name for file in files if file.priority == self._rank for name in file.names}
        overruled = {
            name: _overruled(name, owner.file)
            for name, owner in known.owners.items()
            if name in ours and owner.priority > self._rank
        }
        return {name: _refused(name, files) for name, files in known.refused.items()} | overruled

    def _look(self, path: Path, rank: int) -> tuple[tuple[int, int, int], Judged]:
        try:
            status = os.stat(path)  # noqa: PTH116
        except OSError:
            return (0, 0, 0), Judged(str(path), None, priority=rank)
        identity = status.st_ino, status.st_mtime_ns, status.st_size
        before = self._judged.get(str(path))
        if before is not None and before[0] == identity:
            return before
        return identity, Judged(str(path), *_judge_ours(path), priority=rank)


def _judge_ours(path: Path) -> Judgement:
    """Judge a file. A file that cannot name this plugin's devices is not parsed, since YAML takes long to parse."""
    try:
        content = read_file(path, MAX_BYTES)
    except OSError as error:
        return unread(error.strerror or str(error))
    # A backslash may begin an escape, with which the vendor can be written in other letters.
    may_be_ours = cdi_names.VENDOR.encode() in content or b"\\" in content
    return judge_content(content) if may_be_ours else unread("it is of another vendor")


def _overruled(name: str, file: str) -> str:
    return (
        f"runtimes take the CDI device {name} from {printable(file)}, since its directory has priority over ours: "
        "remove that file"
    )


def _refused(name: str, files: Sequence[str]) -> str:
    return (
        f"the CDI device {name} is in {' and in '.join(map(printable, files))}; runtimes refuse a name that two files of one "
        "directory have: remove one of the files"
    )
