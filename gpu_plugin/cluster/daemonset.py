"""DaemonSets of one namespace, through the Kubernetes API."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from gpu_plugin.cluster.answers import Request, ask, decoded
from gpu_plugin.cluster.connection import UnreachableError

if TYPE_CHECKING:
    import httpx2

_HEADERS = {"Content-Type": "application/json"}
_NEEDED = "get, create and delete of daemonsets in the API group apps"


class DaemonSets:
    """The DaemonSets of a namespace, over a client from `connect`. Every method raises UnreachableError."""

    def __init__(self, client: "httpx2.AsyncClient", namespace: str) -> None:
        self._client = client
        self._path = f"/apis/apps/v1/namespaces/{namespace}/daemonsets"

    async def read(self, name: str) -> Mapping[str, Any] | None:
        """Return the object; None if no DaemonSet has this name."""
        return await self._ask("GET", f"/{name}")

    async def create(self, content: Mapping[str, Any]) -> bool:
        """Create a DaemonSet. Returns False if a DaemonSet of this name exists."""
        return await self._ask("POST", "", content, but=HTTPStatus.CONFLICT) is not None

    async def delete(self, name: str) -> None:
        """Delete a DaemonSet with its pods. The object exists until its last pod is gone."""
        await self._ask("DELETE", f"/{name}", {"propagationPolicy": "Foreground"})

    async def _ask(
        self, method: str, path: str, content: Mapping[str, Any] | None = None, but: int = HTTPStatus.NOT_FOUND
    ) -> Mapping[str, Any] | None:
        """Return the answer; None if its HTTP status is `but`."""
        request = Request(method, f"{self._path}{path}", _HEADERS, method.lower(), _NEEDED, content)
        try:
            return decoded(await ask(self._client, request), dict)
        except UnreachableError as error:
            if error.code != but:
                raise
            return None
