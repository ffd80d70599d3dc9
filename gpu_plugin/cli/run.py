"""`gpu-plugin run`: the daemon."""

import ctypes
import gc
import os
import signal
from collections.abc import Mapping

import click

from gpu_plugin.cli.options import Grouped, given_flags, refusal, settings_from, with_options
from gpu_plugin.config.errors import ConfigError

# Parameters of mallopt(3), as glibc's malloc.h numbers them
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8

_LARGE = 300_000
"""Bytes from which on a freed block is returned to the system. It is more than asyncio's read buffer (256 KiB), which would
otherwise be mapped again for each request."""

_SLACK = 1024 * 1024  # free bytes at the end of the heap that are kept, to save a system call for each request


@click.command(name="run", cls=Grouped)
@with_options
def command(**given: object) -> int:
    """Serve this node's GPUs to its kubelet until a signal ends it.

    Flags win over environment variables, those over the config file. Ends on SIGTERM, SIGINT or SIGQUIT; SIGHUP
    reads the configuration again, SIGUSR2 logs what the process does. A DURATION is a number and a unit, such as 500ms, 30s, 5m
    or 24h.

    Exit status 0 after such a signal; 1 without a driver or a GPU; 2 for an invalid configuration, or a configuration that
    this node cannot serve.
    """
    keep_small(os.environ)
    flags = given_flags(given)
    try:
        settings = settings_from(flags, os.environ)
        gc.disable()  # modules are no garbage, and scanning them takes 30 ms of the start
        from gpu_plugin.daemon import process as daemon  # noqa: PLC0415 - usage and help do not need it
        from gpu_plugin.telemetry import logs  # noqa: PLC0415
        from gpu_plugin.telemetry.stacks import logged_on  # noqa: PLC0415

        gc.freeze()  # later collections leave them out, too: a scan would block the event loop for 20 ms
        gc.enable()
        logs.configure(settings.log_format, settings.log_level)
        with logged_on(signal.SIGUSR2):
            return daemon.run(settings, lambda path: settings_from(flags, os.environ, path))
    except ConfigError as error:  # also of an import: a health signal without its function
        raise refusal(error) from None


def keep_small(environ: Mapping[str, str]) -> None:
    """Have all threads use the same heap, and free large blocks to the system. This saves 3 MiB with 8 GPUs and their threads.

    Only one thread at a time runs Python, so no thread waits for the shared heap. Nothing is changed if the environment
    configures the allocator (mallopt(3)), or if the C library does not have mallopt.
    """
    if "GLIBC_TUNABLES" in environ or any(name.startswith("MALLOC_") for name in environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGE), (_TRIM_THRESHOLD, _SLACK)):
            mallopt(parameter, value)
