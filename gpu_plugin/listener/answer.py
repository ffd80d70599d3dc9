"""What an HTTP request is answered."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

PLAIN = "text/plain; charset=utf-8"

METRICS = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text exposition format (prometheus.io/docs/instrumenting/exposition_formats)."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status code, text and its content type."""

    status: int
    text: str
    content_type: str = PLAIN


Page = Callable[[], Awaitable[Answer]]
"""Gives the answer to a request of one path. Never blocks; the listener gives it `Limits.answer` seconds."""
