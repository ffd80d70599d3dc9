"""A client's connection for one call that reads no more than an answer may have: grpclib itself would read on for ever."""

from grpclib.client import Channel, Handler
from grpclib.protocol import H2Protocol

from gpu_plugin.kubelet.codec import BytesCodec, EndsAtUnknownFrame


class BoundedChannel(Channel):
    """A channel for one call. `fault` is why we cut its connection, which grpclib forgets as soon as it is cut."""

    fault = ""

    def __init__(self, path: str, longest: int) -> None:
        """Takes the socket's path, and how many bytes are read of it at most."""
        super().__init__(path=path, codec=BytesCodec())
        self._longest = longest

    def _protocol_factory(self) -> H2Protocol:
        return _Bounded(self, self._longest)


class _Bounded(EndsAtUnknownFrame):
    def __init__(self, channel: BoundedChannel, longest: int) -> None:
        super().__init__(Handler(), channel._config, channel._h2_config)  # noqa: SLF001 - as Channel itself makes them
        self._channel = channel
        self._longest = longest
        self._read = 0

    def data_received(self, data: bytes) -> None:
        self._read += len(data)
        if self._read > self._longest:
            self._end(f"its answer has more than {self._longest} bytes")
        else:
            super().data_received(data)

    def unknown_frame(self, what: str) -> None:
        self._end(f"it sent {what}")

    def _end(self, fault: str) -> None:
        self._channel.fault = fault
        self.processor.close(fault)
