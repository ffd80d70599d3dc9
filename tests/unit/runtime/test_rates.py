import logging

from gpu_plugin.runtime.rates import BURST, REFILL_SECONDS, LogThrottle


def test_some_lines_at_once_then_few_and_how_many_are_missing_is_said():
    lines = LogThrottle()
    assert [lines.next(100.0) for _ in range(BURST)] == [(logging.WARNING, "")] * BURST
    assert [lines.next(100.0 + at / 100) for at in range(1000)] == [(logging.DEBUG, "")] * 1000
    assert lines.next(110.0 + REFILL_SECONDS) == (logging.WARNING, " (1000 more like this were not logged)")
    assert lines.next(110.0 + REFILL_SECONDS) == (logging.DEBUG, "")
    assert [level for level, _ in (lines.next(1e6) for _ in range(BURST + 1))] == [logging.WARNING] * BURST + [
        logging.DEBUG
    ]
