"""The status page: its files, the status as JSON, and the picture of the links. The browser renders the page.

    daemon ──Status──▶ /status.json ──every 2 s──▶ page.js

The status is built only on request, and one status is the answer to all requests within a second. Answers never call NVML or
read files.
"""

import re
import socket
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec

from gpu_plugin.runtime.threads import computed
from gpu_plugin.telemetry.listener.answer import Answer, Headers, Page, Request

if TYPE_CHECKING:
    from gpu_plugin.status.model import Status
    from gpu_plugin.telemetry.listener.listener import ServedDaemon

FRESH = 1.0  # seconds for which a status is reused for other requests

JSON = "application/json"

# The page's files in this package, and their types.
ASSETS: Mapping[str, str] = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}

# Content-Security-Policy of the page: only its own files, and no inline script or style.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_ANOTHER_NAME = (
    "the status page is not shown under this name, which may be another site's: open it by IP address or as localhost, or "
    "allow the name with --status-page-hosts\n"
)

_CLOSED: Headers = (
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
)

_NOT_STORED: Headers = (("Cache-Control", "no-store"), *_CLOSED)

_HOST = re.compile(r"(?P<host>\[[^]]*\]|[^:\[\]]*)(:\d*)?")  # uri-host and port of a Host header (RFC 9110, 7.2)

LOCALHOST = "localhost"  # browsers and resolvers never query the domain name system for it (RFC 6761, 6.3)


class StatusPage:
    """Answers with the page's files, the status, and the picture of the links."""

    def __init__(self, awaited: Callable[[], str]) -> None:
        """`awaited` returns why there is no daemon yet. Reads the page's files."""
        self._awaited = awaited
        self.source: ServedDaemon | None = None  # None before there is a daemon
        folder = Path(__file__).parent / "page"
        self._assets = {name: (folder / name).read_text(encoding="utf-8") for name in ASSETS}
        self._tags = {name: sha256(text.encode()).hexdigest()[:16] for name, text in self._assets.items()}
        self._one_at_a_time = anyio.Lock()
        self._built: tuple[float, ServedDaemon | None, Answer] | None = None

    @property
    def pages(self) -> Mapping[str, Page]:
        """The pages by path."""
        shown: Mapping[str, Page] = {"/": self._front, "/status.json": self._status, "/links.svg": self._picture}
        return {
            **{path: partial(self._shown, page) for path, page in shown.items()},
            **{f"/{name}": self._asset for name in ASSETS if name != "page.html"},
        }

    async def _shown(self, page: Page, request: Request) -> Answer:
        """Return the page, or an error if it is disabled or was requested by a name that may be another site's."""
        if self.source is not None and not self.source.page_is_on():
            return Answer(404, "the status page is disabled (--status-page=false)\n")
        names = self.source.page_names() if self.source is not None else ()
        if not known_host(request.headers.get("host", ""), names):
            return Answer(403, _ANOTHER_NAME)
        return await page(request)

    async def _front(self, _: Request) -> Answer:
        headers = (("Content-Security-Policy", POLICY), *_NOT_STORED)
        return Answer(200, self._assets["page.html"], ASSETS["page.html"], headers)

    async def _status(self, _: Request) -> Answer:
        """Return the status as JSON, the same to all requests within `FRESH` seconds."""
        async with self._one_at_a_time:
            if (
                self._built is None
                or self._built[1] is not self.source
                or anyio.current_time() - self._built[0] >= FRESH
            ):
                # Import on a thread, or the kubelet's requests would wait for 20 ms
                await computed(import_module, "gpu_plugin.status.problems", apart=True)
                text = msgspec.json.encode(await self._newest()).decode()
                self._built = anyio.current_time(), self.source, Answer(200, text, JSON, _NOT_STORED)
            return self._built[2]

    async def _newest(self) -> "Status":
        if self.source is not None:
            return await self.source.page_status()
        from gpu_plugin import __version__  # noqa: PLC0415 - only needed before there is a daemon
        from gpu_plugin.status.model import Process, Status  # noqa: PLC0415

        process = Process(version=__version__)
        headline = "Nothing is served yet"
        return Status(at=time.time(), headline=headline, daemon=process, waiting=self._awaited())

    async def _picture(self, _: Request) -> Answer:
        drawn = "" if self.source is None else self.source.links_picture()
        if not drawn:
            return Answer(404, "no links between GPUs are known\n")
        from gpu_plugin.status.links import STYLE_HASH  # noqa: PLC0415 - imported only if used

        policy = ("Content-Security-Policy", f"default-src 'none'; style-src '{STYLE_HASH}'; frame-ancestors 'none'")
        return Answer(200, drawn, ASSETS["icon.svg"], (policy, *_NOT_STORED))

    async def _asset(self, request: Request) -> Answer:
        name = request.path[1:]
        tag = f'"{self._tags[name]}"'
        headers = (
            ("ETag", tag),
            ("Cache-Control", "no-cache"),
            ("Content-Security-Policy", "default-src 'none'"),
            *_CLOSED,
        )
        if tag in request.headers.get("if-none-match", ""):
            return Answer(304, "", ASSETS[name], headers)
        return Answer(200, self._assets[name], ASSETS[name], headers)


def known_host(header: str, names: Collection[str]) -> bool:
    """Return whether a Host header names this node and cannot be another site's: an address, localhost, or one of `names`.

    A site can resolve its own name to an address of this node. Its scripts could then read the page in the browser of a user
    who can reach the node (DNS rebinding). But the browser's Host header has the site's name, which scripts cannot change.

    `names` are in lower case; `*.example.com` matches each name that ends in `.example.com`. A missing or empty header is
    accepted, since browsers always send it.
    """
    found = _HOST.fullmatch(header.strip())
    if found is None:
        return False
    host = found["host"]
    if host.startswith("["):
        return _is_address(socket.AF_INET6, host[1:-1].partition("%")[0])  # the zone is the peer's own (RFC 6874)
    name = host.lower().removesuffix(".")
    if not name or name == LOCALHOST or _is_address(socket.AF_INET, name):
        return True
    return name in names or any(each.startswith("*.") and name.endswith(each[1:]) for each in names)


def _is_address(family: int, text: str) -> bool:
    try:
        socket.inet_pton(family, text)
    except (OSError, ValueError):  # ValueError: the text is not ASCII
        return False
    return True
