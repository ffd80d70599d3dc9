"""One call of the kubelet, on a connection that reads no more than an answer may have: grpclib itself would read on for ever."""

from collections.abc import Callable
from pathlib import Path

import anyio
from grpclib.client import Channel, Handler, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.protocol import H2Protocol

from gpu_plugin.kubelet.codec import BytesCodec, EndsAtUnknownFrame
from gpu_plugin.runtime.printable import excerpt

MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""What is read of one answer at most: the usual limit of the Go clients of PodResources."""


class CallError(Exception):
    """The kubelet did not answer, or with something else; the text says why, in its words where it had any.

    Of what was asked nothing follows.
    """


HOW_TO_BE_ADMITTED = (
    "connecting takes the right to write to the socket and to pass its directories: compare the user and the mode (ls -l), or "
    "see whether SELinux refused it (ausearch -m avc)"
)
"""What to look at if a socket is there and the kernel refuses the connection (EACCES, EPERM; unix(7))."""


async def call(
    socket: Path,
    method: str,
    request: bytes,
    timeout: float,
    who: str,
    connected: Callable[[], object] = tuple,
) -> bytes:
    """The answer to one call. `who` is whom it is asked of, in words; `connected` is called once the connection is taken.

    Raises:
        CallError: there is no such socket, nobody answers on it, the other end refuses, does not answer within `timeout` seconds,
            or is no gRPC server; and what `connected` raises of this kind.
    """

    def failure(error: Exception, fault: str) -> CallError:
        match error:
            case CallError():
                return error
            case TimeoutError() | GRPCError(status=Status.DEADLINE_EXCEEDED, message=None | ""):
                return CallError(f"{who} did not answer within {timeout:g} s")
            case GRPCError(status=status, message=message):
                text = excerpt(message or "")
                said = text if text and status is Status.UNKNOWN else f"{status.name} {text}".strip()
                return CallError(f"{who} refused: {said}")
            case StreamTerminatedError() | ProtocolError():
                return CallError(f"{who} ended the call: {excerpt(fault or str(error))}")
            case PermissionError():
                return CallError(f"{socket}: {error.strerror}: {HOW_TO_BE_ADMITTED}")
            case OSError():
                return CallError(f"nobody answers on {socket}: {error.strerror or error}")
        return CallError(f"{socket} does not answer as a kubelet does: {excerpt(repr(error))}")

    outcome: bytes | CallError = CallError(f"{who} hung up in the middle of the call")

    async def ask() -> None:
        # In a task of its own: when a connection breaks, grpclib cancels the task that waits on it and swallows that, and
        # whoever runs on in that task stands half cancelled.
        nonlocal outcome
        channel = BoundedChannel(str(socket))
        try:
            with anyio.fail_after(timeout):
                await channel.__connect__()
            connected()
            unary: UnaryUnaryMethod[bytes, bytes] = UnaryUnaryMethod(channel, method, bytes, bytes)
            outcome = await unary(request, timeout=timeout)
        except Exception as error:  # noqa: BLE001 - what does not speak gRPC meets h2's and grpclib's own assertions
            outcome = failure(error, channel.fault)
            outcome.__cause__ = error
        finally:
            channel.close()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
    if isinstance(outcome, CallError):
        raise outcome
    return outcome


class BoundedChannel(Channel):
    """A channel for one call. `fault` is why we cut its connection, which grpclib forgets as soon as it is cut."""

    fault = ""

    def __init__(self, path: str) -> None:
        super().__init__(path=path, codec=BytesCodec())

    def _protocol_factory(self) -> H2Protocol:
        return _Bounded(self)


class _Bounded(EndsAtUnknownFrame):
    def __init__(self, channel: BoundedChannel) -> None:
        super().__init__(Handler(), channel._config, channel._h2_config)  # noqa: SLF001 - as Channel itself makes them
        self._channel = channel
        self._read = 0

    def data_received(self, data: bytes) -> None:
        self._read += len(data)
        if self._read > MAX_ANSWER_BYTES:
            self._end(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
        else:
            super().data_received(data)

    def unknown_frame(self, what: str) -> None:
        self._end(f"it sent {what}")

    def _end(self, fault: str) -> None:
        self._channel.fault = fault
        self.processor.close(fault)
