"""`gpu-plugin cleanup`: removes the files that the daemon left on this node, and its marks on the Node."""

import os
import signal
import time
from pathlib import Path

import click

from gpu_plugin.cli.options import given_flags, refusal, settings_from, settings_without_file, with_hidden_options
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings

POLL_INTERVAL = 0.5  # seconds between two checks if the daemon has ended

# Seconds after which a daemon that no longer answers writes no more: it exits within a second of SIGTERM
LAST_WRITES = 2.0


@click.command(
    "cleanup",
    help="Remove what `gpu-plugin run` left on this node: its state, its CDI specifications, its sockets and its file of "
    "labels. For uninstalling. Before that, it takes condition, taint and labels of the Node back in the Kubernetes API, or "
    "says which command does: what stays there does not change the exit status, nor does a file of labels whose directory is not "
    "there (`left:`). "
    "Takes the options of `run` (--state-dir, --cdi-dir, --device-plugin-dir, --features-dir) and should be given the same. "
    "Containers that use a CDI specification cannot be restarted without it.",
)
@click.option("--mps", is_flag=True, help="What `gpu-plugin mps` left below --mps-root, instead.")
@click.option("--wait", is_flag=True, help="Wait for the daemon to end instead of refusing while it runs.")
@click.option("--stay", is_flag=True, hidden=True, help="Remove nothing, and stay until a signal ends it.")
@with_hidden_options
def command(mps: bool, wait: bool, stay: bool, **given: object) -> int:  # noqa: FBT001 - click passes it by keyword
    """Print a line for each removed path. The exit status is 1 if a file of this plugin remains."""
    if stay:
        from gpu_plugin.runtime.signals import STOP  # noqa: PLC0415 - usage and help do not need it

        signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
        signal.sigwait(STOP)
        return 0
    settings = _settings(given_flags(given))
    if mps and not settings.mps_root:
        raise click.UsageError("--mps: needs --mps-root")
    from gpu_plugin.cli.uninstall import mps_traces, node_marks, traces  # noqa: PLC0415 - --stay does not need it
    from gpu_plugin.mps.directories import root_here  # noqa: PLC0415
    from gpu_plugin.mps.readiness import supervised  # noqa: PLC0415

    state, sockets = Path(settings.state_dir), Path(settings.socket_dir)
    if wait:
        while supervised(root_here(settings.mps_root)) if mps else traces.running(state, sockets):
            time.sleep(POLL_INTERVAL)  # only a parent process is notified of the daemon's end
        time.sleep(LAST_WRITES)

    def take_back() -> None:
        for sentence in node_marks.take_back(state, settings.node_name, settings.kubeconfig):
            click.echo(sentence, err=True)

    if mps:
        done = mps_traces.remove_mps_traces(root_here(settings.mps_root))
    else:
        done = traces.remove_traces(state, Path(settings.cdi_dir), sockets, Path(settings.features_dir), take_back)
    for path in done.removed:
        click.echo(f"{path}: removed")
    for sentence in done.left:
        click.echo(f"not removed: {sentence}", err=True)
    for sentence in done.out_of_reach:
        click.echo(f"left: {sentence}", err=True)
    if not done.removed and not done.left and not done.out_of_reach:
        click.echo("nothing of gpu-plugin is on this node")
    return 1 if done.left else 0


def _settings(flags: dict[str, object]) -> Settings:
    """Return the settings. If the config file is missing or invalid, use flags and environment alone."""
    try:
        return settings_from(flags, os.environ)
    except ConfigError as error:
        try:
            settings = settings_without_file(flags, os.environ)
        except ConfigError:
            raise refusal(error) from None
        click.echo(f"using flags and environment only: {error}", err=True)
        return settings
