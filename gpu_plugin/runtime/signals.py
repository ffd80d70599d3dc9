"""The signals that operators and the kubelet steer a process by."""

import logging
import signal
from collections.abc import Callable

import anyio

log = logging.getLogger(__name__)

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
"""Each ends the process in order: the kubelet's, Ctrl-C and Ctrl-\\."""


async def told_to_stop(reload: Callable[[], object] | None = None) -> str:
    """Waits for a signal that ends the process, and gives its name. Until then, and no longer, they do nothing else.

    `reload` is called at each SIGHUP; where it is None, SIGHUP does what it does elsewhere.
    """
    with anyio.open_signal_receiver(*STOP, *([] if reload is None else [signal.SIGHUP])) as signals:
        async for number in signals:
            if number != signal.SIGHUP:
                log.info("%s: stopping", signal.Signals(number).name)
                return signal.Signals(number).name
            log.info("SIGHUP: reading the configuration again")
            assert reload is not None
            reload()
    raise AssertionError  # the receiver has no end of its own
