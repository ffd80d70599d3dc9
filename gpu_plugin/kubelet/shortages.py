"""What asyncio says when connections cannot be taken for lack of descriptors: a line now and then instead of thousands.

It tries 100 times a second, and has a traceback for each (asyncio.selector_events, _accept_connection).
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

EPISODE = 60.0
"""Seconds without such a failure after which the next one is news."""

OUT_OF_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""What calls fail with where the process or the machine lacks something: the other end has no part in it."""

Handler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]


class Shortages:
    """An event loop's exception handler, before the one that there was."""

    def __init__(self, before: Handler | None) -> None:
        self._before = before
        self._last: dict[str, float] = {}

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Says what went wrong in the loop, as asyncio calls it."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES and "socket" in context:
            now, where = loop.time(), _address(context["socket"])
            recent = {at: last for at, last in self._last.items() if now - last < EPISODE}
            level = logging.DEBUG if where in recent else logging.ERROR
            self._last = recent | {where: now}
            log.log(level, "connections to %s wait: %s", where, error.strerror)
        elif self._before is not None:
            self._before(loop, context)
        else:
            loop.default_exception_handler(context)


def _address(listener: socket.socket) -> str:
    """What a listening socket is bound to, in words."""
    try:
        bound = listener.getsockname()
    except OSError:
        bound = ""
    return f"{bound[0]}:{bound[1]}" if isinstance(bound, tuple) else bound or "a socket without a name"


def watch(loop: asyncio.AbstractEventLoop) -> None:
    """Has an event loop say it so; once is enough."""
    before = loop.get_exception_handler()
    if not isinstance(before, Shortages):
        loop.set_exception_handler(Shortages(before))
