"""The codec of all our gRPC connections, as server and as client: messages are bytes."""

from typing import Any

from grpclib.encoding.base import CodecBase


class BytesCodec(CodecBase):
    """Passes messages as bytes: `wire` encodes and decodes them."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        """Return the message itself. Raises TypeError if it is not bytes."""
        if not isinstance(message, bytes):
            raise TypeError(f"{message_type} must be encoded by wire first: it is a {type(message).__name__}")
        return message

    def decode(self, data: bytes, message_type: Any) -> bytes:  # noqa: ARG002
        """Return the received bytes unchanged."""
        return data
