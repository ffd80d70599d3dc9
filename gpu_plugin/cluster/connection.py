"""A connection to the Kubernetes API over lightkube's HTTP client, and sentences that explain the API's refusals."""

import importlib.util
import json
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import msgspec

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.runtime.printable import excerpt
from gpu_plugin.runtime.threads import begin

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

log = logging.getLogger(__name__)

# Seconds to connect to the API server, and to wait for its answer.
CONNECT_TIMEOUT = 5.0
ANSWER_TIMEOUT = 10.0

# The kernel closes a connection after 15 s of silence and 3 unanswered probes, 5 s apart.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))

# An object's metadata only, also in answers to changes: a whole Node with its images is some ten times as long.
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io,application/json"
WHOLE: Final = {"Accept": "application/json"}  # headers of a request that needs the whole object


class UnreachableError(Exception):
    """The API server cannot be reached, refuses the request, or sends an answer that cannot be read. The text says why.

    `kind` is equal for errors that have the same cause, even if their texts differ. If the server refused the request, `code` is
    the HTTP status, `reason` is the API's word for it (metav1.StatusReason), and `pause` is the Retry-After header in seconds.
    Else they are 0, empty and None.
    """

    def __init__(self, kind: str, text: str, code: int = 0, reason: str = "", pause: float | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.code = code
        self.reason = reason
        self.pause = pause


class _Status(msgspec.Struct):
    """The error that the API server returns in place of an object (metav1.Status)."""

    message: str = ""
    reason: str = ""


def require_client(what: str = "--config-file-srcdir", instead: str = ", or give one file with --config-file") -> None:
    """Raises ConfigError if the Kubernetes client is not installed.

    Args:
        what: the option or feature that needs the client.
        instead: an alternative for the user, as the end of the sentence.
    """
    if importlib.util.find_spec("lightkube") is None:
        raise ConfigError(
            f"{what} needs the Kubernetes API, and lightkube is not installed: install gpu-plugin[kube]{instead}"
        )


class Connection:
    """An open connection to the API server, which has the address `server`."""

    def __init__(self, client: "httpx2.AsyncClient") -> None:
        self.client = client
        self.server = str(client.base_url).rstrip("/")

    async def ask(
        self, method: str, path: str, kind: type[T], content: object = None, headers: Mapping[str, str] | None = None
    ) -> T:
        """Send a request, with `content` as JSON if it is given. Return the body of the answer as `kind`.

        Raises:
            UnreachableError: see `send`; or the answer does not have this type.
        """
        encoded = None if content is None else json.dumps(content, separators=(",", ":")).encode()
        given = {"Content-Type": "application/json", **(headers or {})} if encoded else headers
        response = await self.send(self.client.build_request(method, path, content=encoded, headers=given))
        return _decoded(response.content, kind)

    async def send(self, request: "httpx2.Request", *, stream: bool = False) -> "httpx2.Response":
        """Send a request and return the answer. With `stream`, its body is not read yet, and the caller must close it.

        Raises:
            UnreachableError: there is no answer within ANSWER_TIMEOUT, or it cannot be read, or the server refuses the request.
        """
        import httpx2  # noqa: PLC0415 - as in connect
        from lightkube.core.exceptions import ConfigError as CredentialsError  # noqa: PLC0415

        try:
            with anyio.fail_after(ANSWER_TIMEOUT):
                response = await self.client.send(request, stream=stream)
                if not response.is_success:
                    await response.aread()
        except TimeoutError:
            text = f"the Kubernetes API did not answer within {ANSWER_TIMEOUT:g} s"
            raise UnreachableError("connection", text) from None
        except (httpx2.HTTPError, OSError, ValueError, KeyError, CredentialsError) as error:
            # KeyError: a credential plugin of the kubeconfig printed no token
            text = f"the Kubernetes API cannot be reached: {excerpt(str(error) or repr(error))}"
            raise UnreachableError("connection", text) from None
        if not response.is_success:
            raise _refusal(response)
        return response


@asynccontextmanager
async def connect(kubeconfig: str) -> AsyncIterator[Connection]:
    """Connect to the API server that `kubeconfig` names. If it is empty, use the pod's own service account.

    All files are read at each call, since certificates and tokens are replaced while the plugin runs.

    Raises:
        UnreachableError: there are no usable credentials, or the server's name is not resolved in time.
    """
    import httpx2  # noqa: PLC0415 - 7 MiB with lightkube, which only features that use the API need
    import yaml  # noqa: PLC0415 - as above
    from lightkube.config.client_adapter import AsyncClient, ConnectionParams  # noqa: PLC0415
    from lightkube.config.kubeconfig import KubeConfig  # noqa: PLC0415
    from lightkube.config.models import User  # noqa: PLC0415

    timeout = httpx2.Timeout(ANSWER_TIMEOUT, connect=CONNECT_TIMEOUT)
    try:
        found = (KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_service_account()).get()
        assert found is not None  # `get` returns None only if the default argument is None
        found = found._replace(user=found.user or User())  # lightkube needs one even if the server needs no credentials
        client = AsyncClient(found, ConnectionParams(timeout=timeout))
    except Exception as error:  # noqa: BLE001 - wrong YAML, PEM and URLs in a kubeconfig raise many types
        why = _yaml_problem(error) if isinstance(error, yaml.YAMLError) else excerpt(str(error))
        text = f"there is no usable service account in this pod ({why}): do not set automountServiceAccountToken to false, or "
        text = f"kubeconfig {kubeconfig} cannot be used: {why}" if kubeconfig else f"{text}give --kubeconfig"
        raise UnreachableError("credentials", text) from None
    client.headers.update({"Accept": _METADATA_ONLY, "Accept-Encoding": "identity"})
    async with client:
        await _resolve(client.base_url.host, client.base_url.port)
        yield Connection(client)


async def _resolve(host: str, port: int | None) -> None:
    """Resolve the name on a daemon thread first.

    The event loop resolves names on threads that the process waits for when it exits.
    """
    lookup = partial(socket.getaddrinfo, host, port or 443, type=socket.SOCK_STREAM)
    try:
        await begin(lookup, "name-resolution").result(CONNECT_TIMEOUT)
    except TimeoutError:
        raise UnreachableError("name", f"the name {host} is not resolved within {CONNECT_TIMEOUT:g} s") from None
    except (OSError, UnicodeError) as error:  # a proxy may resolve the name
        log.debug("the name %s is not resolved: %s", host, error)


def keep_alive(response: "httpx2.Response") -> None:
    """Turn on TCP keepalive for a long, silent answer, so that the kernel detects a lost peer within half a minute."""
    stream = response.extensions.get("network_stream")
    connection = stream.get_extra_info("socket") if stream is not None else None
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _decoded(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: the text is not UTF-8
        text = f"the Kubernetes API's answer is not understood: {excerpt(str(error))}"
        raise UnreachableError("answer", text) from None


def _refusal(response: "httpx2.Response") -> UnreachableError:
    """Return the error for an answer that has an HTTP status of failure."""
    try:
        status = _decoded(response.content, _Status)
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


def _yaml_problem(error: Exception) -> str:
    """Return the line and the problem of a `yaml.YAMLError` without the file's text, which may have passwords."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it is not YAML"
    return f"line {mark.line + 1}: {problem}" if mark is not None else str(problem)
