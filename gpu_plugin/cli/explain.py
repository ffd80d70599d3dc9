"""`gpu-plugin explain`: prints the reasons of each GPU's state, their start, and the recovery."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from gpu_plugin.cli.output import (
    PROBLEM_FOUND,
    SUCCESS,
    coloured,
    displayable,
    output_options,
    structured,
    width,
    wrapped,
)
from gpu_plugin.cli.running_daemon import ask, gpus_option, state_dir_option
from gpu_plugin.config.times import duration, utc

_GRAVITY = ("FATAL", "DEGRADED", "APP", "OK")


@click.command(
    "explain",
    help="Why a GPU is in its state, since when, and what would clear it; those that are unfit come first.",
    epilog="Healthy or Unhealthy is the GPU's state for the kubelet: FATAL is Unhealthy; DEGRADED (worth a look), APP (an "
    "application's own error) and OK (nothing) are Healthy, and pods still get the GPU, unless it says why it is "
    "withheld: an MPS daemon that is down, or a CDI specification that is not written, say. Exit status 1 where a GPU that was "
    "asked for is Unhealthy or missing.",
)
@state_dir_option
@gpus_option
@output_options
def command(state_dir: Path, gpu: str | None, output: str) -> int:
    """Print the daemon's report of its GPUs."""
    reply = ask(state_dir, "explain", gpu)
    if output in ("json", "yaml"):
        click.echo(structured(reply, output))
    elif not reply["gpus"]:
        click.echo("no GPU is known yet: the driver does not work, or finds none; the daemon's log says which")
    else:
        now, columns = time.time(), width()
        ranked = sorted(displayable(reply["gpus"]), key=_rank)
        blocks = ["\n".join(lines(each, now, columns)) for each in ranked if _remarked(each)]
        others = "\n".join("\n".join(lines(each, now, columns)) for each in ranked if not _remarked(each))
        click.echo("\n\n".join([*blocks, *([others] if others else [])]))
    return PROBLEM_FOUND if any(each["health"] != "Healthy" for each in reply["gpus"]) else SUCCESS


def lines(gpu: dict[str, Any], now: float, columns: int | None = None) -> Iterator[str]:
    """Yield a GPU's state as text; `now` is Unix time in seconds, `columns` the greatest width of a line."""
    is_degraded = (gpu["health"], gpu["verdict"]) == ("Healthy", "DEGRADED")
    verdict = "" if gpu["verdict"] == "OK" else f", {'degraded' if is_degraded else gpu['verdict']}"
    index = "" if gpu["index"] is None else f" {gpu['index']}"  # a missing GPU has none
    named = "  ".join(filter(None, (f"GPU{index}", gpu.get("bus_id"), gpu["uuid"], gpu.get("model"))))
    head = (
        f"{named}  {coloured(gpu['health'] + verdict, gpu['health'] if gpu['verdict'] != 'DEGRADED' else 'degraded')}"
    )
    yield from wrapped(head, "    ", columns)
    for line in _details(gpu, now):
        yield from wrapped(line, " " * (12 if line.startswith("    ") else 4), columns)


def _details(gpu: dict[str, Any], now: float) -> Iterator[str]:
    for reason in gpu.get("withheld", ()):
        yield f"  withheld: {reason}"
    for notice in gpu.get("notices", ()):
        yield f"  note: {notice['found']}"
        yield f"    to do   {notice['remedy']}"
    for signal in gpu["signals"]:
        whose = f", MIG device {signal['device']}" if signal.get("device") else ""
        grade = f" ({signal['verdict']}{whose})" if signal.get("verdict") else ""
        yield f"  {signal['name']}{grade}: {signal['detail']}"
        if signal["since"] is not None:
            yield f"    since   {utc(signal['since'])}, for {duration(now - signal['since'], running=True)}"
        yield f"    clears  {signal['clears']}"
        if signal.get("action"):
            yield f"    to do   {signal['action']}"


def _remarked(gpu: dict[str, Any]) -> bool:
    """Return True if there is more than one line about the GPU."""
    return bool(gpu["signals"] or gpu.get("notices"))


def _rank(gpu: dict[str, Any]) -> tuple[bool, int]:
    """Return the sort key: unfit GPUs first, then worse verdicts first; an unknown verdict of another version comes last."""
    verdict = gpu["verdict"]
    return gpu["health"] == "Healthy", _GRAVITY.index(verdict) if verdict in _GRAVITY else len(_GRAVITY)
