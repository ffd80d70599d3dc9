"""`gpu-plugin status`: what the running daemon serves, and under which configuration."""

import json
import time
from pathlib import Path
from typing import Any

import click

from gpu_plugin import control
from gpu_plugin.config.settings import STATE_DIR


@click.command(
    "status", help="What the running daemon serves, and whether its configuration is the one that was asked for."
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    envvar="STATE_DIR",
    default=Path(STATE_DIR),
    show_default=True,
    show_envvar=True,
    help="The daemon's state directory.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@click.option("--metrics", "as_metrics", is_flag=True, help="Prometheus' text format, for a textfile collector.")
def command(state_dir: Path, as_json: bool, as_metrics: bool) -> int:  # noqa: FBT001 - click hands it over so
    """Prints the status; the exit status is 1 while a newer configuration is refused."""
    try:
        status = control.request(state_dir, "status")
    except control.ControlError as error:
        raise click.ClickException(str(error)) from None
    if as_metrics:
        click.echo("\n".join(metrics(status)))
    else:
        click.echo(json.dumps(status, indent=2) if as_json else "\n".join(lines(status)))
    return 1 if status["configuration"]["refused"] else 0


def metrics(status: dict[str, Any]) -> list[str]:
    """The status in Prometheus' text exposition format 0.0.4. Resource names and words hold nothing that it escapes."""
    shown = [
        "# HELP gpu_plugin_config_reloads_total Times the configuration was read, by what came of it.",
        "# TYPE gpu_plugin_config_reloads_total counter",
    ]
    for result, count in status["configuration"]["reloads"].items():
        shown.append(f'gpu_plugin_config_reloads_total{{result="{result}"}} {count}')
    shown += [
        "# HELP gpu_plugin_config_refused Whether the configuration that was asked for is not the one in force.",
        "# TYPE gpu_plugin_config_refused gauge",
        f"gpu_plugin_config_refused {int(bool(status['configuration']['refused']))}",
        "# HELP gpu_plugin_devices Devices listed to the kubelet, by resource and state.",
        "# TYPE gpu_plugin_devices gauge",
    ]
    for name, counts in status["resources"].items():
        unhealthy = counts["devices"] - counts["healthy"] - counts["retired"]
        for state, count in (("healthy", counts["healthy"]), ("unhealthy", unhealthy), ("retired", counts["retired"])):
            shown.append(f'gpu_plugin_devices{{resource="{name}",state="{state}"}} {count}')
    return shown


def lines(status: dict[str, Any]) -> list[str]:
    """The status as text, a line a thing."""
    configuration = status["configuration"]
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(configuration["since"]))
    shown = [f"configuration  {configuration['file'] or 'no file'}, in force since {since}"]
    if configuration["refused"]:
        shown.append(f"               REFUSED a newer one: {configuration['refused']}")
    reloads = ", ".join(f"{count} {word}" for word, count in configuration["reloads"].items())
    shown.append(f"reloads        {reloads}")
    width = max((len(name) for name in status["resources"]), default=0)
    for name, counts in status["resources"].items():
        more = f", {counts['retired']} retired" if counts["retired"] else ""
        how = f", shared by {' and '.join(counts['sharing'])}" if counts["sharing"] else ""
        shown.append(f"{name:<{width}}  {counts['healthy']} of {counts['devices']} devices healthy{more}{how}")
    return shown if status["resources"] else [*shown, "no resource is served"]
