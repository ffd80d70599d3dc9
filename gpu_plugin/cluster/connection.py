"""A connection to the Kubernetes API: its address and our credentials, as lightkube reads them, over its HTTP client."""

import importlib.util
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.runtime.printable import excerpt
from gpu_plugin.runtime.slow_call import SlowCall
from gpu_plugin.runtime.threads import begin

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger(__name__)

# Seconds to reach the API server, and for its answer.
CONNECT_TIMEOUT = 5.0
ANSWER_TIMEOUT = 10.0

# Seconds of silence, seconds between probes, and probes unanswered, until a connection whose peer is gone is closed.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class UnreachableError(Exception):
    """The API server cannot be asked, or does not say what was asked for; the text says why.

    `kind` is the same for troubles that are the same to people, however their texts differ. Of an answer that says no, `code` is
    the HTTP status, `reason` the API's own word for it, `pause` the Retry-After in seconds: 0, empty and None where there is none
    """

    def __init__(self, kind: str, text: str, code: int = 0, reason: str = "", pause: float | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.code = code
        self.reason = reason
        self.pause = pause


def require_client(what: str = "--config-file-srcdir", instead: str = ", or give one file with --config-file") -> None:
    """Raises ConfigError where what it takes to talk to the Kubernetes API is not installed.

    Args:
        what: needs it.
        instead: what else can be done, as the end of the sentence.
    """
    if importlib.util.find_spec("lightkube") is None:
        raise ConfigError(
            f"{what} needs the Kubernetes API, and lightkube is not installed: install gpu-plugin[kube]{instead}"
        )


@asynccontextmanager
async def connect(kubeconfig: str) -> AsyncIterator["httpx2.AsyncClient"]:
    """An HTTP client for the API server of `kubeconfig`, or, where that is empty, of the cluster whose pod we are.

    Everything is read again each time: certificates and tokens are replaced while we run.

    Raises:
        UnreachableError: there are no usable credentials, or the server's name is not resolved.
    """
    import httpx2  # noqa: PLC0415 - 7 MiB with lightkube, for those alone who talk to the API
    import yaml  # noqa: PLC0415 - as above
    from lightkube.config.client_adapter import AsyncClient, ConnectionParams  # noqa: PLC0415
    from lightkube.config.kubeconfig import KubeConfig  # noqa: PLC0415
    from lightkube.config.models import User  # noqa: PLC0415

    timeout = httpx2.Timeout(ANSWER_TIMEOUT, connect=CONNECT_TIMEOUT)
    try:
        found = (KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_service_account()).get()
        assert found is not None  # it is None only for a default that is None
        found = found._replace(user=found.user or User())  # a server may ask for no credentials, lightkube insists
        client = AsyncClient(found, ConnectionParams(timeout=timeout))
    except yaml.YAMLError as error:
        raise UnreachableError(
            "credentials", f"kubeconfig {kubeconfig} cannot be used: {_yaml_problem(error)}"
        ) from None
    except Exception as error:  # noqa: BLE001 - a kubeconfig can be wrong in as many ways as YAML, PEM and URLs
        if kubeconfig:
            raise UnreachableError(
                "credentials", f"kubeconfig {kubeconfig} cannot be used: {excerpt(str(error))}"
            ) from None
        raise UnreachableError(
            "credentials",
            f"there is no usable service account in this pod ({excerpt(str(error))}): do not set automountServiceAccountToken to "
            "false, or give --kubeconfig",
        ) from None
    client.headers["Accept-Encoding"] = "identity"
    async with client:
        await _resolve(client.base_url.host, client.base_url.port)
        yield client


async def _resolve(host: str, port: int | None) -> None:
    """Has the resolver ready: the event loop asks it on threads that the process waits for at its end."""
    lookup: SlowCall[Any] = SlowCall(partial(begin, name="name-resolution"))
    try:
        await lookup.joined(partial(socket.getaddrinfo, host, port or 443, type=socket.SOCK_STREAM), CONNECT_TIMEOUT)
    except TimeoutError:
        raise UnreachableError("name", f"the name {host} is not resolved within {CONNECT_TIMEOUT:g} s") from None
    except (OSError, UnicodeError) as error:  # a proxy may know what we do not
        log.debug("the name %s is not resolved: %s", host, error)


def keep_alive(response: "httpx2.Response") -> None:
    """Has the system notice that the peer of a long, silent answer is gone, within half a minute."""
    stream = response.extensions.get("network_stream")
    connection = stream.get_extra_info("socket") if stream is not None else None
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _yaml_problem(error: Exception) -> str:
    """The line and the problem of a `yaml.YAMLError`, and nothing of the text around it: a file may hold passwords."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it is no YAML"
    return f"line {mark.line + 1}: {problem}" if mark is not None else str(problem)
