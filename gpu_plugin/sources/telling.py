"""Says which settings are in force: a line at the start and after every change, and all of them for debugging."""

import json
import logging
from pathlib import Path

from gpu_plugin.config.differing import differing
from gpu_plugin.config.settings import Settings

log = logging.getLogger(__name__)

LONGEST = 2000
"""Characters of the line: a list of thousands of GPUs is left to the debugging."""


def tell_settings(settings: Settings, file: Path | None) -> None:
    """Says the file, what of the settings is not the default, and what of the file deserves a word."""
    asked = "; ".join(differing(settings)) or "nothing but defaults"
    shown = asked if len(asked) <= LONGEST else f"{asked[: LONGEST - 3]}..."
    log.info("configuration: %s: %s", file or "no file", shown)
    if log.isEnabledFor(logging.DEBUG):
        from gpu_plugin.config.written import written  # noqa: PLC0415 - it needs the file's schema, which takes a while

        log.debug("configuration: in full: %s", json.dumps(written(settings)))
    tell_remarks(settings)


def tell_remarks(settings: Settings) -> None:
    """Says what of the file deserves a word though nothing is wrong with it."""
    for remark in settings.remarks:
        log.info("configuration: %s", remark)
