"""A connection to the Kubernetes API: its address and our credentials, as lightkube reads them, over its HTTP client."""

import importlib.util
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.runtime.printable import excerpt
from gpu_plugin.runtime.threads import begin

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger(__name__)

# Seconds to connect to the API server, and to wait for its answer.
CONNECT_TIMEOUT = 5.0
ANSWER_TIMEOUT = 10.0

# The kernel closes a connection after 15 s of silence and 3 unanswered probes, 5 s apart.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


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


@asynccontextmanager
async def connect(kubeconfig: str) -> AsyncIterator["httpx2.AsyncClient"]:
    """Open an HTTP client for the API server that `kubeconfig` names. If it is empty, use the pod's own service account.

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
    # An object's metadata only, also in answers to changes: a whole Node with its images is some ten times as long.
    client.headers["Accept"] = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io,application/json"
    client.headers["Accept-Encoding"] = "identity"
    async with client:
        await _resolve(client.base_url.host, client.base_url.port)
        yield client


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


def _yaml_problem(error: Exception) -> str:
    """Return the line and the problem of a `yaml.YAMLError` without the file's text, which may have passwords."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it is not YAML"
    return f"line {mark.line + 1}: {problem}" if mark is not None else str(problem)
