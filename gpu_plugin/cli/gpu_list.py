"""How an operator lists GPUs on a command line: indices, ranges of them, uuids or how a uuid begins, each with a count."""

import re
from collections.abc import Mapping, Sequence

import click

from gpu_plugin.devices.node import Gpu

EVERY = "all"

_RANGE = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_COUNTED = re.compile(r"(.*):([0-9]{1,5})")


def listed(option: str, given: Sequence[str], gpus: Sequence[Gpu]) -> list[int]:
    """Positions in `gpus` of what was given to an option, ascending and each once.

    Args:
        option: its name, for sentences.
        given: texts such as `0,2-5` or `GPU-6f1c`; `all` stands for every GPU.
        gpus: those that there are.

    Raises:
        UsageError: no such GPU, or more than one that is meant.
    """
    return sorted({at for item in _items(given) for at in _named(option, item, gpus)})


def counted(option: str, given: Sequence[str], gpus: Sequence[Gpu], default: int) -> Mapping[int, int]:
    """As `listed`, with a number for each position: the 3 of `0-1:3`, or `default` where there is none; the last one counts."""
    numbers: dict[int, int] = {}
    for item in _items(given):
        match = _COUNTED.fullmatch(item)
        name, number = (match[1], int(match[2])) if match else (item, default)
        numbers |= dict.fromkeys(_named(option, name, gpus), number)
    return dict(sorted(numbers.items()))


def _items(given: Sequence[str]) -> list[str]:
    return [item.strip() for text in given for item in text.split(",") if item.strip()]


def _named(option: str, item: str, gpus: Sequence[Gpu]) -> list[int]:
    """The positions that one item of a list names."""
    if item == EVERY:
        return list(range(len(gpus)))
    if match := _RANGE.fullmatch(item):
        first, last = int(match[1]), int(match[2])
        if first > last:
            raise click.UsageError(f"{option}: {item}: a range begins with the lower index")
        last = min(last, first + len(gpus))  # one of them is missing then, and is said
        return [_one(option, str(index), gpus) for index in range(first, last + 1)]
    return [_one(option, item, gpus)]


def _one(option: str, item: str, gpus: Sequence[Gpu]) -> int:
    if item.isdecimal():
        found = [at for at, gpu in enumerate(gpus) if str(gpu.index) == item]
        kind = "index"
    else:
        found = [at for at, gpu in enumerate(gpus) if gpu.uuid.lower().startswith(item.lower())]
        kind = "uuid"
    if len(found) == 1:
        return found[0]
    if found:
        which = " and ".join(gpus[at].uuid for at in found[:2])
        more = f" and {len(found) - 2} more" if len(found) > 2 else ""
        raise click.UsageError(
            f"{option}: {item} is the {kind}, or its beginning, of {which}{more}: say which by its uuid"
        )
    there = ", ".join(str(gpu.index) for gpu in gpus)
    raise click.UsageError(f"{option}: {item}: no GPU of this node has this {kind}; there are those of index {there}")
