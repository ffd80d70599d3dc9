"""What the Kubernetes API is asked and answers, read with bounds, and what its refusals mean for people."""

import json
import zlib
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import msgspec

from gpu_plugin.cluster.connection import ANSWER_TIMEOUT, UnreachableError
from gpu_plugin.runtime.printable import excerpt

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

METADATA: Final = {"Accept": "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io,application/json"}
"""The header that asks for metadata alone, of answers to changes, too: a whole Node with its images is some ten times as long."""

LONGEST_MESSAGE = 4 * 1024 * 1024
"""Bytes of an object, a list or an event of a watch; etcd holds no object above 1.5 MiB."""

LONGEST_PIECE = 64 * 1024
"""Bytes that are unpacked at once: a few packed ones may be a thousand times as many."""

_GZIP = 16 + zlib.MAX_WBITS
"""That zlib is to expect gzip's frame (zlib.decompressobj, wbits)."""


class Metadata(msgspec.Struct, rename="camel"):
    """What is read of an object's metadata (metav1.ObjectMeta)."""

    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Status(msgspec.Struct):
    """What the API server says instead of an answer (metav1.Status)."""

    code: int = 0
    message: str = ""
    reason: str = ""


class Request(msgspec.Struct, frozen=True):
    """One request to the API server.

    Attributes:
        method: of HTTP.
        path: with the query, if there is one.
        headers: those that it has besides the connection's.
        verb: what is asked for, so that refusals of different things are told apart.
        needed: what a ClusterRole must allow, as in "get, list and watch of nodes in the core API group".
        content: is sent as JSON; None: nothing is.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    verb: str
    needed: str
    content: Mapping[str, object] | None = None

    def refused(self, response: "httpx2.Response", content: bytes) -> UnreachableError:
        """The error that an answer is whose HTTP status says no; `content` is its body."""
        try:
            status = decoded(content, Status)
        except UnreachableError:
            status = Status()
        code = response.status_code
        kind, says = (
            str(code),
            f"the Kubernetes API answered {code}{': ' if status.message else ''}{excerpt(status.message)}",
        )
        if code == HTTPStatus.UNAUTHORIZED:
            says += "; it does not accept our credentials: is the service account's token, or --kubeconfig, its?"
        elif code == HTTPStatus.FORBIDDEN:
            kind = f"403 {self.verb}"
            says += f"; bind our service account to a ClusterRole that allows {self.needed}"
        return UnreachableError(kind, says, code, excerpt(status.reason), _retry_after(response.headers))


async def ask(client: "httpx2.AsyncClient", request: Request) -> bytes:
    """Sends a request. Returns the body of the answer.

    Raises:
        UnreachableError: there is no answer within ANSWER_TIMEOUT, none that can be read, or one that says no, with a `code`.
    """
    import httpx2  # noqa: PLC0415 - as in connect
    from lightkube.core.exceptions import ConfigError as CredentialsError  # noqa: PLC0415

    told = None if request.content is None else json.dumps(request.content, separators=(",", ":")).encode()
    sent = client.build_request(request.method, request.path, content=told, headers=dict(request.headers))
    try:
        with anyio.fail_after(ANSWER_TIMEOUT):
            response = await client.send(sent, stream=True)
            try:
                content = await body(response)
            finally:
                await response.aclose()
    except TimeoutError:
        raise UnreachableError("connection", f"the Kubernetes API did not answer within {ANSWER_TIMEOUT:g} s") from None
    except (httpx2.HTTPError, OSError, ValueError, CredentialsError) as error:
        text = f"the Kubernetes API cannot be reached: {excerpt(str(error) or repr(error))}"
        raise UnreachableError("connection", text) from None
    if not response.is_success:
        raise request.refused(response, content)
    return content


async def body(response: "httpx2.Response") -> bytes:
    """The whole body of an answer that is read as a stream. Raises UnreachableError where it is too long, or cannot be read."""
    content = bytearray()
    async for piece in pieces(response):
        content += piece
        if len(content) > LONGEST_MESSAGE:
            raise UnreachableError("length", f"the Kubernetes API's answer is longer than {LONGEST_MESSAGE} bytes")
    return bytes(content)


async def pieces(response: "httpx2.Response") -> AsyncIterator[bytes]:
    """An answer as it comes, at most LONGEST_PIECE bytes at once where it was packed: a proxy may do that unasked.

    Raises:
        UnreachableError: it is packed in a way that is not known, or what is said to be packed is not.
    """
    packed = response.headers.get("content-encoding", "").strip().lower()
    if packed in {"", "identity"}:
        async for piece in response.aiter_raw():
            yield piece
        return
    if packed not in {"gzip", "x-gzip"}:
        text = f"the Kubernetes API's answer is packed as {excerpt(packed)}, and was asked for as it is: does a proxy do that?"
        raise UnreachableError("answer", text)
    unpacker = zlib.decompressobj(wbits=_GZIP)
    async for piece in response.aiter_raw():
        rest, more = piece, b""
        try:
            while rest or more:
                if unpacker.eof:  # the next of several members (RFC 1952, 2.2)
                    unpacker = zlib.decompressobj(wbits=_GZIP)
                more = unpacker.decompress(rest, LONGEST_PIECE)
                rest = unpacker.unused_data or unpacker.unconsumed_tail
                if more:
                    yield more
        except zlib.error as error:
            raise UnreachableError("answer", f"the Kubernetes API's answer cannot be unpacked: {error}") from None


def decoded(content: bytes, kind: type[T]) -> T:
    """What the body of an answer holds. Raises UnreachableError where it is not of this kind."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # text that is no UTF-8 is a ValueError
        raise UnreachableError(
            "answer", f"the Kubernetes API's answer is not understood: {excerpt(str(error))}"
        ) from None


def _retry_after(headers: Mapping[str, Any]) -> float | None:
    """Seconds, as the API server writes them. Of 0, or of a date, which proxies may write, no notice is taken."""
    text = str(headers.get("retry-after", ""))
    return (float(text) or None) if text.isascii() and text.isdigit() and len(text) < 6 else None
