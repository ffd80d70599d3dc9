"""DaemonSets of one namespace, through the Kubernetes API."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from gpu_plugin.cluster.connection import UnreachableError, connect

if TYPE_CHECKING:
    import httpx2


class DaemonSets:
    """The DaemonSets of a namespace; `opened` gives them with a connection."""

    def __init__(self, client: "httpx2.AsyncClient", namespace: str) -> None:
        self._client = client
        self._path = f"apis/apps/v1/namespaces/{namespace}/daemonsets"

    async def read(self, name: str) -> Mapping[str, Any] | None:
        """The object as it is now; None where there is none. Raises UnreachableError."""
        return await self._ask("GET", f"/{name}")

    async def create(self, content: Mapping[str, Any]) -> bool:
        """Makes one. Returns whether there was none of its name yet. Raises UnreachableError."""
        return await self._ask("POST", "", content, but=HTTPStatus.CONFLICT) is not None

    async def delete(self, name: str) -> None:
        """Has one deleted with its pods: it is there until the last of them is gone. Raises UnreachableError."""
        await self._ask("DELETE", f"/{name}", {"propagationPolicy": "Foreground"})

    async def _ask(
        self,
        method: str,
        path: str,
        content: Mapping[str, Any] | None = None,
        but: HTTPStatus = HTTPStatus.NOT_FOUND,
    ) -> Mapping[str, Any] | None:
        """The answer; None where its status is `but`."""
        import httpx2  # noqa: PLC0415 - 7 MiB, for those alone who talk to the API

        body = json.dumps(content) if content is not None else None
        headers = {"Content-Type": "application/json"}
        try:
            response = await self._client.request(method, f"{self._path}{path}", content=body, headers=headers)
        except httpx2.HTTPError as error:
            raise UnreachableError("request", f"the Kubernetes API cannot be reached: {error!r}") from None
        if response.status_code == but:
            return None
        try:
            told = response.json()
        except ValueError:
            told = {}
        if not response.is_success or not isinstance(told, dict):
            message = told.get("message", "") if isinstance(told, dict) else ""
            says = f"the Kubernetes API answered {response.status_code} to {method} {self._path}{path}"
            raise UnreachableError(str(response.status_code), f"{says}: {message}" if message else says)
        return told


@asynccontextmanager
async def opened(kubeconfig: str, namespace: str) -> AsyncIterator[DaemonSets]:
    """A namespace of the cluster of the kubeconfig, or, where that is empty, whose pod we are. Raises UnreachableError."""
    async with connect(kubeconfig) as client:
        yield DaemonSets(client, namespace)
