"""HTTP/2 frames of types that nobody knows, which a peer may send and grpclib has no answer for."""

from grpclib.protocol import H2Protocol


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
