"""A CDI specification as a file that anybody may have written, JSON or YAML, and what is wrong with it."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gpu_plugin.access.cdi.spec import MAX_BYTES, Spec, faults, from_plain
from gpu_plugin.config import document
from gpu_plugin.config.document import Limits
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.runtime.regular_file import UnfitFileError, content, read_file

STANDARD_INPUT = "-"

YAML_LIMITS = Limits(4 * 1024 * 1024, 200_000, "more than any CDI specification in YAML has")
"""Less than of JSON, which is read a hundred times as fast: nvidia-ctk's specifications of 8 GPUs have some 60 KiB."""


def judge(file: Path) -> tuple[Spec | None, list[str]]:
    """What a file says, None where it makes no sense, and a sentence for each thing that is wrong with it."""
    try:
        content = _standard_input() if str(file) == STANDARD_INPUT else read_file(file, MAX_BYTES)
    except UnfitFileError as error:
        return None, [f"it {error.strerror}"]
    except OSError as error:
        return None, [printable(error.strerror or str(error))]
    return judge_content(content)


def judge_content(content: bytes) -> tuple[Spec | None, list[str]]:
    """What these bytes say, JSON or YAML, as `judge` has it of a file."""
    try:
        spec = from_plain(_plain(content))
    except ConfigError as error:
        return None, [printable(_sentence(fault.line, fault.path, fault.reason)) for fault in error.faults]
    except UnicodeEncodeError:
        return None, ["an unpaired surrogate is not a character"]
    except ValueError as error:
        return None, [printable(str(error))]
    return spec, [*map(printable, faults(spec))]


def printable(text: str) -> str:
    """The text with escapes for what a terminal would take as commands, or cannot be encoded."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode() for each in text
    )


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise OSError("standard input is closed")
    return content(sys.stdin.buffer, MAX_BYTES)


class _TwiceError(ValueError):
    """A key stands twice: which value counts is up to the reader, and CDI's library takes neither."""


def _plain(content: bytes) -> object:
    """JSON or YAML as plain values. Raises ValueError, and ConfigError with lines for what is no JSON."""
    if content.lstrip()[:1] == b"{":
        try:
            return json.loads(content.decode(), object_pairs_hook=_once)
        except RecursionError:
            raise ValueError("nested too deep") from None
        except _TwiceError:
            raise
        except ValueError:  # no JSON: it is YAML that begins so, or the YAML reader tells the line of the fault
            return document.parse(content, "", YAML_LIMITS).content
    return document.parse(content, "", YAML_LIMITS).content


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _TwiceError(f"the key {twice!r} appears twice in one object")
    return found


def _sentence(line: int, path: str, reason: str) -> str:
    place = ": ".join([*([f"line {line}"] if line else []), *([path] if path else [])])
    return f"{place}: {reason}" if place else reason
