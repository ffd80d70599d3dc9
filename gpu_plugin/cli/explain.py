"""`gpu-plugin explain`: prints the reasons of each GPU's state, what to do, and the recovery."""

import time
from collections.abc import Iterable, Iterator, Mapping
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
from gpu_plugin.cli.running_daemon import OfGpu, ask, gpu_argument, state_dir_option
from gpu_plugin.cli.typed_status import converted, gpu_named, holders
from gpu_plugin.config.times import age, utc
from gpu_plugin.health.explain import Explanation
from gpu_plugin.status.model import STATES, Gpu, Missing, Problem, Status, Step


@click.command(
    "explain",
    cls=OfGpu,
    help="Why a GPU is in its state, since when, which pods hold it, what to do, and what it recovers by. Without a GPU: all, "
    "those that are unfit first.",
    epilog="Healthy or Unhealthy is the GPU's state for the kubelet: FATAL is Unhealthy; DEGRADED (worth a look), APP (an "
    "application's own error) and OK (nothing) are Healthy, and pods still get the GPU, unless it says why it is "
    "withheld: an MPS daemon that is down, or a CDI specification that is not written, say. Exit status 1 where a GPU that was "
    "asked for is Unhealthy or missing.",
)
@state_dir_option
@gpu_argument
@output_options
def command(state_dir: Path, gpu: str | None, output: str) -> int:
    """Print the state of GPUs."""
    reply = ask(state_dir, "status")
    as_data = output in DATA
    status = converted(reply if as_data else displayable(reply))
    gpus: list[Gpu | Missing] = (
        [gpu_named(gpu, status)] if gpu is not None else [*status.missing, *_unfit_first(status)]
    )
    if as_data:
        click.echo(structured(_data(gpus, status), output))
    elif not gpus:
        click.echo("no GPU is known yet: the driver does not work, or finds none; the daemon's log says which")
    else:
        now, columns = time.time(), width()
        click.echo("\n\n".join("\n".join(lines(each, status, now, columns)) for each in gpus))
    return SUCCESS if all(isinstance(each, Gpu) and each.healthy for each in gpus) else PROBLEM_FOUND


def _unfit_first(status: Status) -> list[Gpu]:
    return sorted(status.gpus, key=lambda gpu: STATES.index(gpu.state))


def _data(gpus: list[Gpu | Missing], status: Status) -> Mapping[str, object]:
    problems = {problem: None for gpu in gpus for problem in _problems(gpu, status)}
    data: dict[str, object] = msgspec.to_builtins(
        {
            "gpus": [gpu for gpu in gpus if isinstance(gpu, Gpu)],
            "missing": [gpu for gpu in gpus if isinstance(gpu, Missing)],
            "problems": list(problems),
        }
    )
    return data


def _problems(gpu: Gpu | Missing, status: Status) -> list[Problem]:
    """Return the problems of a GPU, also if they only withhold it."""
    if isinstance(gpu, Missing):
        return [problem for problem in status.problems if problem.kind == "missing-gpu" and gpu.name in problem.object]
    return [
        problem
        for problem in status.problems
        if problem.gpu == gpu.uuid
        or (problem.kind == "withheld" and any(why.startswith(problem.cause) for why in gpu.withheld))
    ]


def lines(gpu: Gpu | Missing, status: Status, now: float, columns: int | None = None) -> Iterator[str]:
    """Yield a GPU's state as text; `now` is Unix time in seconds, `columns` the greatest width of a line."""
    for line, indent in _lines(gpu, _problems(gpu, status), now):
        yield from wrapped(line, indent, columns) if indent else (line,)


def _lines(gpu: Gpu | Missing, problems: list[Problem], now: float) -> Iterator[tuple[str, str]]:
    """Yield lines with the indentation of their continuations."""
    if isinstance(gpu, Missing):
        yield coloured("  ".join(filter(None, ("GPU", gpu.bus_id, gpu.uuid, gpu.model, "missing"))), "missing"), "    "
        yield f"  {gpu.why}", "  "
    else:
        ordered = gpu.state == "held-back"  # not a fault
        verdict = " by an operator" if ordered else "" if gpu.verdict == "OK" else f" ({gpu.verdict})"
        since = "" if gpu.verdict == "OK" or gpu.since is None else f", since {utc(gpu.since)} ({age(now - gpu.since)})"
        named = "  ".join(filter(None, (f"GPU {gpu.index}", gpu.bus_id, gpu.uuid, gpu.model)))
        yield f"{named}  {coloured(f'{gpu.state}{verdict}{since}', gpu.state)}", "    "
        for signal in gpu.signals:
            yield from _signal(signal, now, "" if ordered else signal.verdict)
        for why in gpu.withheld:
            yield f"  withheld: {why}", "    "
        for notice in gpu.notices:
            yield f"  note: {notice.found}", "    "
        if gpu.signals or gpu.withheld or gpu.notices:
            yield f"  Pods that hold it: {holders(gpu.holders)}", "    "
    for problem in problems:
        yield from steps(problem.steps, problem.cause if len(problems) > 1 else "")
        if problem.recovers:
            yield f"  Recovers when {problem.recovers}", "    "


def _signal(signal: Explanation, now: float, verdict: str) -> Iterator[tuple[str, str]]:
    about = ", ".join(filter(None, (verdict, signal.device and f"MIG device {signal.device}")))
    since = "" if signal.since is None else f", for {age(now - signal.since)}"
    yield f"  {signal.name}{about and f' ({about})'}{since}: {signal.detail}", "    "
    if signal.note:
        yield f"    {signal.note}", "    "
    if signal.verdict == "APP" and signal.recovers:  # no problem has it
        yield f"    Recovers when {signal.recovers}", "    "


def steps(remedy: Iterable[Step], about: str = "") -> Iterator[tuple[str, str]]:
    """Yield numbered steps, with commands on lines of their own, which are never broken."""
    remedy = tuple(remedy)
    if remedy:
        yield f"  What to do{f' about {about}' if about else ''}:", "    "
    for number, step in enumerate(remedy, 1):
        yield f"    {number}. {step.text}", "       "
        if step.command:
            yield f"       {step.command}", ""
