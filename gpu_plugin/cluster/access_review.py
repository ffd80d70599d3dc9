"""Our rights in the Kubernetes API, as the API server reports them (authorization.k8s.io/v1, SelfSubjectAccessReview)."""

from collections.abc import Sequence

import msgspec

from gpu_plugin.cluster.answers import Request, ask, decoded
from gpu_plugin.cluster.connection import connect

_PATH = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}
_NEEDED = "create of selfsubjectaccessreviews in the API group authorization.k8s.io"

Asked = tuple[str, str, str, str, str]
"""Verb, resource, subresource, namespace and name; the last three may be empty."""


class _Status(msgspec.Struct):
    allowed: bool = False


class _Review(msgspec.Struct):
    status: _Status


async def review(kubeconfig: str, asked: Sequence[Asked]) -> tuple[str, list[bool]]:
    """Return the server's address, and for each entry of `asked` whether the server allows it.

    Sends one request for each entry. The server does not store these requests.

    Raises:
        UnreachableError: there are no credentials, the server does not answer, or its answer cannot be read.
    """
    allowed = []
    async with connect(kubeconfig) as client:
        for each in asked:
            request = Request("POST", _PATH, _HEADERS, "review", _NEEDED, _content(each))
            allowed.append(decoded(await ask(client, request), _Review).status.allowed)
        return str(client.base_url).rstrip("/"), allowed


def _content(asked: Asked) -> dict[str, object]:
    names = ("verb", "resource", "subresource", "namespace", "name")
    attributes = {name: value for name, value in zip(names, asked, strict=True) if value}
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
