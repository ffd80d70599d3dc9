"""`gpu-plugin status`: prints the problems of the node, its resources and its GPUs."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from gpu_plugin.cli.options import seconds
from gpu_plugin.cli.output import (
    DATA,
    NO_DAEMON,
    PROBLEM_FOUND,
    SUCCESS,
    coloured,
    displayable,
    output_options,
    reader_left,
    structured,
    table,
    width,
    wrapped,
)
from gpu_plugin.cli.running_daemon import state_dir_option, status_of
from gpu_plugin.config.times import age
from gpu_plugin.config.words import counted
from gpu_plugin.runtime.printable import printable
from gpu_plugin.status.model import Gpu, Problem, Resource, Status, json_schema
from gpu_plugin.telemetry.metrics.families import metrics

COLOURS = {"critical": "Unhealthy", "warning": "attention", "note": "note"}
_STATES = {"unhealthy": "Unhealthy", "withheld": "attention", "degraded": "degraded", "held-back": "note"}
_UNKNOWN = "?"


@click.command(
    "status",
    help="The problems of this node, its resources and its GPUs, with the pods that hold them.",
    epilog="Exit status 0 if there is no problem, or only notes, such as a cordon or a degraded GPU; 1 if pods do not get a GPU "
    "or resource, or something is not as configured; 3 if no daemon answers. With --metrics 0 unless the daemon waits.",
)
@state_dir_option
@output_options
@click.option("--metrics", "as_metrics", is_flag=True, help="Prometheus' text format, for a textfile collector.")
@click.option("--schema", "as_schema", is_flag=True, help="The JSON Schema of the status, without a daemon.")
@click.option(
    "-w",
    "--watch",
    "every",
    is_flag=False,
    flag_value="2s",
    metavar="[DURATION]",
    help="Print it with temperatures, power, memory and use, again and again (every 2s), until interrupted.",
)
def command(state_dir: Path, output: str, as_metrics: bool, as_schema: bool, every: str | None) -> int:  # noqa: FBT001
    """Print the status."""
    if as_schema:
        click.echo(structured(json_schema(), "json"))
        return SUCCESS
    if every is None:
        return _once(state_dir, output, as_metrics=as_metrics)
    pause = seconds("--watch", every, 0.1, 3600)
    status = None
    while True:
        if width() is not None:  # a terminal
            click.clear()
        try:
            status = _once(state_dir, output, as_metrics=as_metrics, watched=True)
        except click.ClickException as error:  # the daemon restarts
            if status is None:
                raise
            status = NO_DAEMON
            click.echo(printable(error.format_message()), err=True)
        if reader_left():
            return status
        time.sleep(pause)


def _once(state_dir: Path, output: str, *, as_metrics: bool, watched: bool = False) -> int:
    status = status_of(state_dir)
    if as_metrics:
        click.echo("\n".join(metrics(status)))
        return PROBLEM_FOUND if status.waiting else SUCCESS
    if output in DATA:
        click.echo(structured(msgspec.to_builtins(status), output))
    else:
        shown = msgspec.convert(displayable(msgspec.to_builtins(status)), Status)
        click.echo("\n".join(lines(shown, time.time(), width(), wide=output == "wide", watched=watched)))
    return PROBLEM_FOUND if any(problem.severity != "note" for problem in status.problems) else SUCCESS


def lines(
    status: Status, now: float, columns: int | None = None, *, wide: bool = False, watched: bool = False
) -> Iterator[str]:
    """Yield the status as text.

    `now` is Unix time in seconds. `columns` is the greatest width of a line, None for no limit. `wide` adds columns and MIG
    devices, and `watched` the readings.
    """
    names = {gpu.uuid: str(gpu.index) for gpu in status.gpus}
    yield from wrapped(f"{status.node}: {status.headline}", "  ", columns)
    yield from wrapped(", ".join(_facts(status, now)), "  ", columns)
    for problem in status.problems:
        if problem.severity != "note":
            yield ""
            yield from problem_lines(problem, now, columns, explain=names.get(problem.gpu, problem.gpu))
    notes = [problem for problem in status.problems if problem.severity == "note"]
    if notes:
        yield ""
    for problem in notes:
        yield from wrapped(coloured(f"note: {problem.title}: {problem.cause}", "note"), "  ", columns)
    if status.waiting:
        return
    yield ""
    if status.resources:
        yield from table([["RESOURCE", "HEALTHY", "HELD", "REGISTERED"], *_resources(status, now)], columns, (0,))
    else:
        yield "no resource is served"
    if status.gpus:
        yield ""
        yield from _gpus(status.gpus, now, columns, wide=wide, watched=watched)


def _facts(status: Status, now: float) -> Iterator[str]:
    yield f"gpu-plugin {status.daemon.version} since {age(now - status.daemon.started)}"
    yield f"driver {status.driver.version or 'not known yet'}"
    configuration = status.configuration
    if configuration.since is not None:
        yield f"configuration {configuration.file or 'without a file'} since {age(now - configuration.since)}"
    if status.daemon.log_lines_dropped:
        yield f"{counted(status.daemon.log_lines_dropped, 'log line')} dropped"


def problem_lines(problem: Problem, now: float, columns: int | None, explain: str = "") -> Iterator[str]:
    """Yield a problem as text; with all its steps, or, if `explain` names its GPU, a hint to `explain`."""
    since = "" if problem.since is None else f"  ({age(now - problem.since)})"
    yield from wrapped(
        coloured(f"{problem.severity.upper()}: {problem.title}{since}", COLOURS[problem.severity]), "  ", columns
    )
    yield from wrapped(f"  {problem.cause}", "  ", columns)
    if problem.pods:
        yield from wrapped(f"  Pods: {', '.join(problem.pods)}", "    ", columns)
    if problem.recovers:
        yield from wrapped(f"  Recovers when {problem.recovers}.", "    ", columns)
    if problem.steps and explain:
        yield f"  What to do: gpu-plugin explain {explain}"
    elif problem.steps:
        yield from step_lines(problem, columns)


def step_lines(problem: Problem, columns: int | None) -> Iterator[str]:
    """Yield the steps of a problem. Each command has a line of its own, which is not wrapped, so that it can be copied."""
    yield "  What to do:"
    for number, step in enumerate(problem.steps, 1):
        yield from wrapped(f"  {number}. {step.text}", "     ", columns)
        if step.command:
            yield f"       {step.command}"


def _resources(status: Status, now: float) -> Iterator[list[str]]:
    for name, resource in status.resources.items():
        registration = resource.registration
        since = "" if registration.since is None else age(now - registration.since)
        registered = since if registration.registered else "no" if status.kubelet.socket else "off"
        yield [name, _healthy(resource), _UNKNOWN if resource.held is None else str(resource.held), registered or "yes"]


def _healthy(resource: Resource) -> str:
    text = f"{resource.healthy} of {resource.devices - resource.retired}"
    if resource.sharing:
        text += f" ({' and '.join(resource.sharing)})"
    return f"{text}, {resource.retired} gone" if resource.retired else text


def _gpus(gpus: Sequence[Gpu], now: float, columns: int | None, *, wide: bool, watched: bool) -> Iterator[str]:
    head = ["GPU", "STATE", "AGE", "PODS"]
    head += ["TEMP", "POWER", "MEMORY", "USE"] if wide or watched else []
    head += ["BUS ID", "MODEL", "UUID"] if wide else []
    rows = [[*_cells(gpu, now, wide=wide, watched=watched), _cause(gpu)] for gpu in gpus]
    shown = table([[*head, "CAUSE"], *rows], columns, (len(head),))
    yield shown[0]
    for gpu, row in zip(gpus, shown[1:], strict=True):
        yield coloured(row, _STATES.get(gpu.state, ""))
        if wide:
            yield from _mig_devices(gpu)
    if any(gpu.holders is None for gpu in gpus):
        yield from wrapped(
            "? The kubelet does not report which pods hold devices; the log has the reason.", "  ", columns
        )


def _cells(gpu: Gpu, now: float, *, wide: bool, watched: bool) -> list[str]:
    cells = [
        str(gpu.index),
        gpu.state,
        "-" if gpu.since is None else age(now - gpu.since),
        _pods(gpu.holders, all_=wide),
    ]
    if wide or watched:
        cells += _readings(gpu)
    return [*cells, gpu.bus_id or "-", gpu.model or "-", gpu.uuid] if wide else cells


def _pods(holders: Sequence[str] | None, *, all_: bool) -> str:
    if holders is None:
        return _UNKNOWN
    if len(holders) <= 1 or all_:
        return ", ".join(holders) or "-"
    return f"{holders[0]} and {len(holders) - 1} more"


def _readings(gpu: Gpu) -> list[str]:
    def reading(name: str) -> float | None:
        value = gpu.readings.get(name)
        return value if isinstance(value, int | float) else None

    celsius, watts, use = reading("temperature_celsius"), reading("power_watts"), reading("utilization_ratio")
    used, whole = reading("memory_used_bytes"), reading("memory_total_bytes")
    memory = (
        "-" if used is None else f"{used / 2**30:.0f}" + ("" if whole is None else f"/{whole / 2**30:.0f}") + " GiB"
    )
    return [
        "-" if celsius is None else f"{celsius:.0f} °C",
        "-" if watts is None else f"{watts:.0f} W",
        memory,
        "-" if use is None else f"{use:.0%}",
    ]


def _cause(gpu: Gpu) -> str:
    causes = [signal.detail for signal in gpu.signals if signal.verdict != "OK"]
    return "; ".join(dict.fromkeys([*causes, *gpu.withheld]))


def _mig_devices(gpu: Gpu) -> Iterator[str]:
    for each in gpu.devices:
        if each.kind == "mig":
            state = (
                "gone" if each.listed == each.retired else "Healthy" if each.healthy else f"Unhealthy: {each.reason}"
            )
            pods = sorted({f"{holder.namespace}/{holder.pod}" for holder in each.holders})
            yield f"     {each.index}  {each.resource}  {each.id}  {state}" + (f"  {', '.join(pods)}" if pods else "")
