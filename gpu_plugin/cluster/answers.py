"""Requests to the Kubernetes API, its answers, read up to a limit, and sentences that explain its refusals."""

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
"""Asks for an object's metadata only, also in answers to changes. A whole Node with its images is some ten times as long."""

LONGEST_MESSAGE = 4 * 1024 * 1024
"""The maximum length of an object, a list or an event of a watch, in bytes. etcd stores no object above 1.5 MiB."""

LONGEST_PIECE = 64 * 1024
"""The maximum number of bytes to decompress at once: compressed data may grow a thousandfold."""

_GZIP = 16 + zlib.MAX_WBITS
"""Makes zlib expect a gzip header (zlib.decompressobj, wbits)."""


class Metadata(msgspec.Struct, rename="camel"):
    """The fields that the plugin reads from an object's metadata (metav1.ObjectMeta)."""

    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Status(msgspec.Struct):
    """The error that the API server returns in place of an object (metav1.Status)."""

    code: int = 0
    message: str = ""
    reason: str = ""


class Request(msgspec.Struct, frozen=True):
    """One request to the API server.

    Attributes:
        method: the HTTP method.
        path: the path, with the query if there is one.
        headers: headers in addition to the connection's.
        verb: names the operation, to distinguish refusals of different operations.
        needed: the rights that a ClusterRole must grant, such as "get, list and watch of nodes in the core API group".
        content: the body, sent as JSON; None to send no body.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    verb: str
    needed: str
    content: Mapping[str, object] | None = None

    def refused(self, response: "httpx2.Response", content: bytes) -> UnreachableError:
        """Return the error for an answer that has an HTTP status of failure. `content` is its body."""
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
    """Send a request and return the body of the answer.

    Raises:
        UnreachableError: there is no answer within ANSWER_TIMEOUT, or it cannot be read. If the server refuses the request, the
            error has the HTTP status as its `code`.
    """
    import httpx2  # noqa: PLC0415 - as in connect
    from lightkube.core.exceptions import ConfigError as CredentialsError  # noqa: PLC0415

    encoded = None if request.content is None else json.dumps(request.content, separators=(",", ":")).encode()
    http_request = client.build_request(request.method, request.path, content=encoded, headers=dict(request.headers))
    try:
        with anyio.fail_after(ANSWER_TIMEOUT):
            response = await client.send(http_request, stream=True)
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
    """Read the whole body of a streamed answer. Raises UnreachableError if it is too long or cannot be read."""
    content = bytearray()
    async for piece in pieces(response):
        content += piece
        if len(content) > LONGEST_MESSAGE:
            raise UnreachableError("length", f"the Kubernetes API's answer is longer than {LONGEST_MESSAGE} bytes")
    return bytes(content)


async def pieces(response: "httpx2.Response") -> AsyncIterator[bytes]:
    """Yield the body of an answer as it arrives.

    A compressed body is decompressed, at most LONGEST_PIECE bytes at once. A proxy may compress an answer although the request
    does not allow it.

    Raises:
        UnreachableError: the compression is unknown, or the body is not compressed as its header says.
    """
    packed = response.headers.get("content-encoding", "").strip().lower()
    if packed in {"", "identity"}:
        async for piece in response.aiter_raw():
            yield piece
        return
    if packed not in {"gzip", "x-gzip"}:
        text = (
            f"the Kubernetes API's answer is compressed as {excerpt(packed)}, although the request does not allow compression: "
            "does a proxy compress it?"
        )
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
            raise UnreachableError("answer", f"the Kubernetes API's answer cannot be decompressed: {error}") from None


def decoded(content: bytes, kind: type[T]) -> T:
    """Decode the body of an answer. Raises UnreachableError if it does not have this type."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: the text is not UTF-8
        raise UnreachableError(
            "answer", f"the Kubernetes API's answer is not understood: {excerpt(str(error))}"
        ) from None


def _retry_after(headers: Mapping[str, Any]) -> float | None:
    """Return the Retry-After header in seconds; None if it is 0, absent, or a date, which proxies may write."""
    text = str(headers.get("retry-after", ""))
    return (float(text) or None) if text.isascii() and text.isdigit() and len(text) < 6 else None
