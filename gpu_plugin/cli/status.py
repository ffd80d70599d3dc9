"""`gpu-plugin status`: prints the state of the node, its problems, its resources and its GPUs."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path

import click

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
from gpu_plugin.cli.running_daemon import ask, state_dir_option
from gpu_plugin.cli.typed_status import converted
from gpu_plugin.config.times import age
from gpu_plugin.config.words import counted, shortened
from gpu_plugin.runtime.printable import printable
from gpu_plugin.status.model import Gpu, Problem, Resource, Status, json_schema
from gpu_plugin.telemetry.metrics.families import metrics

_LABEL = 15  # columns of the label at the beginning of a line
_CAUSE = 24  # columns of a cause that the names of pods leave
_WIDE_CAUSE = 48  # the most columns of a cause in a wide table


@click.command(
    "status",
    help="What the running daemon serves: the problems of the node with their remedies, the resources, and each GPU with its "
    "state and the pods that hold it.",
    epilog="Exit status 0 where all is well, also if a GPU is degraded or held back by an operator; 1 where there is a problem; "
    "3 where no daemon answers. With --metrics 0 wherever one answers that does not wait: the lines say the rest.",
)
@state_dir_option
@output_options
@click.option("--metrics", "as_metrics", is_flag=True, help="Prometheus' text format, for a textfile collector.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of -o json, without a daemon.")
@click.option(
    "-w",
    "--watch",
    "every",
    is_flag=False,
    flag_value="2s",
    metavar="[DURATION]",
    help="Show it, with the readings of the GPUs, every so often (2s) until interrupted, over restarts of the daemon, too.",
)
def command(state_dir: Path, output: str, as_metrics: bool, schema: bool, every: str | None) -> int:  # noqa: FBT001
    """Print the status."""
    if schema:
        click.echo(json.dumps(json_schema(), indent=2))
        return SUCCESS
    if every is None:
        return _once(state_dir, output, as_metrics=as_metrics)
    pause = seconds("--watch", every, 0.1, 3600)
    status = None
    while True:
        if sys.stdout.isatty():
            click.clear()
        try:
            status = _once(state_dir, output, as_metrics=as_metrics, readings=True)
        except click.ClickException as error:  # the daemon restarts
            if status is None:
                raise
            status = NO_DAEMON
            click.echo(printable(error.format_message()), err=True)
        if reader_left():
            return status
        time.sleep(pause)


def _once(state_dir: Path, output: str, *, as_metrics: bool, readings: bool = False) -> int:
    reply = ask(state_dir, "status")
    status = converted(displayable(reply))
    if as_metrics:
        click.echo("\n".join(metrics(converted(reply))))
        return PROBLEM_FOUND if status.waiting else SUCCESS
    if output in DATA:
        click.echo(structured(reply, output))
    else:
        click.echo("\n".join(lines(status, time.time(), width(), wide=output == "wide", readings=readings)))
    return PROBLEM_FOUND if any(problem.severity != "note" for problem in status.problems) else SUCCESS


def lines(
    status: Status, now: float, columns: int | None = None, *, wide: bool = False, readings: bool = False
) -> Iterator[str]:
    """Yield the status as text.

    Args:
        status: the status, safe for a terminal.
        now: Unix time in seconds.
        columns: the greatest width of a line, None for no limit. Rows of a wide table may be longer.
        wide: whether to add facts, names, readings and MIG devices.
        readings: whether to add readings.
    """
    problems = [problem for problem in status.problems if problem.severity != "note"]
    if [problem.title for problem in problems] != [status.headline]:
        for line in wrapped(status.headline or "The daemon answers", "", columns):
            yield coloured(line, problems[0].severity if problems else "Healthy")
        if problems:
            yield ""
    index = {gpu.uuid: gpu.index for gpu in status.gpus}
    for number, problem in enumerate(problems):
        if number:
            yield ""
        yield from _problem(problem, str(index.get(problem.gpu, problem.gpu)), now, columns)
    yield ""
    for about, text in _facts(status, now, wide=wide):
        yield from wrapped(f"{about:<{_LABEL}}{text}", " " * _LABEL, columns)
    if status.gpus or status.missing:
        yield ""
        yield from _gpus(status, now, columns, wide=wide, readings=readings or wide)


def _problem(problem: Problem, gpu: str, now: float, columns: int | None) -> Iterator[str]:
    since = "" if problem.since is None else f"  {age(now - problem.since)}"
    yield coloured(f"{problem.title}{since}", problem.severity)
    yield from wrapped(f"  {problem.cause}", "  ", columns)
    if problem.recovers:
        yield from wrapped(f"  Recovers when {problem.recovers}", "  ", columns)
    if problem.gpu:
        yield f"  What to do: gpu-plugin explain {gpu}"
    elif problem.steps:
        step = problem.steps[0]
        yield from wrapped(f"  What to do: {step.text}" + (":" if step.command else ""), "  ", columns)
        if step.command:
            yield f"      {step.command}"


def _facts(status: Status, now: float, *, wide: bool) -> Iterator[tuple[str, str]]:
    daemon, configuration, driver = status.daemon, status.configuration, status.driver
    version = driver.version or ("none" if driver.no_gpu else "not known yet")
    yield "gpu-plugin", f"{daemon.version}, up {age(now - daemon.started)}, driver {version}"
    if daemon.log_lines_dropped:
        dropped = counted(daemon.log_lines_dropped, "log line")
        yield "", coloured(f"{dropped} dropped: standard error could not be written", "warning")
    if configuration.since is None:
        yield "configuration", "none is in force yet"
    else:
        yield "configuration", f"{configuration.file or 'no file'}, for {age(now - configuration.since)}"
    for why in configuration.without_effect:
        yield "", coloured(f"without effect: {why}", "warning")
    if wide:
        yield from _more_facts(status, now)
    yield from _resources(status)
    for problem in status.problems:
        if problem.severity == "note" and not problem.kind.startswith("gpu-"):  # the table of GPUs has the others
            yield "note", f"{problem.title}: {problem.cause}"


def _more_facts(status: Status, now: float) -> Iterator[tuple[str, str]]:
    yield "node", f"{status.node}, process {status.daemon.pid}, state in {status.state.directory}"
    registrations = [resource.registration for resource in status.resources.values()]
    ages = [age(now - each.since) for each in registrations if each.registered and each.since is not None]
    yield "kubelet", (status.kubelet.socket or "no socket") + (f", registered for {ages[-1]}" if ages else "")
    yield "reloads", ", ".join(f"{count} {word}" for word, count in status.configuration.reloads.items())
    strategy, cdi, cluster = status.device_list_strategy, status.cdi, status.cluster
    yield "strategy", ", ".join(strategy.used) + (f" ({strategy.reason})" if strategy.reason else "")
    if cdi is not None:
        yield "CDI", f"{counted(cdi.devices, 'device')} in {cdi.directory}"
    if cluster is not None:
        cordoned = f", {counted(len(cluster.cordoned), 'GPU')} cordoned by its annotation" if cluster.cordoned else ""
        yield "cluster", f"node {cluster.node or 'not known'}{cordoned}"


def _resources(status: Status) -> Iterator[tuple[str, str]]:
    """Yield one line for all resources that are registered and Healthy, and a line for each other one."""
    fine: list[str] = []
    others: list[str] = []
    for name, each in status.resources.items():
        registered = each.registration.registered or not status.kubelet.socket
        is_fine = registered and each.healthy == each.devices
        (fine if is_fine else others).append(f"{name} {_counts(each)}" + ("" if registered else ", not registered"))
    if fine:
        yield "resources", "; ".join(fine)
    for text in others:
        yield "" if fine or text is not others[0] else "resources", text
    if not status.resources:
        yield "resources", "none is served"
    elif not status.kubelet.socket:
        yield "", "nothing is registered, because --kubelet-socket is empty"


def _counts(resource: Resource) -> str:
    """Return the numbers of a resource's devices: healthy, unhealthy, held by pods, and gone but still listed."""
    present = resource.devices - resource.retired
    text = f"{resource.healthy} of {present} Healthy"
    if resource.held is not None:
        text += f", {resource.held} held"
    if resource.sharing:
        text += f", shared by {' and '.join(resource.sharing)}"
    if resource.held_back:
        text += f", {resource.held_back} held back"
    return text + (f", {resource.retired} gone but listed until no pod holds them" if resource.retired else "")


def _gpus(status: Status, now: float, columns: int | None, *, wide: bool, readings: bool) -> Iterator[str]:
    """Yield a row for each GPU, with `wide` also for each MIG device."""
    head = ["GPU", "STATE", "CAUSE", "AGE", "PODS"]
    head += ["TEMP", "POWER", "MEMORY", "USE"] if readings else []
    head += ["BUS ID", "MODEL", "UUID"] if wide else []
    rows, pods, words = [head], [[""]], [""]
    for gpu in status.gpus:
        since = "" if gpu.since is None or gpu.verdict == "OK" else age(now - gpu.since)
        cells = [str(gpu.index), gpu.state, _cause(gpu), since, _pods(gpu.holders)]
        rows.append([*cells, *(_read(gpu) if readings else ()), *((gpu.bus_id, gpu.model, gpu.uuid) if wide else ())])
        words.append(gpu.state)
        pods.append(list(gpu.holders or ()))
        for each in sorted(gpu.devices, key=attrgetter("index")) if wide else ():
            if each.kind == "mig":
                named = sorted({f"{holder.namespace}/{holder.pod}" for holder in each.holders})
                cells = [each.index, "healthy" if each.healthy else "unhealthy", each.reason, ""]
                rows.append([*cells, _pods(None if each.held is None else named), *[""] * 5, each.resource, each.id])
                words.append("healthy" if each.healthy else "unhealthy")
                pods.append(named)
    for gone in status.missing:
        rows.append([gone.bus_id or gone.uuid, "missing", gone.why, "", "", *[""] * (len(head) - 5)])
        words.append("missing")
        pods.append([])
    limit = None if wide else columns
    for cells in rows if wide else ():
        cells[2] = shortened(cells[2], _WIDE_CAUSE)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if limit is not None and sum(widths) - widths[2] + min(widths[2], _CAUSE) + 2 * (len(widths) - 1) > limit:
        for cells, names in zip(rows[1:], pods[1:], strict=True):
            cells[4] = counted(len(names), "pod") if names else cells[4]
    for word, row in zip(words, table(rows, limit, (2,)), strict=True):
        yield coloured(row, word)
    if any(gpu.holders is None for gpu in status.gpus):
        yield ""
        yield from wrapped("? PodResources of the kubelet does not name the pods; the log has the reason.", "", columns)


def _cause(gpu: Gpu) -> str:
    return "; ".join([*(signal.detail for signal in gpu.signals), *gpu.withheld])


def _pods(names: Sequence[str] | None) -> str:
    return "?" if names is None else ", ".join(names) or "-"


def _read(gpu: Gpu) -> tuple[str, str, str, str]:
    """Return temperature, power, memory and use."""
    celsius, watts, most = (
        gpu.readings.get(name) for name in ("temperature_celsius", "power_watts", "power_limit_watts")
    )
    used, size, use = (
        gpu.readings.get(name) for name in ("memory_used_bytes", "memory_total_bytes", "utilization_ratio")
    )
    return (
        "-" if celsius is None else f"{celsius} C",
        "-" if watts is None else f"{watts:.0f} W" if most is None else f"{watts:.0f}/{most:.0f} W",
        "-" if used is None or size is None else f"{float(used) / 2**30:.0f}/{float(size) / 2**30:.0f} GiB",
        "-" if use is None else f"{float(use):.0%}",
    )
