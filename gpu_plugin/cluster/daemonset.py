"""DaemonSets of one namespace, through the Kubernetes API."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from gpu_plugin.cluster.answers import WHOLE, ask
from gpu_plugin.cluster.connection import UnreachableError

if TYPE_CHECKING:
    import httpx2


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
        try:
            return await ask(self._client, method, f"{self._path}{path}", dict[str, Any], content, WHOLE)
        except UnreachableError as error:
            if error.code != but:
                raise
            return None
