"""The labels and annotations of our own Node in the Kubernetes API, with one watch for all readers.

The watch requests only the metadata of this Node, and never writes. A request lasts for minutes, and the next request continues
where the former request ended. Bookmarks make this possible also if the Node has not changed for long.
"""

import logging
import random
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec

from gpu_plugin.cluster.connection import Connection, UnreachableError, connect, keep_alive
from gpu_plugin.runtime.backoff import IN_CLUSTER, Backoff
from gpu_plugin.runtime.printable import excerpt
from gpu_plugin.runtime.pulse import Pulse

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger(__name__)

NODES: Final = "api/v1/nodes"

# The shortest seconds of a watch request; the longest are twice as many, as in client-go. The API server ends the answer then.
# The limit exists because credentials are replaced; the random length keeps the nodes' requests from ending together.
WATCH_SECONDS = 300
GRACE = 15.0  # seconds after which the request is cancelled if the API server has not ended its answer in time

LONGEST_EVENT = 4 * 1024 * 1024  # bytes; etcd stores no object above 1.5 MiB

# Seconds before the next attempt: at first, and at most. A watch that has worked for STABLE seconds resets the pause.
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 30.0
STABLE = 30.0

# The resource version of a watch that begins with the Node from the API server's cache, sent as an ADDED event. Without a
# version, the API server would have to send the newest Node, which it cannot with an etcd before 3.4.25 (RequestWatchProgress).
ANY: Final = "0"


class _Metadata(msgspec.Struct):
    resourceVersion: str = ""  # noqa: N815 - lightkube reads it
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _Node(msgspec.Struct):
    metadata: _Metadata


class NodeMetadata:
    """The labels and annotations of one Node, which are followed while a task is in `run`.

    Attributes:
        labels: the Node's labels; None if they are not known yet. If the Node is removed, they stay until the Node exists again.
        annotations: the Node's annotations, known together with its labels.
        trouble: why changes do not arrive; empty if they arrive, None before the first answer or failure.
        changed: rings after each change of these values.
    """

    def __init__(self, node_name: str, kubeconfig: str = "") -> None:
        """`kubeconfig` is a path; empty to use the pod's own service account."""
        self.labels: Mapping[str, str] | None = None
        self.annotations: Mapping[str, str] = {}
        self.trouble: str | None = None
        self.changed = Pulse()
        self._node_name = node_name
        self._kubeconfig = kubeconfig
        self._tasks = 0
        self._one_watch = anyio.Lock()
        self._version = ""
        self._logged: set[str] = set()
        self._troubled = False
        self._missing = False
        self._following = False

    async def run(self) -> None:
        """Keep the attributes up to date. Never returns. Each kind of trouble is logged once.

        Several tasks may call it: the first task runs the watch, and when it is cancelled, the next task does.
        """
        self._tasks += 1
        try:
            async with self._one_watch:
                await self._run()
        finally:
            self._tasks -= 1
            if not self._tasks:
                self.labels, self.trouble, self._version = None, None, ""

    async def _run(self) -> None:
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, IN_CLUSTER)
        while True:
            began = anyio.current_time()
            self._following = False
            try:
                await self._follow_once()
            except UnreachableError as error:
                self._version = ""  # read the Node again, since changes may have been missed
                self._log_trouble(error.kind, str(error))
            if self._following and anyio.current_time() - began >= STABLE:
                backoff.succeeded()
                self._logged.clear()
            pause = backoff.failed(anyio.current_time(), random.random())  # noqa: S311 - spreads retries, keeps no secret
            await anyio.sleep(pause)

    async def _follow_once(self) -> None:
        """Watch the Node until the server ends its answer. Read the Node first if the watch cannot continue the last watch."""
        seconds = round(WATCH_SECONDS * (1 + random.random()))  # noqa: S311 - as above
        async with connect(self._kubeconfig) as server:
            if not self._version:
                await self._read(server)
            await self._watch(server, seconds)

    async def _read(self, server: Connection) -> None:
        try:
            metadata = (await server.ask("GET", f"{NODES}/{self._node_name}", _Node)).metadata
        except UnreachableError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            trouble = (
                f"the Kubernetes API has no node {self._node_name}, so its labels are not known: is --node-name (NODE_NAME) the "
                "pod's spec.nodeName?"
            )
            if not self._missing:
                log.warning("%s", trouble)
            self._missing = True
            self._publish_trouble(trouble)
        else:
            self._publish(metadata)
            self._version = metadata.resourceVersion

    async def _watch(self, server: Connection, seconds: int) -> None:
        from lightkube.core.generic_client import BasicRequest, WatchDriver  # noqa: PLC0415 - as in connect

        query = {
            "fieldSelector": f"metadata.name={self._node_name}",
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
            "resourceVersion": self._version or ANY,
        }
        # lightkube's loop around the driver is not used: it sends the next request at once and with the first credentials.
        kind: Any = _Node  # any struct serves, and the driver's methods have no types
        driver: Any = WatchDriver(BasicRequest("GET", NODES, kind, query), server.client.build_request)
        try:
            response = await server.send(driver.get_request(timeout=seconds + GRACE), stream=True)
        except UnreachableError as error:
            if error.code != HTTPStatus.GONE:
                raise
            self._version = ANY  # the API server no longer stores the changes since this version
            return
        try:
            keep_alive(response)
            self._following = True
            if not self._missing:
                self._publish_trouble("")
            if self._troubled:
                self._troubled = False
                log.info("the Kubernetes API is followed again for the metadata of node %s", self._node_name)
            await self._read_events(driver, response, seconds + GRACE)
        finally:
            await response.aclose()

    async def _read_events(self, driver: Any, response: "httpx2.Response", seconds: float) -> None:
        """Apply the events of the watch for at most `seconds`. Raises UnreachableError for an error of the server."""
        import httpx2  # noqa: PLC0415 - as in connect
        from lightkube.core.exceptions import ApiError  # noqa: PLC0415

        try:
            with anyio.fail_after(seconds):
                rest = b""
                # Not `aiter_lines`: it also ends a line at U+0085, which JSON may contain.
                async for piece in response.aiter_bytes():
                    *lines, rest = (rest + piece).split(b"\n")
                    if len(rest) > LONGEST_EVENT:
                        raise UnreachableError("length", f"an event is longer than {LONGEST_EVENT} bytes")
                    for line in lines:
                        kind, node = driver.process_one_line(line)
                        if kind in {"ADDED", "MODIFIED"}:
                            self._publish(node.metadata)
                        self._version = node.metadata.resourceVersion
        except ApiError as error:
            self._version = ANY
            if error.status.code != HTTPStatus.GONE:  # as above
                text = f"the Kubernetes API ended its answer: {excerpt(error.status.message or '')}"
                raise UnreachableError(f"event {error.status.code}", text) from None
        except (httpx2.HTTPError, OSError) as error:  # for example a restart; the next attempt reports an outage
            log.debug("the Kubernetes API ended its answer: %r", error)
            self._version = ""
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            text = f"the Kubernetes API cannot be used: {excerpt(repr(error))}"
            raise UnreachableError("answer", text) from None

    def _publish(self, metadata: _Metadata) -> None:
        self.labels, self.annotations = metadata.labels, metadata.annotations
        if self._missing:
            self._missing, self.trouble = False, ""
        self.changed.ring()

    def _publish_trouble(self, text: str) -> None:
        self.trouble = text
        self.changed.ring()

    def _log_trouble(self, kind: str, text: str) -> None:
        """Log each kind of trouble once as a warning, until a watch has worked for STABLE seconds."""
        is_new = kind not in self._logged
        self._logged.add(kind)
        self._troubled |= is_new
        self._publish_trouble(text)
        level = logging.WARNING if is_new else logging.DEBUG
        log.log(level, "labels and annotations of node %s: %s; trying again", self._node_name, text)
