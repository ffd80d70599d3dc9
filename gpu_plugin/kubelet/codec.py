"""The codec and the protocol of all our gRPC connections, as server and as client: bytes as messages, and unknown frames."""

from typing import Any

from grpclib.encoding.base import CodecBase
from grpclib.protocol import H2Protocol


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


class EndsAtUnknownFrame(H2Protocol):
    """A connection, of a server or a client, with an orderly end when it receives a frame of an unknown type."""

    def data_received(self, data: bytes) -> None:
        """Process bytes from the peer."""
        try:
            super().data_received(data)
        except NotImplementedError as error:  # grpclib has no handler for this event of h2
            self.unknown_frame(str(error))

    def unknown_frame(self, what: str) -> None:
        """Close the connection. `what` is the frame as h2 prints it."""
        self.processor.close(f"an unknown frame: {what}")
