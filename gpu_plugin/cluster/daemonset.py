"""One DaemonSet, read and patched through the Kubernetes API."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from gpu_plugin.cluster.connection import UnreachableError, connect

if TYPE_CHECKING:
    import httpx2

_MERGE_PATCH = "application/merge-patch+json"


class DaemonSet:
    """A DaemonSet by namespace and name; `opened` gives one with a connection."""

    def __init__(self, client: "httpx2.AsyncClient", namespace: str, name: str) -> None:
        self._client = client
        self._path = f"apis/apps/v1/namespaces/{namespace}/daemonsets/{name}"

    async def read(self) -> Mapping[str, Any] | None:
        """The object as it is now; None where there is none. Raises UnreachableError."""
        return await self._ask("GET")

    async def patch(self, patch: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Applies a JSON merge patch and gives the object; None where there is none. Raises UnreachableError."""
        return await self._ask("PATCH", content=json.dumps(patch), headers={"Content-Type": _MERGE_PATCH})

    async def _ask(self, method: str, **more: Any) -> Mapping[str, Any] | None:
        import httpx2  # noqa: PLC0415 - 7 MiB, for those alone who talk to the API

        try:
            response = await self._client.request(method, self._path, **more)
        except httpx2.HTTPError as error:
            raise UnreachableError("request", f"the Kubernetes API cannot be reached: {error!r}") from None
        if response.status_code == HTTPStatus.NOT_FOUND:
            return None
        try:
            told = response.json()
        except ValueError:
            told = {}
        if response.status_code != HTTPStatus.OK or not isinstance(told, dict):
            message = told.get("message", "") if isinstance(told, dict) else ""
            says = f"the Kubernetes API answered {response.status_code} to {method} {self._path}"
            raise UnreachableError(str(response.status_code), f"{says}: {message}" if message else says)
        return told


@asynccontextmanager
async def opened(kubeconfig: str, namespace: str, name: str) -> AsyncIterator[DaemonSet]:
    """A DaemonSet of the cluster of the kubeconfig, or, where that is empty, whose pod we are. Raises UnreachableError."""
    async with connect(kubeconfig) as client:
        yield DaemonSet(client, namespace, name)
