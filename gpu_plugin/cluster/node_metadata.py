"""Follows labels and annotations of our own Node through the Kubernetes API: one watch, whoever follows something in it.

Only a Node's metadata is asked for, only this Node's, and nothing is ever written. One request lasts for minutes; the next goes
on where it ended, by bookmarks also where nothing has changed for long. lightkube has a watch of its own; it asks again
without a pause when a server ends the answer at once, and waits for ever for one that says nothing more.
"""

import logging
import random
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import anyio
import msgspec

from gpu_plugin.cluster.answers import (
    LONGEST_MESSAGE,
    METADATA,
    Metadata,
    Request,
    Status,
    ask,
    body,
    pieces,
)
from gpu_plugin.cluster.connection import ANSWER_TIMEOUT, UnreachableError, connect, keep_alive, require_client
from gpu_plugin.runtime.backoff import IN_CLUSTER, Backoff
from gpu_plugin.runtime.printable import excerpt

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger(__name__)

NODES: Final = "api/v1/nodes"

WATCH_SECONDS = 300
"""After so long at least, and twice as long at most, the API server is asked to end its answer, as client-go does: credentials
are replaced meanwhile, and nodes that began together do not end together."""

GRACE = 15.0
"""Seconds that it may be late with that."""

# Seconds before asking again: at first, at most, and how long it must have gone well to begin with the first again.
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 30.0
STABLE = 30.0

ANY: Final = "0"
"""The version of a watch that begins with the Node as the API server has it in its cache, told as if it were new. Without any
version it would have to be the newest, which API servers over an etcd before 3.4.25 cannot say (RequestWatchProgress)."""

_NEEDED: Final = "get and watch of nodes in the core API group"


class _Node(msgspec.Struct):
    metadata: Metadata


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


Told = Callable[[str | None], None]
"""Is called with a value, None where the Node has no such label or annotation: at once, and whenever it is another."""

Troubled = Callable[[str], object]
"""Is called with why the API cannot be asked, each time that an attempt fails, and with nothing once changes are heard again."""


class _Follower(msgspec.Struct, eq=False):
    """A follower of one value: what it is of the metadata, who is told, and the last one, once there was one."""

    pick: Callable[[Metadata], str | None]
    told: Told
    troubled: Troubled
    last: tuple[str | None, ...] = ()

    def tell(self, metadata: Metadata) -> None:
        value = self.pick(metadata)
        if (value,) != self.last:
            self.last = (value,)
            self.told(value)


class NodeMetadata:
    """The labels and annotations of one Node. Nobody follows: nothing is asked."""

    def __init__(self, node_name: str, kubeconfig: str = "") -> None:
        """`kubeconfig` is a path, empty for the pod's own service account."""
        self._node_name = node_name
        self._kubeconfig = kubeconfig
        self._followers: list[_Follower] = []
        self._one_watch = anyio.Lock()
        self._known: Metadata | None = None
        self._trouble: str | None = None
        self._version = ""
        self._said: set[str] = set()
        self._troubled = False
        self._missing = False
        self._following = False

    async def follow_label(self, name: str, told: Told, troubled: Troubled = lambda _: None) -> None:
        """Follows a label. Never returns.

        As long as the API cannot be asked, or knows no such Node, nothing is told, and why is said once; a Node that is removed
        keeps its labels until it comes back.

        Raises:
            ConfigError: lightkube is not installed.
        """
        await self._follow(_Follower(lambda metadata: (metadata.labels or {}).get(name), told, troubled))

    async def follow_annotation(self, name: str, told: Told) -> None:
        """Follows an annotation; as `follow_label`."""
        require_client("the annotation of the Node", "")
        await self._follow(_Follower(lambda metadata: (metadata.annotations or {}).get(name), told, lambda _: None))

    async def _follow(self, follower: _Follower) -> None:
        """Follows a value. The first follower watches for all of them; once it leaves, the next one does."""
        require_client()
        self._followers.append(follower)
        try:
            if self._known is not None and not self._missing:
                follower.tell(self._known)
            if self._trouble is not None:
                follower.troubled(self._trouble)
            async with self._one_watch:
                await self._run()
        finally:
            self._followers.remove(follower)
            if not self._followers:
                self._known, self._trouble, self._version = None, None, ""

    async def _run(self) -> None:
        import httpx2  # noqa: PLC0415 - as in connect
        from lightkube.core.exceptions import ConfigError as CredentialsError  # noqa: PLC0415

        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, IN_CLUSTER)
        while True:
            began = anyio.current_time()
            self._following = ended = False
            try:
                await self._follow_once()
                ended = True
            except UnreachableError as error:
                self._say(error.kind, str(error))
            except httpx2.HTTPError as error:
                if self._following:  # as when an API server restarts; whether it comes back will be seen
                    log.debug("the Kubernetes API ended its answer: %r", error)
                else:
                    text = excerpt(str(error) or repr(error))
                    self._say("connection", f"the Kubernetes API cannot be reached: {text}")
            except TimeoutError:
                if not self._following:
                    self._say("connection", f"the Kubernetes API did not answer within {ANSWER_TIMEOUT:g} s")
            except (OSError, ValueError, KeyError, RecursionError, msgspec.MsgspecError, CredentialsError) as error:
                self._say("answer", f"the Kubernetes API cannot be used: {excerpt(repr(error))}")
            if self._following and anyio.current_time() - began >= STABLE:
                backoff.succeeded()
                self._said.clear()
            if not ended:
                self._version = ""  # whatever was missed is read again
            pause = backoff.failed(anyio.current_time(), random.random())  # noqa: S311 - spreads retries, keeps no secret
            await anyio.sleep(pause)

    async def _follow_once(self) -> None:
        """Reads the Node, unless a watch can go on where the last one ended, then watches until the server ends its answer."""
        seconds = round(WATCH_SECONDS * (1 + random.random()))  # noqa: S311 - as above
        async with connect(self._kubeconfig) as client:
            if not self._version:
                await self._read(client)
            with anyio.fail_after(seconds + GRACE):
                await self._watch(client, seconds)

    async def _read(self, client: "httpx2.AsyncClient") -> None:
        request = Request("GET", f"{NODES}/{self._node_name}", METADATA, "get", _NEEDED)
        try:
            metadata = msgspec.json.decode(await ask(client, request), type=_Node).metadata
        except UnreachableError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            trouble = (
                f"the Kubernetes API knows no node {self._node_name}, so its labels are not known until it does: is --node-name "
                "(NODE_NAME) the pod's spec.nodeName?"
            )
            if not self._missing:
                log.warning("%s", trouble)
            self._missing = True
            self._tell_trouble(trouble)
        else:
            self._tell(metadata)
            self._version = metadata.resource_version

    async def _watch(self, client: "httpx2.AsyncClient", seconds: int) -> None:
        asked = {
            "fieldSelector": f"metadata.name={self._node_name}",
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
            "resourceVersion": self._version or ANY,
        }
        watch = Request("GET", NODES, METADATA, "watch", _NEEDED)
        request = client.build_request(
            watch.method, watch.path, params=asked, headers=dict(watch.headers), timeout=seconds + GRACE
        )
        with anyio.fail_after(ANSWER_TIMEOUT):
            response = await client.send(request, stream=True)
        try:
            if response.status_code == HTTPStatus.GONE:  # the Node has not changed for longer than changes are kept
                self._version = ANY
                return
            if response.status_code != HTTPStatus.OK:
                with anyio.fail_after(ANSWER_TIMEOUT):
                    raise watch.refused(response, await body(response))
            keep_alive(response)
            self._following = True
            if not self._missing:
                self._tell_trouble("")
            if self._troubled:
                self._troubled = False
                log.info("the Kubernetes API is followed again for the metadata of node %s", self._node_name)
            await self._hear(response)
        finally:
            await response.aclose()

    async def _hear(self, response: "httpx2.Response") -> None:
        rest = bytearray()
        async for piece in pieces(response):
            first, *others = piece.split(b"\n")
            rest += first
            for other in others:
                if not self._take(msgspec.json.decode(bytes(rest), type=_Event)):
                    return
                rest = bytearray(other)
            if len(rest) > LONGEST_MESSAGE:
                raise UnreachableError("length", f"an event is longer than {LONGEST_MESSAGE} bytes")

    def _take(self, event: _Event) -> bool:
        """Takes in an event. Returns whether more will come."""
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=Status)
            self._version = ANY
            if status.code != HTTPStatus.GONE:  # as above
                raise UnreachableError(
                    f"event {status.code}", f"the Kubernetes API ended its answer: {excerpt(status.message)}"
                )
            return False
        metadata = msgspec.json.decode(event.object, type=_Node).metadata
        if event.type in {"ADDED", "MODIFIED"}:
            self._tell(metadata)
        self._version = metadata.resource_version
        return True

    def _tell(self, metadata: Metadata) -> None:
        if self._missing:
            self._missing = False
            self._tell_trouble("")
        self._known = metadata
        for follower in tuple(self._followers):
            follower.tell(metadata)

    def _tell_trouble(self, text: str) -> None:
        self._trouble = text
        for follower in tuple(self._followers):
            follower.troubled(text)

    def _say(self, kind: str, text: str) -> None:
        """Logs a trouble once, until requests have succeeded again."""
        news = kind not in self._said
        self._said.add(kind)
        self._troubled |= news
        self._tell_trouble(text)
        level = logging.WARNING if news else logging.DEBUG
        log.log(level, "labels and annotations of node %s: %s; asking again", self._node_name, text)
