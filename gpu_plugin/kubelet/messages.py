"""The device plugin API's generated messages. PodResources has its own, which `pod_listing` imports at the first answer."""

from collections.abc import Iterator
from typing import TypeVar

import betterproto
from betterproto import encode_varint, parse_fields

from gpu_plugin.kubelet._api.v1beta1 import *  # noqa: F403 - every message

FIELD_1 = b"\x0a"  # key of field 1 with a length (protobuf.dev/programming-guides/encoding)

M = TypeVar("M", bound=betterproto.Message)


def decode(kind: type[M], data: bytes) -> M:
    """Decode a message of a generated type. Raises ValueError if betterproto cannot decode the bytes, for any reason."""
    try:
        return kind().parse(data)
    except Exception as error:
        raise ValueError(f"not a {kind.__name__} message: {error}") from error


def decode_exactly(kind: type[M], data: bytes) -> M:
    """Decode a message whose encoding is exactly these bytes.

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


def encoded_parts(data: bytes) -> Iterator[bytes]:
    """Return the encoded messages in field 1 of a message. The other fields may be of any kind.

    Raises:
        ValueError: the message ends within a field, or field 1 has no message.
    """
    try:
        for field in parse_fields(data):
            if field.number == 1:
                if field.wire_type != betterproto.WIRE_LEN_DELIM or field.raw != encoded_part(field.value):
                    raise ValueError("not a message of repeated parts: a field has the wrong type or ends too early")
                yield field.value
    except EOFError:
        raise ValueError("not a message of repeated parts: it ends within a field") from None


def encoded_part(part: bytes) -> bytes:
    """Return a message whose field 1 has this encoded message."""
    return FIELD_1 + encode_varint(len(part)) + part
