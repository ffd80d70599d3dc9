"""Follows one label of our own node through the Kubernetes API.

Only a node's metadata is asked for, only this node's, and nothing is ever written. lightkube has a watch of its own; it asks
again without a pause when a server ends the answer at once, and waits for ever for one that says nothing more.
"""

import logging
import random
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import anyio
import msgspec

from gpu_plugin.cluster.connection import ANSWER_TIMEOUT, UnreachableError, connect, keep_alive, require_client

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger(__name__)

__all__ = ["require_client", "watch_label"]

NODES = "api/v1/nodes"

_ACCEPT: Final = "application/json;as={};v=v1;g=meta.k8s.io,application/json"
"""Metadata alone: a whole Node with its images is a hundred times as long, and changes every few minutes."""

WATCH_SECONDS = 300
"""After so long the API server is asked to end its answer; then all is asked anew, which mends whatever was missed."""

GRACE = 15.0
"""Seconds that it may be late with that."""

LONGEST_MESSAGE = 4 * 1024 * 1024
"""Bytes of a list or an event; etcd holds no object above 1.5 MiB."""

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 30.0
STABLE = 30.0
"""Seconds before asking again: at first, at most, and how long it must have gone well to begin with the first again."""


class _Metadata(msgspec.Struct, rename="camel"):
    labels: dict[str, str] | None = None
    resource_version: str = ""


class _Node(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


class _Nodes(msgspec.Struct):
    metadata: _Metadata
    items: list[_Node] | None
    """None where there are none, which is how Go writes an empty list."""


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    """What the API server says instead of an answer (metav1.Status)."""

    code: int = 0
    message: str = ""


def _unheard(_: object) -> None:
    """Nobody wants to know."""


async def watch_label(
    node_name: str,
    label: str,
    kubeconfig: str,
    told: Callable[[str | None], None],
    troubled: Callable[[str], object] = _unheard,
) -> None:
    """Calls `told` with the label's value, None where the node has no such label: at once, and whenever it is another.

    Never returns. As long as the API cannot be asked, or knows no such node, nothing is told, and why is said once; a node that
    is removed keeps its label until it comes back. `kubeconfig` is a path, empty for the pod's own service account. `troubled`
    is called with why it cannot be asked, each time that an attempt fails, and with nothing once changes are heard again.

    Raises:
        ConfigError: lightkube is not installed.
    """
    require_client()
    await _LabelWatch(node_name, label, kubeconfig, told, troubled).run()


def pause(failures: int, dice: float) -> float:
    """Seconds until the next attempt after so many failures in a row, at least 1; `dice` in [0, 1) spreads a cluster's nodes."""
    return float(min(FIRST_PAUSE * 2.0 ** min(failures - 1, 16), LONGEST_PAUSE) * (0.5 + dice / 2))


class _LabelWatch:
    """What `watch_label` knows between two answers of the API."""

    def __init__(
        self,
        node_name: str,
        label: str,
        kubeconfig: str,
        told: Callable[[str | None], None],
        troubled: Callable[[str], object],
    ) -> None:
        self._node_name = node_name
        self._label = label
        self._kubeconfig = kubeconfig
        self._told = told
        self._troubling = troubled
        self._first = True
        self._value: str | None = None
        self._said: set[str] = set()
        self._troubled = False
        self._missing = False
        self._following = False

    async def run(self) -> None:
        import httpx2  # noqa: PLC0415 - as in connect
        from lightkube.core.exceptions import ConfigError as CredentialsError  # noqa: PLC0415

        failures = 0
        while True:
            began = anyio.current_time()
            self._following = False
            try:
                await self._follow_once()
            except UnreachableError as error:
                self._say(error.kind, str(error))
            except httpx2.HTTPError as error:
                if self._following:  # as when an API server restarts; whether it comes back will be seen
                    log.debug("the Kubernetes API ended its answer: %r", error)
                else:
                    self._say("connection", f"the Kubernetes API cannot be reached: {str(error) or repr(error)}")
            except TimeoutError:
                if not self._following:
                    self._say("connection", f"the Kubernetes API did not answer within {ANSWER_TIMEOUT:g} s")
            except (OSError, ValueError, KeyError, msgspec.MsgspecError, CredentialsError) as error:
                self._say("answer", f"the Kubernetes API cannot be used: {error!r}")
            if self._following and anyio.current_time() - began >= STABLE:
                failures = 0
                self._said.clear()
            failures += 1
            await anyio.sleep(pause(failures, random.random()))  # noqa: S311 - spreads retries, keeps no secret

    async def _follow_once(self) -> None:
        """Asks for the label, then hears of changes until the server ends its answer."""
        async with connect(self._kubeconfig) as client:
            with anyio.fail_after(ANSWER_TIMEOUT):
                version = await self._list(client)
            with anyio.fail_after(WATCH_SECONDS + GRACE):
                await self._watch(client, version)

    async def _list(self, client: "httpx2.AsyncClient") -> str:
        request = client.build_request("GET", NODES, params=self._asked(), headers=_accept("PartialObjectMetadataList"))
        response = await client.send(request, stream=True)
        try:
            await self._check(response, "list")
            nodes = msgspec.json.decode(await _body(response), type=_Nodes)
        finally:
            await response.aclose()
        if nodes.items:
            self._tell(nodes.items[0])
        else:
            trouble = (
                f"the Kubernetes API knows no node {self._node_name}, so its labels are not known until it does: is --node-name "
                "(NODE_NAME) the pod's spec.nodeName?"
            )
            if not self._missing:
                log.warning("%s", trouble)
            self._missing = True
            self._troubling(trouble)
        return nodes.metadata.resource_version

    async def _watch(self, client: "httpx2.AsyncClient", version: str) -> None:
        asked = self._asked() | {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(WATCH_SECONDS)}
        request = client.build_request(
            "GET", NODES, params=asked, headers=_accept("PartialObjectMetadata"), timeout=WATCH_SECONDS + GRACE
        )
        with anyio.fail_after(ANSWER_TIMEOUT):
            response = await client.send(request, stream=True)
        try:
            if response.status_code == HTTPStatus.GONE:  # the version is too old already, and a new list mends that
                return
            await self._check(response, "watch")
            keep_alive(response)
            self._following = True
            if not self._missing:
                self._troubling("")
            if self._troubled:
                self._troubled = False
                log.info("the Kubernetes API is followed again for the labels of node %s", self._node_name)
            rest = b""
            async for piece in response.aiter_bytes():
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if not self._take(msgspec.json.decode(line, type=_Event)):
                        return
                if len(rest) > LONGEST_MESSAGE:
                    raise UnreachableError("length", f"an event is longer than {LONGEST_MESSAGE} bytes")
        finally:
            await response.aclose()

    def _asked(self) -> dict[str, str]:
        return {"fieldSelector": f"metadata.name={self._node_name}"}

    def _take(self, event: _Event) -> bool:
        """Takes in an event. Returns whether more will come."""
        if event.type in {"ADDED", "MODIFIED"}:
            self._tell(msgspec.json.decode(event.object, type=_Node))
        elif event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            if status.code != HTTPStatus.GONE:  # as above
                raise UnreachableError(f"event {status.code}", f"the Kubernetes API ended its answer: {status.message}")
            return False
        return True

    def _tell(self, node: _Node) -> None:
        if self._missing:
            self._missing = False
            self._troubling("")
        value = (node.metadata.labels or {}).get(self._label)
        if self._first or value != self._value:
            self._first, self._value = False, value
            self._told(value)

    async def _check(self, response: "httpx2.Response", verb: str) -> None:
        """Raises UnreachableError for anything but a good answer."""
        code = response.status_code
        if code == HTTPStatus.OK:
            return
        try:
            message = msgspec.json.decode(await _body(response), type=_Status).message
        except (msgspec.MsgspecError, ValueError, RecursionError):  # text that is no UTF-8 is a ValueError
            message = ""
        says = f"the Kubernetes API answered {code}{': ' if message else ''}{message}"
        if code == HTTPStatus.UNAUTHORIZED:
            raise UnreachableError(
                "401",
                f"{says}; it does not accept our credentials: is the service account's token, or --kubeconfig, its?",
            )
        if code == HTTPStatus.FORBIDDEN:
            raise UnreachableError(
                f"403 {verb}",
                f"{says}; bind our service account to a ClusterRole that allows get, list and watch of nodes in the core API "
                "group",
            )
        raise UnreachableError(str(code), says)

    def _say(self, kind: str, text: str) -> None:
        """Says a trouble once, until things have gone well again."""
        news = kind not in self._said
        self._said.add(kind)
        self._troubled |= news
        self._troubling(text)
        log.log(
            logging.WARNING if news else logging.DEBUG,
            "label %s of node %s: %s; asking again",
            self._label,
            self._node_name,
            text,
        )


def _accept(kind: str) -> dict[str, str]:
    return {"Accept": _ACCEPT.format(kind)}


async def _body(response: "httpx2.Response") -> bytes:
    body = b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > LONGEST_MESSAGE:
            raise UnreachableError("length", f"the Kubernetes API's answer is longer than {LONGEST_MESSAGE} bytes")
    return body
