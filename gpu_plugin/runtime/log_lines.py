"""Many sentences of one change as one log line."""

import logging
from collections.abc import Sequence

MOST = 3
"""Sentences that a line holds."""


def log_together(log: logging.Logger, level: int, sentences: Sequence[str], resource: str = "") -> None:
    """Log sentences of one change as one line, the first few and how many more; if there are more, each at debug level.

    A line about a single resource has it as a field.
    """
    if not sentences:
        return
    more = len(sentences) - MOST
    shown = [*sentences[:MOST], *([f"and {more} more (at debug level)"] if more > 0 else [])]
    log.log(level, "%s", "; ".join(shown), extra={"resource": resource} if resource else None)
    for sentence in sentences if more > 0 else ():
        log.debug("%s", sentence)
