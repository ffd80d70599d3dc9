"""The signals that operators and the kubelet steer a process by."""

import asyncio
import logging
import signal
from collections.abc import Callable

log = logging.getLogger(__name__)

# Each ends the process in order: the kubelet's, Ctrl-C and Ctrl-\.
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


class Signals:
    """The signals that stop this process, or have its configuration read again, until its event loop ends.

    Their handlers stay until then. The kernel drops a signal for which PID 1 of a container has no handler, and a
    further signal must not keep a process from ending in order.

    Attributes:
        stopped_by: the name of the first signal that stops the process; empty before it.
    """

    def __init__(self, *, reloads: bool = True) -> None:
        """Install the handlers in the running event loop. Without `reloads`, SIGHUP keeps its action."""
        self.stopped_by = ""
        self._stop: Callable[[], object] | None = None
        self._reload: Callable[[], object] | None = None
        self._reload_pending = False
        # By the loop, not by anyio's receiver, which would restore the default actions: the next signal would kill.
        for number in (*STOP, signal.SIGHUP) if reloads else STOP:
            asyncio.get_running_loop().add_signal_handler(number, self._received, number)

    def on_stop(self, stop: Callable[[], object]) -> None:
        """Have `stop` called, in place of the callback of before, at the first signal of `STOP`; at once if it came already."""
        self._stop = stop
        if self.stopped_by:
            stop()

    def on_reload(self, reload: Callable[[], object]) -> None:
        """Have `reload` called, in place of the callback of before, at each SIGHUP; at once if a SIGHUP came already."""
        self._reload = reload
        if self._reload_pending:
            self._reload_pending = False
            reload()

    def _received(self, number: signal.Signals) -> None:
        if self.stopped_by:
            log.info("%s: stopping already", number.name)
        elif number in STOP:
            log.info("%s: stopping", number.name)
            self.stopped_by = number.name
            if self._stop is not None:
                self._stop()
        else:
            log.info("SIGHUP: reading the configuration again")
            if self._reload is None:
                self._reload_pending = True
            else:
                self._reload()
