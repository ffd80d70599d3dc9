"""The device plugin API's generated messages. PodResources has its own, which `pod_listing` imports at the first answer."""

from typing import TypeVar

import betterproto

from gpu_plugin.kubelet._api.v1beta1 import *  # noqa: F403 - every message

M = TypeVar("M", bound=betterproto.Message)


def decode(kind: type[M], data: bytes) -> M:
    """A message of a generated type. Raises ValueError if betterproto cannot decode the bytes, for whichever reason."""
    try:
        return kind().parse(data)
    except Exception as error:
        raise ValueError(f"not a {kind.__name__} message: {error}") from error


def decode_exactly(kind: type[M], data: bytes) -> M:
    """A message whose encoding is these bytes.

    betterproto keeps a field of the wrong type, and a field that ends too early. Such a message has no encoding or another
    encoding. The kubelet encodes fields in the order of their numbers, as betterproto does, and fields that we do not know
    come last.

    Raises:
        ValueError: the bytes are not such a message.
    """
    message = decode(kind, data)
    try:
        encoded = bytes(message)
    except Exception as error:
        raise ValueError(f"not a {kind.__name__} message: {error}") from error
    if encoded != data:
        raise ValueError(f"not a {kind.__name__} message: a field has the wrong type or ends too early")
    return message
