"""`gpu-plugin mps`: the MPS daemons of a node."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import click

from gpu_plugin.cli.options import Grouped, given_flags, refusal, settings_from, with_options
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings


@click.command(name="mps", cls=Grouped)
@with_options
@click.option(
    "--mps-control-binary",
    envvar="MPS_CONTROL_BINARY",
    metavar="FILE",
    help="the MPS control program [default: nvidia-cuda-mps-control in the driver root's usr/bin, then on the search path] "
    "[$MPS_CONTROL_BINARY]",
)
@click.option(
    "--mount-shm",
    is_flag=True,
    help="only mount a tmpfs of half the node's memory at shm in the MPS root, where none is mounted yet, and exit",
)
def command(mps_control_binary: str | None, mount_shm: bool, **given: object) -> int:  # noqa: FBT001
    """Run the MPS daemons of this node's shared GPUs until a signal ends it.

    Takes the options of `gpu-plugin run`, and should be given the same. Starts a daemon for each resource that the
    configuration shares by MPS, starts it again when it fails, and marks for the device plugin which daemons are up. Ends all
    daemons on SIGTERM, SIGINT or SIGQUIT; SIGHUP reads the configuration again, SIGUSR2 logs what the process does.

    Exit status 0 after such a signal; 1 without a driver or a GPU, or if a directory or a program is in the way; 2 for an
    invalid configuration, or a configuration that this node cannot serve.
    """
    flags = given_flags(given)
    try:
        settings = settings_from(flags, os.environ)
        if mount_shm and not settings.mps_root:
            raise ConfigError("--mount-shm: needs --mps-root")
        from gpu_plugin.telemetry import logs  # noqa: PLC0415 - usage and help do not need it

        logs.configure(settings.log_format, settings.log_level)
        if mount_shm:
            return _mount_shm(settings)

        from gpu_plugin.daemon import mps_service  # noqa: PLC0415
        from gpu_plugin.daemon.hardware import hardware_for  # noqa: PLC0415
        from gpu_plugin.telemetry.stacks import logged_on  # noqa: PLC0415

        with logged_on(signal.SIGUSR2):
            hardware = hardware_for(settings)
            return mps_service.run(
                settings,
                lambda path: settings_from(flags, os.environ, path),
                hardware.driver,
                hardware.host,
                lambda: _control(settings, mps_control_binary),
            )
    except ConfigError as error:
        raise refusal(error) from None


def _control(settings: Settings, binary: str | None) -> Sequence[str]:
    """Return the control program with its constant arguments. Raises MpsError if it is not found."""
    from gpu_plugin.mps import control_program  # noqa: PLC0415

    if binary:
        return (binary,)
    if settings.simulate:
        from gpu_plugin.simulation import mps_control  # noqa: PLC0415

        return mps_control.COMMAND
    roots = (settings.driver_root_ctr_path, settings.driver_root)
    return (control_program.find_program(roots, more=", or give its path with --mps-control-binary"),)


def _mount_shm(settings: Settings) -> int:
    from gpu_plugin.devices.mps_paths import shm_directory  # noqa: PLC0415
    from gpu_plugin.mps import directories  # noqa: PLC0415
    from gpu_plugin.mps.errors import MpsError  # noqa: PLC0415

    root = directories.root_here(settings.mps_root)
    shm, size = Path(shm_directory(str(root))), directories.half_of_memory()
    try:
        mounted = directories.mount_shm(shm, size)
    except MpsError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{shm}: {f'a tmpfs of {size // 2**20} MiB mounted' if mounted else 'mounted already'}")
    return 0
