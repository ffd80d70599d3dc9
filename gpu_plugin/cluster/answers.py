"""Requests to the Kubernetes API, its answers, and sentences that explain its refusals."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import msgspec

from gpu_plugin.cluster.connection import ANSWER_TIMEOUT, UnreachableError
from gpu_plugin.runtime.printable import excerpt

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

WHOLE: Final = {"Accept": "application/json"}
"""Asks for the whole object. Without it, a request asks for the metadata only, see `connect`."""


class Metadata(msgspec.Struct, rename="camel"):
    """The fields that the plugin reads from an object's metadata (metav1.ObjectMeta)."""

    uid: str = ""
    resource_version: str = ""


class _Status(msgspec.Struct):
    """The error that the API server returns in place of an object (metav1.Status)."""

    message: str = ""
    reason: str = ""


async def ask(
    client: "httpx2.AsyncClient",
    method: str,
    path: str,
    kind: type[T],
    content: object = None,
    headers: Mapping[str, str] | None = None,
) -> T:
    """Send a request and return the body of the answer as `kind`.

    Args:
        client: the client from `connect`.
        method: the HTTP method.
        path: the path, with the query if there is one.
        kind: the type of the answer.
        content: the body, sent as JSON; None to send no body.
        headers: headers in addition to the client's.

    Raises:
        UnreachableError: see `send`; or the answer does not have this type.
    """
    encoded = None if content is None else json.dumps(content, separators=(",", ":")).encode()
    given = {"Content-Type": "application/json", **(headers or {})} if encoded else headers
    response = await send(client, client.build_request(method, path, content=encoded, headers=given))
    return decoded(response.content, kind)


async def send(client: "httpx2.AsyncClient", request: "httpx2.Request", *, stream: bool = False) -> "httpx2.Response":
    """Send a request and return the answer. With `stream`, its body is not read yet, and the caller must close it.

    Raises:
        UnreachableError: there is no answer within ANSWER_TIMEOUT, or it cannot be read. If the server refuses the request, the
            error has the HTTP status as its `code`.
    """
    import httpx2  # noqa: PLC0415 - as in connect
    from lightkube.core.exceptions import ConfigError as CredentialsError  # noqa: PLC0415

    try:
        with anyio.fail_after(ANSWER_TIMEOUT):
            response = await client.send(request, stream=stream)
            if not response.is_success:
                await response.aread()
    except TimeoutError:
        raise UnreachableError("connection", f"the Kubernetes API did not answer within {ANSWER_TIMEOUT:g} s") from None
    except (httpx2.HTTPError, OSError, ValueError, KeyError, CredentialsError) as error:
        # KeyError: a credential plugin of the kubeconfig printed no token
        text = f"the Kubernetes API cannot be reached: {excerpt(str(error) or repr(error))}"
        raise UnreachableError("connection", text) from None
    if not response.is_success:
        raise _refusal(response)
    return response


def decoded(content: bytes, kind: type[T]) -> T:
    """Decode the body of an answer. Raises UnreachableError if it does not have this type."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: the text is not UTF-8
        raise UnreachableError(
            "answer", f"the Kubernetes API's answer is not understood: {excerpt(str(error))}"
        ) from None


def _refusal(response: "httpx2.Response") -> UnreachableError:
    """Return the error for an answer that has an HTTP status of failure."""
    try:
        status = decoded(response.content, _Status)
    except UnreachableError:
        status = _Status()
    code, request = response.status_code, response.request
    kind = str(code)
    says = f"the Kubernetes API answered {code}{': ' if status.message else ''}{excerpt(status.message)}"
    if code == HTTPStatus.UNAUTHORIZED:
        says += "; it does not accept our credentials: is the service account's token, or --kubeconfig, its?"
    elif code == HTTPStatus.FORBIDDEN:
        kind = f"403 {request.method} {request.url.path}"
        says += f"; bind our service account to a ClusterRole that allows {request.method} {request.url.path}"
    return UnreachableError(kind, says, code, excerpt(status.reason), _retry_after(response.headers))


def _retry_after(headers: Mapping[str, Any]) -> float | None:
    """Return the Retry-After header in seconds; None if it is 0, absent, or a date, which proxies may write."""
    text = str(headers.get("retry-after", ""))
    return (float(text) or None) if text.isascii() and text.isdigit() and len(text) < 6 else None
