"""`gpu-plugin explain`: prints the reasons of each GPU's state, the pods that it affects, and the steps to recover it."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from gpu_plugin.cli.output import (
    DATA,
    PROBLEM_FOUND,
    SUCCESS,
    coloured,
    displayable,
    output_options,
    structured,
    width,
    wrapped,
)
from gpu_plugin.cli.running_daemon import find_gpu, gpu_argument, state_dir_option, status_of
from gpu_plugin.cli.status import problem_lines
from gpu_plugin.config.times import age, utc
from gpu_plugin.status.model import STATES, Gpu, Missing, Problem, Status

_COLOURS = {"unhealthy": "Unhealthy", "withheld": "attention", "degraded": "degraded", "held-back": "note"}


@click.command(
    "explain",
    help="Why a GPU is in its state, since when, which pods use it, what to do, and when it recovers. Without GPU: all of them.",
    epilog="GPU is an index, a uuid or how it begins, or a PCI bus id. Exit status 1 if a GPU that was asked for is Unhealthy or "
    "missing.",
)
@state_dir_option
@gpu_argument(required=False)
@output_options
def command(state_dir: Path, gpu: str | None, output: str) -> int:
    """Print the daemon's explanation of its GPUs."""
    status = status_of(state_dir)
    asked: Sequence[Gpu | Missing] = (*status.gpus, *status.missing) if gpu is None else (find_gpu(gpu, status),)
    if output in DATA:
        explained = [
            {**msgspec.to_builtins(each), "problems": msgspec.to_builtins(_problems(each, status))} for each in asked
        ]
        click.echo(structured({"gpus": explained}, output))
    elif not asked:
        click.echo("no GPU is known yet: the driver does not work, or finds none; gpu-plugin status has the reason")
    else:
        now, columns = time.time(), width()
        ranked = sorted(asked, key=_rank)
        blocks = ["\n".join(lines(each, status, now, columns)) for each in ranked]
        click.echo("\n\n".join(blocks))
    return PROBLEM_FOUND if any(not isinstance(each, Gpu) or not each.healthy for each in asked) else SUCCESS


def _rank(gpu: Gpu | Missing) -> int:
    return STATES.index(gpu.state) if isinstance(gpu, Gpu) else -1


def _problems(gpu: Gpu | Missing, status: Status) -> tuple[Problem, ...]:
    """Return the problems of a GPU, and the problems that withhold it from pods."""
    if isinstance(gpu, Missing):
        return tuple(each for each in status.problems if each.kind == "missing-gpu" and each.object == gpu.name)
    withheld = (each for each in status.problems if gpu.uuid in each.withholds)
    return (*(each for each in status.problems if each.gpu and each.gpu == gpu.uuid), *withheld)


def lines(gpu: Gpu | Missing, status: Status, now: float, columns: int | None = None) -> Iterator[str]:
    """Yield the explanation of a GPU as text; `now` is Unix time in seconds, `columns` the greatest width of a line."""
    problems = [msgspec.convert(displayable(msgspec.to_builtins(each)), Problem) for each in _problems(gpu, status)]
    if isinstance(gpu, Missing):
        yield from wrapped(coloured(displayable(f"{gpu.name} is missing"), "Unhealthy"), "  ", columns)
    else:
        since = "" if gpu.since is None else f" since {utc(gpu.since)} ({age(now - gpu.since)})"
        named = displayable("  ".join(filter(None, (f"GPU {gpu.index}", gpu.bus_id, gpu.uuid, gpu.model))))
        yield from wrapped(f"{named}  {coloured(gpu.state, _COLOURS.get(gpu.state, 'Healthy'))}{since}", "  ", columns)
        yield from wrapped(f"  Pods: {_pods(gpu)}", "    ", columns)
    for problem in problems:
        yield from problem_lines(problem, now, columns)
    if isinstance(gpu, Gpu):
        for signal in gpu.signals:
            detail = displayable(f"  {signal.name} ({signal.verdict}): {signal.detail}")
            when = "" if signal.since is None else f", {age(now - signal.since)} ago"
            yield from wrapped(f"{detail}{when}", "    ", columns)
            if signal.note:
                yield from wrapped(displayable(f"    Note: {signal.note}"), "    ", columns)


def _pods(gpu: Gpu) -> str:
    return "not known" if gpu.holders is None else displayable(", ".join(gpu.holders)) or "none"
