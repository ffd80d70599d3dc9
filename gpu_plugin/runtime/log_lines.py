"""Log lines of which few may be written: one for each change of a state, and one for many sentences of one change."""

import logging
from collections.abc import Sequence

MOST = 3  # sentences that a line holds


class LogOnChange:
    """Logs a trouble when its text changes, and once more when it has ended.

    Attributes:
        text: the present trouble; empty without trouble.
    """

    def __init__(
        self,
        log: "logging.Logger | logging.LoggerAdapter[logging.Logger]",
        line: str,
        over: str = "",
        level: int = logging.WARNING,
    ) -> None:
        """`line` has a place for the text. `over` is logged at info level when the trouble has ended, unless it is empty."""
        self.text = ""
        self._log = log
        self._line = line
        self._over = over
        self._level = level

    def update(self, text: str, *args: object, level: int = 0) -> bool:
        """Store the trouble, empty for its end, and return whether its text has changed.

        A new text is logged at `level`, or else at the level for all, and the same text at debug level. `args` are for further
        places of the line.
        """
        changed, self.text = text != self.text, text
        if text:
            self._log.log((level or self._level) if changed else logging.DEBUG, self._line, text, *args)
        elif changed and self._over:
            self._log.info(self._over)
        return changed


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
