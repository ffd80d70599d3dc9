"""The signals that operators and the kubelet steer a process by."""

import asyncio
import logging
import signal
from collections.abc import Callable

log = logging.getLogger(__name__)

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
"""Each ends the process in order: the kubelet's, Ctrl-C and Ctrl-\\."""


async def told_to_stop(reload: Callable[[], object] | None = None) -> str:
    """Waits for a signal that ends the process, and gives its name. Until then, they do nothing else.

    Further ones change nothing for as long as the event loop runs, so that none keeps the process from ending in order, unless
    `restore_default_actions` is called.
    `reload` is called at each SIGHUP; where it is None, SIGHUP does what it does elsewhere.
    """
    loop = asyncio.get_running_loop()
    heard: asyncio.Queue[signal.Signals] = asyncio.Queue()
    numbers = STOP if reload is None else (*STOP, signal.SIGHUP)
    name = ""
    # By the loop, not by anyio's receiver, which would give the signals their default actions back: the next one would kill.
    for number in numbers:
        loop.add_signal_handler(number, heard.put_nowait, number)
    try:
        while not name:
            number = await heard.get()
            if number in STOP:
                name = number.name
                log.info("%s: stopping", name)
            else:
                log.info("SIGHUP: reading the configuration again")
                assert reload is not None
                reload()
    finally:
        for number in numbers:
            if name:
                loop.add_signal_handler(number, log.info, "%s: stopping already", number.name)
            else:
                loop.remove_signal_handler(number)
    return name


def restore_default_actions() -> None:
    """Gives the signals of `STOP` their default actions back: what comes last and may hang on a disk can then be ended."""
    for number in STOP:
        asyncio.get_running_loop().remove_signal_handler(number)
