"""What we may do in the Kubernetes API, as the API server says it (authorization.k8s.io/v1, SelfSubjectAccessReview)."""

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
    """The server's address, and for each that is asked whether it is allowed. One request each; the server keeps nothing of them.

    Raises:
        UnreachableError: there are no credentials, the server does not answer, or does not say.
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
