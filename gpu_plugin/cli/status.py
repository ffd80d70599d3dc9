"""`gpu-plugin status`: prints an overview of the running daemon, its resources and its GPUs."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from gpu_plugin.cli.options import seconds
from gpu_plugin.cli.output import (
    NARROWEST,
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
from gpu_plugin.config.times import duration, utc
from gpu_plugin.config.words import counted
from gpu_plugin.daemon.node_status import complaints, unusable
from gpu_plugin.runtime.printable import printable
from gpu_plugin.telemetry.metrics.families import metrics

_LABEL = 15
"""Columns of the label at the beginning of a line."""


@click.command(
    "status",
    help="What the running daemon serves: whether the kubelet has it, each GPU with its state and the pods that hold it, and "
    "whether the configuration in force is the one that was asked for.",
    epilog="Exit status 0 where all is well; 1 where a GPU or all of a resource is Unhealthy, a GPU is missing, something is not "
    "served as asked or not registered, the driver has not answered yet, cannot be used or needs a restart of the plugin, a "
    "configuration is refused or its label not watched, CDI specifications, the state, labels or reports to the cluster cannot "
    "be written, or the daemon waits for another one or for a configuration; 3 where no "
    "daemon answers. With --metrics 0 wherever one answers that does not wait: the lines say the rest.",
)
@state_dir_option
@output_options
@click.option("--metrics", "as_metrics", is_flag=True, help="Prometheus' text format, for a textfile collector.")
@click.option(
    "-w",
    "--watch",
    "every",
    is_flag=False,
    flag_value="2s",
    metavar="[DURATION]",
    help="Show it again and again, every so often (2s), until interrupted, over restarts of the daemon, too.",
)
def command(state_dir: Path, output: str, as_metrics: bool, every: str | None) -> int:  # noqa: FBT001
    """Print the status."""
    if every is None:
        return _once(state_dir, output, as_metrics=as_metrics)
    pause = seconds("--watch", every, 0.1, 3600)
    status = None
    while True:
        if sys.stdout.isatty():
            click.clear()
        try:
            status = _once(state_dir, output, as_metrics=as_metrics)
        except click.ClickException as error:  # a daemon that is being restarted
            if status is None:
                raise
            status = NO_DAEMON
            click.echo(printable(error.format_message()), err=True)
        if reader_left():
            return status
        time.sleep(pause)


def _once(state_dir: Path, output: str, *, as_metrics: bool) -> int:
    status = ask(state_dir, "status")
    if as_metrics:
        click.echo("\n".join(metrics(status)))
        return PROBLEM_FOUND if status["waiting"] else SUCCESS
    wrong = complaints(status)
    if output == "text":
        click.echo("\n".join(lines(displayable(status), time.time(), width())))
    else:
        click.echo(structured({**status, "wrong": wrong}, output))
    return PROBLEM_FOUND if wrong else SUCCESS


def lines(status: dict[str, Any], now: float, columns: int | None = None) -> Iterator[str]:
    """Yield the status as text. `now` is Unix time in seconds; `columns` is the greatest width of a line, None for no limit."""
    for about, text in _facts(status, now):
        yield from wrapped(f"{about:<{_LABEL}}{text}", " " * _LABEL, columns)
    yield ""
    for name, counts in status["resources"].items():
        yield from wrapped(f"{name}: {_resource(counts)}", "  ", columns)
        if unusable(name, counts):
            for why in counts.get("reasons", ()):
                yield from wrapped(coloured(f"  NONE CAN BE USED: {why}", "Unhealthy"), "  ", columns)
    if not status["resources"]:
        yield "no resource is served"
    gpus = status["health"]["gpus"]
    if gpus:
        yield ""
        yield from _gpus(gpus, columns)


def _facts(status: dict[str, Any], now: float) -> Iterator[tuple[str, str]]:
    daemon, kubelet, configuration = status["daemon"], status["kubelet"], status["configuration"]
    since = f"since {utc(daemon['started'])}, for {duration(now - daemon['started'], running=True)}"
    yield "gpu-plugin", f"{daemon['version']}, process {daemon['pid']}, {since}"
    if status["waiting"]:
        yield "", coloured(f"WAITING: {status['waiting']}", "Unhealthy")
    if daemon["log_lines_dropped"]:
        yield "", f"{daemon['log_lines_dropped']} log lines were dropped: they could not be written to standard error"
    state = status.get("state") or {}
    if state.get("trouble"):
        yield "", coloured(f"NOT WRITTEN DOWN: {state['directory']}: {state['trouble']}", "Unhealthy")
    driver = status["driver"]
    yield "driver", driver.get("no_gpu") or driver["version"] or "not known yet"
    if driver["trouble"]:
        yield "", coloured(driver["trouble"], "Unhealthy")
    if driver.get("restart"):
        yield "", coloured(driver["restart"], "Unhealthy")
    for each in status.get("missing", ()):
        yield "", coloured(f"MISSING: {each['name']}: {each['why']}", "Unhealthy")
    for why in status.get("unoffered", ()):
        yield "", coloured(f"NOT SERVED AS ASKED: {why}", "Unhealthy")
    yield from _registrations(kubelet)
    if configuration["since"] is None:
        yield "configuration", "none is in force yet"
    else:
        yield "configuration", f"{configuration['file'] or 'no file'}, in force since {utc(configuration['since'])}"
    if configuration.get("wanted"):
        yield "", coloured(f"WANTED: {configuration['wanted']}", "attention")
    for why in configuration.get("faults") or filter(None, [configuration["refused"]]):
        yield "", coloured(f"REFUSED: {why}", "Unhealthy")
    if configuration.get("unheard"):
        yield "", coloured(f"NOT WATCHED: {configuration['unheard']}", "Unhealthy")
    for why in configuration.get("without_effect", ()):
        yield "", coloured(f"WITHOUT EFFECT: {why}", "attention")
    yield "reloads", ", ".join(f"{count} {word}" for word, count in configuration["reloads"].items())
    strategy = status["device_list_strategy"]
    if strategy["used"]:
        yield "strategy", ", ".join(strategy["used"]) + (f" ({strategy['reason']})" if strategy["reason"] else "")
    cdi = status["cdi"]
    if cdi is not None:
        trouble = coloured(f"NO DEVICE CAN BE USED: {cdi['trouble']}", "Unhealthy") if cdi["trouble"] else ""
        yield "CDI", trouble or f"{counted(cdi['devices'], 'device')} in {cdi['directory']}"
        for complaint in cdi.get("complaints", ()):
            yield "", coloured(complaint, "attention")
    cluster = status.get("cluster")
    if cluster is not None:
        cordoned = (
            f", {counted(len(cluster['cordoned']), 'GPU')} cordoned by its annotation" if cluster["cordoned"] else ""
        )
        yield "cluster", f"node {cluster['node'] or 'not known'}{cordoned}"
        for trouble in cluster["trouble"]:
            yield "", coloured(trouble, "Unhealthy")


def _registrations(kubelet: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a line for the kubelet, and a line for each resource that is not registered."""
    if not kubelet["socket"]:
        yield "kubelet", "nothing is registered, because --kubelet-socket is empty"
        return
    registered = [each for each in kubelet["resources"].values() if each["registered"]]
    away = {name: each for name, each in kubelet["resources"].items() if not each["registered"]}
    if registered:
        latest = max(each["since"] for each in registered)
        yield "kubelet", f"registered at {kubelet['socket']} since {utc(latest)}"
    else:
        yield "kubelet", f"{kubelet['socket']}" + ("" if away else ": nothing to register yet")
    for name, each in away.items():
        lost = f" (lost {utc(each['since'])})" if each["since"] is not None else ""
        yield "", coloured(f"NOT REGISTERED: {name}: {each['why']}{lost}", "Unhealthy")


def _resource(counts: dict[str, Any]) -> str:
    """Return words for a resource's Healthy and Unhealthy devices, and for devices that are gone but still listed."""
    present = counts["devices"] - counts["retired"]
    text = f"{counts['healthy']} of {counted(present, 'device')} Healthy"
    if counts["sharing"]:
        text += f", shared by {' and '.join(counts['sharing'])}"
    if unhealthy := present - counts["healthy"]:
        text += f"; Unhealthy: {_some(counts['unhealthy_ids'], unhealthy)}"
    if counts["retired"]:
        text += f"; {counts['retired']} gone, listed until no pod holds them: {_some(counts['retired_ids'], counts['retired'])}"
    return text


def _some(ids: list[str], count: int) -> str:
    more = count - len(ids)
    return ", ".join(ids) + (f" and {more} more" if more > 0 else "")


def _gpus(gpus: list[dict[str, Any]], columns: int | None) -> Iterator[str]:
    """Yield a row for each GPU; below it the reasons why it is unfit or withheld, and notices."""
    head = ["GPU", "BUS ID", "MODEL", "STATE", "SINCE", "HELD BY"]
    rows = [head, *([*map(str, _cells(gpu))] for gpu in gpus)]
    held_by, since, model = head.index("HELD BY"), head.index("SINCE"), head.index("MODEL")
    widths = [max(map(len, column)) for at, column in enumerate(zip(*rows, strict=True)) if at != model]
    if columns is not None and sum(widths) + NARROWEST + 2 * len(widths) > columns:
        for cells, gpu in zip(rows[1:], gpus, strict=True):
            cells[held_by] = counted(len(gpu["holders"]), "pod") if gpu["holders"] else cells[held_by]
    shown = table(rows, columns, (model, since))
    yield shown[0]
    for gpu, row in zip(gpus, shown[1:], strict=True):
        state = _state(gpu)
        if state == "Healthy" and gpu["verdict"] == "OK":
            yield row
        else:
            yield coloured(row, "degraded" if state != gpu["health"] else state)
        for reason in (*gpu["reasons"], *(f"withheld: {why}" for why in gpu["withheld"])):
            yield from wrapped(f"     {reason}", "     ", columns)
        for notice in gpu.get("notices", ()):
            yield from wrapped(coloured(f"     note: {notice['found']}", "attention"), "     ", columns)
            yield from wrapped(f"     to do: {notice['remedy']}", "     ", columns)
        if gpu["reasons"] or gpu["withheld"]:
            yield f"     {gpu['uuid']}"
    if any(gpu["holders"] is None for gpu in gpus):
        yield ""
        yield from wrapped(
            "? The kubelet's PodResources service does not report the devices of pods; the log has the reason.",
            "  ",
            columns,
        )


def _cells(gpu: dict[str, Any]) -> tuple[object, ...]:
    holders = gpu["holders"]
    held_by = (
        "?"
        if holders is None
        else f"{holders[0]} and {len(holders) - 1} more"
        if len(holders or ()) > 1
        else "".join(holders)
    )
    since = "-" if gpu["since"] is None else utc(gpu["since"])
    return gpu["index"], gpu["bus_id"] or "-", gpu["model"] or "-", _state(gpu), since, held_by or "-"


def _state(gpu: dict[str, Any]) -> str:
    more = [
        word for word, applies in (("degraded", gpu["state"] == "degraded"), ("withheld", gpu["withheld"])) if applies
    ]
    return ", ".join([str(gpu["health"]), *more])
