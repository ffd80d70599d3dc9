"""`gpu-plugin status`: what the running daemon serves, and under which configuration."""

import json
from pathlib import Path
from typing import Any

import click

from gpu_plugin.cli.running_daemon import ask, state_dir_option, utc


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


def metrics(status: dict[str, Any]) -> list[str]:
    """The status in Prometheus' text exposition format 0.0.4. Names, uuids and words hold nothing that it escapes."""
    configuration, resources, health = status["configuration"], status["resources"], status["health"]
    return [
        *_metric(
            "gpu_plugin_config_reloads_total",
            "counter",
            "Times the configuration was read, by what came of it.",
            [({"result": result}, count) for result, count in configuration["reloads"].items()],
        ),
        *_metric(
            "gpu_plugin_config_refused",
            "gauge",
            "Whether the configuration that was asked for is not the one in force.",
            [({}, bool(configuration["refused"]))],
        ),
        *_metric(
            "gpu_plugin_cdi_ready",
            "gauge",
            "Whether CDI specifications are written that containers can be made with; only where they are told CDI names.",
            [({}, not status["cdi"]["trouble"])] if status["cdi"] is not None else [],
        ),
        *_metric(
            "gpu_plugin_devices",
            "gauge",
            "Devices listed to the kubelet, by resource and state.",
            [
                ({"resource": name, "state": state}, count)
                for name, counts in resources.items()
                for state, count in (
                    ("healthy", counts["healthy"]),
                    ("unhealthy", counts["devices"] - counts["healthy"] - counts["retired"]),
                    ("retired", counts["retired"]),
                )
            ],
        ),
        *_metric(
            "gpu_plugin_gpu_health",
            "gauge",
            "The state that each GPU is in (1) and those it is not in (0). One of whose MIG devices is bad is degraded.",
            [
                ({"uuid": gpu["uuid"], "state": state}, state == gpu["state"])
                for gpu in health["gpus"]
                for state in ("healthy", "degraded", "unhealthy")
            ],
        ),
        *_metric(
            "gpu_plugin_health_transitions_total",
            "counter",
            "Changes of verdict, by GPU, signal and the verdict it came to.",
            [
                ({"uuid": each["uuid"], "signal": each["signal"], "verdict": each["verdict"].lower()}, each["total"])
                for each in health["transitions"]
            ],
        ),
        *_metric(
            "gpu_plugin_xid_errors_total",
            "counter",
            "Xid errors, by GPU, number and class in the Xid policy.",
            [
                ({"uuid": each["uuid"], "xid": each["xid"], "class": each["class"]}, each["total"])
                for each in health["xids"]
            ],
        ),
        *_metric(
            "gpu_plugin_health_signal_supported",
            "gauge",
            "Whether a GPU tells what a health signal needs.",
            [
                ({"uuid": uuid, "signal": signal}, supported)
                for uuid, signals in health["supported"].items()
                for signal, supported in signals.items()
            ],
        ),
    ]


def _metric(name: str, kind: str, text: str, samples: list[tuple[dict[str, object], int]]) -> list[str]:
    shown = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        told = ",".join(f'{label}="{said}"' for label, said in labels.items())
        shown.append(f"{name}{{{told}}} {int(value)}" if told else f"{name} {int(value)}")
    return shown


def lines(status: dict[str, Any]) -> list[str]:
    """The status as text, a line a thing."""
    configuration = status["configuration"]
    shown = [f"configuration  {configuration['file'] or 'no file'}, in force since {utc(configuration['since'])}"]
    if configuration["refused"]:
        shown.append(f"               REFUSED a newer one: {configuration['refused']}")
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
