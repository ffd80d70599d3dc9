"""Our rights in the Kubernetes API, as the API server reports them (authorization.k8s.io/v1, SelfSubjectAccessReview)."""

from collections.abc import Sequence

import msgspec

from gpu_plugin.cluster.connection import WHOLE, connect

Asked = tuple[str, str, str, str, str]  # verb, resource, subresource, namespace and name; the last three may be empty


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
    api, allowed = "authorization.k8s.io/v1", []
    async with connect(kubeconfig) as server:
        for each in asked:
            attributes = dict(zip(("verb", "resource", "subresource", "namespace", "name"), each, strict=True))
            spec = {"resourceAttributes": {name: value for name, value in attributes.items() if value}}
            content = {"apiVersion": api, "kind": "SelfSubjectAccessReview", "spec": spec}
            answer = await server.ask("POST", f"/apis/{api}/selfsubjectaccessreviews", _Review, content, WHOLE)
            allowed.append(answer.status.allowed)
        return server.server, allowed
