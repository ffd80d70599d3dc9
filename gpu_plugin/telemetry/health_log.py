"""What the log says of health: one line for a change of verdict, one a minute for what applications do to themselves."""

import logging
import time

from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.ledger import Transition
from gpu_plugin.health.xids import describe

log = logging.getLogger(__name__)

REPEAT_LOG = 60.0
"""Seconds between two lines that say the same."""


def tell(change: Transition) -> None:
    """One log line for a change of verdict."""
    if change.verdict is Verdict.OK:
        log.warning("GPU %s: %s is over: %s", change.uuid, change.signal, change.detail)
    else:
        log.error("GPU %s is not fit for use: %s", change.uuid, change.detail)


class ApplicationXids:
    """Says an application's Xid once a minute for each GPU and Xid, with how many there were: a failing pod raises hundreds."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, int], tuple[float, int]] = {}

    def count(self, uuid: str, xid: int) -> None:
        """Takes in one of them."""
        now = time.monotonic()
        said, since = self._said.get((uuid, xid), (float("-inf"), 0))
        if now - said < REPEAT_LOG:
            self._said[uuid, xid] = said, since + 1
            return
        self._said[uuid, xid] = now, 0
        more = f" ({since} more since this was last said)" if since else ""
        log.info("GPU %s: %s is an application's own error; the GPU stays as it is%s", uuid, describe(xid), more)
