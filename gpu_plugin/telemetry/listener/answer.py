"""HTTP requests and answers, as the pages use them."""

from collections.abc import Awaitable, Callable, Mapping

import msgspec

Headers = tuple[tuple[str, str], ...]


class Request(msgspec.Struct, frozen=True):
    """A request to a page. `headers` are by name in lower case, and several values of a name are joined by commas."""

    path: str = "/"
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)


class Answer(msgspec.Struct, frozen=True):
    """Status code, text, content type, and further headers."""

    status: int
    text: str
    content_type: str = "text/plain; charset=utf-8"
    headers: Headers = ()


# Returns the answer to a request of one path. It never blocks; the server cancels it after `Limits.step` seconds.
Page = Callable[[Request], Awaitable[Answer]]
