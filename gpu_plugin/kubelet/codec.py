"""What every connection of ours is made with, on either side: messages as bytes, and an end at frames that nobody knows."""

from typing import Any

from grpclib.encoding.base import CodecBase
from grpclib.protocol import H2Protocol


class BytesCodec(CodecBase):
    """Messages in and out are bytes: `wire` does the encoding."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        """The message itself. Raises TypeError for anything but bytes."""
        if not isinstance(message, bytes):
            raise TypeError(f"{message_type} is to be encoded by wire, not here: {type(message).__name__}")
        return message

    def decode(self, data: bytes, message_type: Any) -> bytes:  # noqa: ARG002
        """The bytes as they came."""
        return data


class EndsAtUnknownFrame(H2Protocol):
    """A connection, of either side, that ends in order where it gets a frame of a type that nobody knows."""

    def data_received(self, data: bytes) -> None:
        """Takes in what the peer sent."""
        try:
            super().data_received(data)
        except NotImplementedError as error:  # grpclib's word for an event of h2 that it has no handler for
            self.unknown_frame(str(error))

    def unknown_frame(self, what: str) -> None:
        """Ends the connection. `what` is the frame as h2 shows it."""
        self.processor.close(f"an unknown frame: {what}")
