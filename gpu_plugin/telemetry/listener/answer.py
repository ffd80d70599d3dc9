"""What an HTTP request asks for, and what it is answered."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

import msgspec

PLAIN = "text/plain; charset=utf-8"

EVENT_STREAM = "text/event-stream; charset=utf-8"
"""Server-sent events (html.spec.whatwg.org, 9.2)."""

Headers = tuple[tuple[str, str], ...]


class Request(msgspec.Struct, frozen=True):
    """A request as a page sees it.

    `headers` are by name in small letters; of a name that came several times the values are joined by commas, as RFC 9110, 5.3
    allows.
    """

    path: str = "/"
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)


class Answer(msgspec.Struct, frozen=True):
    """Status code, text, its content type, and what else the head says."""

    status: int
    text: str
    content_type: str = PLAIN
    headers: Headers = ()


class Stream(msgspec.Struct, frozen=True):
    """An answer that goes on until the client or the server ends it: `chunks` gives its bytes as they come.

    A chunk that the client does not take within `Limits.send` seconds ends it. The first one should hold all there is to say:
    from then on the connection is among the first to be closed where room is needed.
    """

    chunks: Callable[[], AsyncGenerator[bytes, None]]
    headers: Headers = ()


Page = Callable[[Request], Awaitable[Answer | Stream]]
"""Gives the answer to a request of one path. Never blocks; the listener gives it `Limits.answer` seconds."""
