"""`gpu-plugin status`: what the running daemon serves, and under which configuration."""

import json
from pathlib import Path
from typing import Any

import click

from gpu_plugin.cli.running_daemon import ask, state_dir_option, utc
from gpu_plugin.telemetry.metrics import metrics


@click.command(
    "status", help="What the running daemon serves, and whether its configuration is the one that was asked for."
)
@state_dir_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@click.option("--metrics", "as_metrics", is_flag=True, help="Prometheus' text format, for a textfile collector.")
def command(state_dir: Path, as_json: bool, as_metrics: bool) -> int:  # noqa: FBT001 - click hands it over so
    """Prints the status; the exit status is 1 while a newer configuration is refused."""
    status = ask(state_dir, "status", None)
    if as_metrics:
        click.echo("\n".join(metrics(status)))
    else:
        click.echo(json.dumps(status, indent=2) if as_json else "\n".join(lines(status)))
    return 1 if status["configuration"]["refused"] else 0


def lines(status: dict[str, Any]) -> list[str]:
    """The status as text, a line a thing."""
    configuration = status["configuration"]
    shown = [f"configuration  {configuration['file'] or 'no file'}, in force since {utc(configuration['since'])}"]
    if configuration["refused"]:
        wanted = f" ({configuration['wanted']})" if configuration["wanted"] else ""
        shown.append(f"               REFUSED a newer one{wanted}: {configuration['refused']}")
    if configuration["unheard"]:
        shown.append(f"               {configuration['unheard']}")
    reloads = ", ".join(f"{count} {word}" for word, count in configuration["reloads"].items())
    shown.append(f"reloads        {reloads}")
    strategy = status["device_list_strategy"]
    because = f" ({strategy['reason']})" if strategy["reason"] else ""
    shown.append(f"strategy       {', '.join(strategy['used'])}{because}")
    cdi = status["cdi"]
    if cdi is not None:
        trouble = f"NO DEVICE CAN BE USED: {cdi['trouble']}" if cdi["trouble"] else ""
        written = f"{cdi['devices']} devices in {cdi['directory']}"
        shown.append(f"CDI            {trouble or written}")
    width = max((len(name) for name in status["resources"]), default=0)
    for name, counts in status["resources"].items():
        more = f", {counts['retired']} retired" if counts["retired"] else ""
        noun = "device" if counts["devices"] == 1 else "devices"
        how = f", shared by {' and '.join(counts['sharing'])}" if counts["sharing"] else ""
        shown.append(f"{name:<{width}}  {counts['healthy']} of {counts['devices']} {noun} healthy{more}{how}")
    if not status["resources"]:
        shown.append("no resource is served")
    return shown + [
        f"GPU {gpu['index']}  {gpu['state']}: {'; '.join(gpu['reasons'])}"
        for gpu in status["health"]["gpus"]
        if gpu["verdict"] != "OK"
    ]
