"""grpclib codec that passes messages as the bytes they are: `wire` does the encoding."""

from typing import Any

from grpclib.encoding.base import CodecBase


class BytesCodec(CodecBase):
    """Messages in and out are bytes."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        """The message itself. Raises TypeError for anything but bytes."""
        if not isinstance(message, bytes):
            raise TypeError(f"{message_type} is to be encoded by wire, not here: {type(message).__name__}")
        return message

    def decode(self, data: bytes, message_type: Any) -> bytes:  # noqa: ARG002
        """The bytes as they came."""
        return data
