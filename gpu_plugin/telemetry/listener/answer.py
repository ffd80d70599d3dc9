"""HTTP requests and answers, as the pages use them."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

import msgspec

PLAIN = "text/plain; charset=utf-8"

EVENT_STREAM = "text/event-stream; charset=utf-8"
"""Server-sent events (html.spec.whatwg.org, 9.2)."""

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


class Stream(msgspec.Struct, frozen=True):
    """An answer that continues until the client or the server ends it. `chunks` yields its bytes when they become available.

    The stream ends if the client does not read a chunk within `Limits.send` seconds. The first chunk should have the complete
    content: after it, the connection is among the first to be closed if there are too many.
    """

    chunks: Callable[[], AsyncGenerator[bytes, None]]
    headers: Headers = ()


Page = Callable[[Request], Awaitable[Answer | Stream]]
"""Returns the answer to a request of one path. It never blocks; the listener cancels it after `Limits.answer` seconds."""
