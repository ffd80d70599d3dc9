"""Log lines about changes, and limits on their number."""

import logging

from gpu_plugin.runtime.log_lines import LogOnChange
from gpu_plugin.runtime.rates import BURST, REFILL_SECONDS, LogThrottle

log = logging.getLogger("gpu_plugin.test")


def test_a_trouble_is_logged_when_its_text_changes_and_when_it_ends(caplog):
    caplog.set_level(logging.DEBUG, log.name)
    trouble = LogOnChange(log, "cannot read: %s (attempt %d)", over="reading works again")
    texts = ["", "no disk", "no disk", "no file", "", ""]
    assert [trouble.update(text, at) for at, text in enumerate(texts)] == [False, True, False, True, True, False]
    assert trouble.update("no right", 6, level=logging.ERROR)
    assert trouble.text == "no right"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "cannot read: no disk (attempt 1)"),
        ("DEBUG", "cannot read: no disk (attempt 2)"),
        ("WARNING", "cannot read: no file (attempt 3)"),
        ("INFO", "reading works again"),
        ("ERROR", "cannot read: no right (attempt 6)"),
    ]


def test_a_trouble_without_a_line_for_its_end_ends_silently(caplog):
    trouble = LogOnChange(log, "%s", level=logging.ERROR)
    trouble.update("no disk")
    trouble.update("")
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_throttle_lets_some_lines_through_at_once_then_few_and_counts_the_others():
    lines = LogThrottle()
    assert [lines.next(100.0) for _ in range(BURST)] == [(logging.WARNING, "")] * BURST
    assert [lines.next(100.0 + at / 100) for at in range(1000)] == [(logging.DEBUG, "")] * 1000
    assert lines.next(110.0 + REFILL_SECONDS) == (logging.WARNING, " (1000 more like this were not logged)")
    assert lines.next(110.0 + REFILL_SECONDS) == (logging.DEBUG, "")
    assert [level for level, _ in (lines.next(1e6) for _ in range(BURST + 1))] == [logging.WARNING] * BURST + [
        logging.DEBUG
    ]
