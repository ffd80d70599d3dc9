"""HTTP requests and answers, as the pages use them."""

from collections.abc import Awaitable, Callable, Mapping

import msgspec

PLAIN = "text/plain; charset=utf-8"

Headers = tuple[tuple[str, str], ...]


class Request(msgspec.Struct, frozen=True):
    """A request to a page.

    `headers` are by name in lower case. If a name occurs several times, its values are joined by commas, as RFC 9110, 5.3
    allows.
    """

    path: str = "/"
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)


class Answer(msgspec.Struct, frozen=True):
    """Status code, text, content type, and further headers."""

    status: int
    text: str
    content_type: str = PLAIN
    headers: Headers = ()


Page = Callable[[Request], Awaitable[Answer]]
"""Returns the answer to a request of one path. It never blocks; the listener cancels it after `Limits.answer` seconds."""
