"""What we may do in the Kubernetes API, as the API server says it (authorization.k8s.io/v1, SelfSubjectAccessReview)."""

from collections.abc import Sequence

import anyio
import msgspec

from gpu_plugin.cluster.answers import body, refusal, status_of
from gpu_plugin.cluster.connection import ANSWER_TIMEOUT, UnreachableError, connect

_PATH = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

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
    import httpx2  # noqa: PLC0415 - as in connect
    from lightkube.core.exceptions import ConfigError as CredentialsError  # noqa: PLC0415

    allowed = []
    async with connect(kubeconfig) as client:
        for each in asked:
            request = client.build_request("POST", _PATH, json=_content(each), headers={"Accept": "application/json"})
            try:
                with anyio.fail_after(ANSWER_TIMEOUT):
                    response = await client.send(request, stream=True)
                    try:
                        answer = await body(response)
                    finally:
                        await response.aclose()
            except TimeoutError:
                raise UnreachableError(
                    "connection", f"the Kubernetes API did not answer within {ANSWER_TIMEOUT:g} s"
                ) from None
            except (httpx2.HTTPError, OSError, ValueError, CredentialsError) as error:
                text = f"the Kubernetes API cannot be reached: {str(error) or repr(error)}"
                raise UnreachableError("connection", text) from None
            if not response.is_success:
                needed = "create of selfsubjectaccessreviews in the API group authorization.k8s.io"
                raise refusal(response.status_code, status_of(answer), "review", needed)
            allowed.append(_allowed(answer))
        return str(client.base_url).rstrip("/"), allowed


def _content(asked: Asked) -> dict[str, object]:
    names = ("verb", "resource", "subresource", "namespace", "name")
    attributes = {name: value for name, value in zip(names, asked, strict=True) if value}
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }


def _allowed(answer: bytes) -> bool:
    try:
        return msgspec.json.decode(answer, type=_Review).status.allowed
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnreachableError("answer", f"the Kubernetes API's answer is not understood: {error}") from None
