"""The status page. It is only computed while a client reads it, and all clients get the same bytes.

    Source ──Material──▶ page_data ──▶ page_html ──▶ parts ──changed ones──▶ every stream
                              └──────▶ /status.json

Without readers nothing is computed or updated. A reader that was too slow for a change gets the newest version of all parts
instead, so nothing is stored for it. Answers never call NVML or read files.
"""

import json
import re
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from anyio.lowlevel import checkpoint

from gpu_plugin.kubelet.pod_listing import HoldersByDevice
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.threads import computed
from gpu_plugin.telemetry.listener.answer import Answer, Headers, Page, Request, Stream

if TYPE_CHECKING:
    from gpu_plugin.telemetry.listener.page_data import Material

FRESH = 1.0
"""Seconds for which a computed page is reused for other requests."""

TICK = 2.0
"""Seconds between two updates while there are readers, for values without notification such as temperatures."""

MIN_REST = 0.25
"""Shortest time in seconds between two updates, so that many events cause few updates."""

SHARE = 20
"""After an update, pause for this many times its duration: the page uses at most a twentieth of the event loop's time."""

HEARTBEAT = 10.0
"""Seconds between heartbeats to readers if nothing has changed. A page without one for 25 s shows that it is outdated."""

PODS_INTERVAL = 5.0
"""Seconds between two reads of the pods that hold devices. `PodAttribution` may keep the kubelet's answer for longer."""

HTML = "text/html; charset=utf-8"
JSON = "application/json"

ASSETS: Mapping[str, str] = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""The page's files in this package, and their types."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the page: only its own files, and no inline script or style."""

_ANOTHER_NAME = (
    "the status page is not shown under this name, which may be another site's: open it by IP address or as localhost, or "
    "allow the name with --status-page-hosts\n"
)

_CLOSED: Headers = (
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
)

_RECONNECT: Headers = (("Cache-Control", "no-store"), *_CLOSED)


_HOST = re.compile(r"(?P<host>\[[^]]*\]|[^:\[\]]*)(:\d*)?")
"""uri-host and port of a Host header (RFC 9110, 7.2)."""

LOCALHOST = "localhost"
"""Browsers and resolvers never query the domain name system for it (RFC 6761, 6.3)."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon's source of the page's content.

    `on` returns whether the page is enabled now, and `names` the names under which it may be shown in addition to localhost and
    addresses. `held` returns the containers that hold devices; None and the reason if that is not known. `material` returns
    the rest of the content for these holders. `news` rings after events that change the content.
    """

    on: Callable[[], bool]
    names: Callable[[], Collection[str]]
    held: Callable[[], Awaitable[tuple[HoldersByDevice | None, str]]]
    material: Callable[[HoldersByDevice | None, str], "Material"]
    news: Pulse


class StatusPage:
    """Answers with the page, its data, and the stream of its updates."""

    def __init__(self, awaited: Callable[[], str], wall: Callable[[], float] = time.time) -> None:
        """`awaited` returns why there is no daemon yet; `wall` returns Unix time in seconds. Reads the page's files."""
        self.awaited = awaited
        self.source: Source | None = None
        """The daemon's source; None before there is a daemon."""
        self._wall = wall
        folder = Path(__file__).parent / "page"
        self._assets = {name: (folder / name).read_text(encoding="utf-8") for name in ASSETS}
        self._tags = {name: sha256(text.encode()).hexdigest()[:16] for name, text in self._assets.items()}
        self._version_of_assets = sha256("".join(self._tags.values()).encode()).hexdigest()[:16]
        self._one_at_a_time = anyio.Lock()
        self._looked = float("-inf")
        self._at = 0.0
        self._held: tuple[HoldersByDevice | None, str] = None, ""
        self._data: Mapping[str, Any] = {}
        self._parts: Mapping[str, str] = {}
        self._topology: Mapping[str, Any] = {}
        self._links: tuple[Mapping[str, Any] | None, str] = None, ""
        """The result for that topology report: the links as data, and their picture."""
        self._version = 0
        self._changes = b""
        self._whole: tuple[int, bytes] = (0, b"")
        self._beats = 0
        self._beat = b""
        self._updated = Pulse()
        self._readers = 0
        self._wanted = Pulse()
        self._no_news = Pulse()

    @property
    def pages(self) -> Mapping[str, Page]:
        """The pages by path."""
        shown: Mapping[str, Page] = {
            "/": self._front,
            "/status.json": self._json,
            "/status.stream": self._stream,
            "/links.svg": self._picture,
        }
        return {
            **{path: partial(self._shown, page) for path, page in shown.items()},
            **{f"/{name}": self._asset for name in ASSETS},
        }

    async def run(self) -> None:
        """Update the content while there are readers. Never returns."""
        while True:
            while not self._readers:
                await self._wanted.wait()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._follow_pods)
                await self._follow()
                tasks.cancel_scope.cancel()
            self._whole, self._changes = (0, b""), b""  # frees some hundred KiB

    # Answers

    async def _shown(self, page: Page, request: Request) -> Answer | Stream:
        """Return the page, or an error if it is disabled or was requested by a name that may be another site's."""
        if self.source is not None and not self.source.on():
            return Answer(404, "the status page is disabled (--status-page=false)\n")
        if not known_host(request.headers.get("host", ""), self.source.names() if self.source is not None else ()):
            return Answer(403, _ANOTHER_NAME)
        return await page(request)

    async def _front(self, _: Request) -> Answer:
        from gpu_plugin.telemetry.listener.page_html import page  # noqa: PLC0415 - imported only if used

        await self._fresh()
        text = page(self._data, self._parts, self._at, self._version_of_assets)
        return Answer(200, text, HTML, (("Content-Security-Policy", POLICY), *_RECONNECT))

    async def _json(self, _: Request) -> Answer:
        await self._fresh()
        return Answer(200, json.dumps({"at": self._at, **self._data}) + "\n", JSON, _RECONNECT)

    async def _stream(self, _: Request) -> Stream:
        return Stream(self._chunks, headers=_RECONNECT)

    async def _picture(self, _: Request) -> Answer:
        await self._fresh()
        data, picture = self._links
        if data is None:
            return Answer(404, "no links between GPUs are known\n")
        from gpu_plugin.telemetry.listener.page_data import STYLE_HASH  # noqa: PLC0415 - imported only if used

        policy = ("Content-Security-Policy", f"default-src 'none'; style-src '{STYLE_HASH}'; frame-ancestors 'none'")
        return Answer(200, picture, ASSETS["icon.svg"], (policy, *_RECONNECT))

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

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the stream for one reader: the whole content, then changes, and a heartbeat if nothing changes."""
        self._readers += 1
        self._wanted.ring()
        try:
            await self._fresh()
            seen, beats = self._version, self._beats
            yield _event("hello", {"assets": self._version_of_assets, "at": self._wall()}) + self._everything()
            while self._on():
                if self._version != seen:
                    next_one = self._version == seen + 1
                    seen, beats = self._version, self._beats
                    yield self._changes if next_one else self._everything()
                elif self._beats != beats:
                    beats = self._beats
                    yield self._beat
                else:
                    await self._updated.wait()
        finally:
            self._readers -= 1

    def _on(self) -> bool:
        return self.source is None or self.source.on()

    # What is shown

    async def _fresh(self) -> None:
        """Update the content, unless it was updated within FRESH seconds."""
        async with self._one_at_a_time:
            if anyio.current_time() - self._looked < FRESH:
                return
            if self._looked == float("-inf"):  # import on a thread, or the kubelet's requests would wait for 20 ms
                await computed(import_module, "gpu_plugin.telemetry.listener.page_html", apart=True)
            if self.source is not None:
                self._held = await self.source.held()
            await self._look()

    async def _follow(self) -> None:
        beaten = anyio.current_time()
        while self._readers:
            async with self._one_at_a_time:
                began = time.perf_counter()
                await self._look()
                took = time.perf_counter() - began
            if anyio.current_time() - beaten >= HEARTBEAT or not self._on():
                beaten = anyio.current_time()
                self._beats, self._beat = self._beats + 1, _event("beat", {"at": self._wall()})
                self._updated.ring()
            await (self._no_news if self.source is None else self.source.news).wait(TICK)
            await anyio.sleep(max(MIN_REST, SHARE * took))

    async def _follow_pods(self) -> None:
        while True:
            if self.source is not None:
                self._held = await self.source.held()
            await anyio.sleep(PODS_INTERVAL)

    async def _look(self) -> None:
        """Compute the page from the present state, and wake readers if it has changed. Other tasks run between its parts."""
        from gpu_plugin.telemetry.listener.page_data import awaiting, page_data  # noqa: PLC0415 - imported only if used
        from gpu_plugin.telemetry.listener.page_html import PARTS  # noqa: PLC0415

        if self.source is None:
            data = awaiting(self.awaited())
        else:
            material = self.source.material(*self._held)
            await checkpoint()
            data = page_data(material, self._linked(material))
        now, at = anyio.current_time(), self._wall()
        if data == self._data:
            self._looked, self._at = now, at
            return
        filled = {}
        for name, made in PARTS.items():
            await checkpoint()
            filled[name] = made(data)
        changed = {name: text for name, text in filled.items() if text != self._parts.get(name)}
        # No await between these four assignments: a cancelled task must not leave only some of them done.
        self._data, self._parts, self._looked, self._at = data, filled, now, at
        if changed:
            self._version += 1
            self._changes = _event("parts", {"at": self._at, "parts": changed})
            self._updated.ring()

    def _linked(self, material: "Material") -> Mapping[str, Any] | None:
        """Return the links as data, computed again if the topology report has changed."""
        if material.topology != self._topology:
            from gpu_plugin.telemetry.listener.page_data import drawn, links  # noqa: PLC0415 - imported only if used

            data = links(material.topology)
            picture = drawn(material.topology, material.node) if data is not None else ""
            version = sha256(picture.encode()).hexdigest()[:16]
            self._topology = material.topology
            self._links = None if data is None else {**data, "version": version}, picture
        return self._links[0]

    def _everything(self) -> bytes:
        """Return all present parts, encoded once for all readers."""
        if self._whole[0] != self._version:
            self._whole = self._version, _event("parts", {"at": self._at, "parts": self._parts})
        return self._whole[1]


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return a server-sent event. Its JSON has no line break."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


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
