"""What the Kubernetes API answers, read with bounds, and what its refusals mean for people."""

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec

from gpu_plugin.cluster.connection import UnreachableError

if TYPE_CHECKING:
    import httpx2

METADATA: Final = "application/json;as={};v=v1;g=meta.k8s.io,application/json"
"""Metadata alone: a whole Node with its images is some ten times as long. It is asked for of answers to changes, too."""

LONGEST_MESSAGE = 4 * 1024 * 1024
"""Bytes of an object, a list or an event of a watch; etcd holds no object above 1.5 MiB."""


class Status(msgspec.Struct):
    """What the API server says instead of an answer (metav1.Status)."""

    code: int = 0
    message: str = ""
    reason: str = ""


def metadata_of(kind: str) -> dict[str, str]:
    """The headers that ask for metadata alone; `kind` is PartialObjectMetadata or PartialObjectMetadataList."""
    return {"Accept": METADATA.format(kind)}


async def body(response: "httpx2.Response") -> bytes:
    """All of an answer that is read as a stream, not unpacked. Raises UnreachableError where it is longer than any can be."""
    content = bytearray()
    async for piece in response.aiter_raw():
        content += piece
        if len(content) > LONGEST_MESSAGE:
            raise UnreachableError("length", f"the Kubernetes API's answer is longer than {LONGEST_MESSAGE} bytes")
    return bytes(content)


def status_of(content: bytes) -> Status:
    """The Status that an answer is, an empty one where it is none."""
    try:
        return msgspec.json.decode(content, type=Status)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # text that is no UTF-8 is a ValueError
        return Status()


def refusal(code: int, status: Status, verb: str, needed: str) -> UnreachableError:
    """The error that an answer with status `code` is.

    Args:
        code: of HTTP.
        status: what the body says.
        verb: what was asked for, so that refusals of different things are told apart.
        needed: what a ClusterRole must allow, as in "get, list and watch of nodes in the core API group".
    """
    says = f"the Kubernetes API answered {code}{': ' if status.message else ''}{status.message}"
    if code == HTTPStatus.UNAUTHORIZED:
        return UnreachableError(
            "401", f"{says}; it does not accept our credentials: is the service account's token, or --kubeconfig, its?"
        )
    if code == HTTPStatus.FORBIDDEN:
        return UnreachableError(
            f"403 {verb}", f"{says}; bind our service account to a ClusterRole that allows {needed}"
        )
    return UnreachableError(str(code), says)
