"""One gRPC call to the kubelet, on a connection that limits the size of the answer: grpclib itself has no limit."""

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
"""The longest accepted answer: the usual limit of the Go clients of PodResources."""


class CallError(Exception):
    """The call failed. The text has the reason, in the kubelet's words if it sent any.

    The request may or may not have taken effect.
    """


HOW_TO_BE_ADMITTED = (
    "a connection needs write permission on the socket and search permission on its directories: compare the user and the mode "
    "(ls -l), or check whether SELinux refused it (ausearch -m avc)"
)
"""Advice if the socket exists and the kernel refuses the connection (EACCES, EPERM; unix(7))."""


async def call(
    socket: Path,
    method: str,
    request: bytes,
    timeout: float,
    who: str,
    connected: Callable[[], object] = tuple,
) -> bytes:
    """Make one call, and return the answer.

    Args:
        socket: the server's unix socket.
        method: the path of the method.
        request: the encoded request.
        timeout: seconds for the connection, and seconds for the answer.
        who: the server's name in error messages.
        connected: called once the server has accepted the connection. It may raise CallError.

    Raises:
        CallError: the socket does not exist, no server answers on it, the server refuses the call, does not answer within
            `timeout` seconds, or is not a gRPC server; or `connected` raised it.
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
                return CallError(f"no answer on {socket}: {error.strerror or error}")
        return CallError(f"{socket} does not answer as a kubelet does: {excerpt(repr(error))}")

    outcome: bytes | CallError = CallError(f"{who} closed the connection during the call")

    async def ask() -> None:
        # In a task of its own: when a connection breaks, grpclib cancels the task that waits on it and swallows the
        # cancellation. Code that continued in that task would be half cancelled.
        nonlocal outcome
        channel = BoundedChannel(str(socket))
        try:
            with anyio.fail_after(timeout):
                await channel.__connect__()
            connected()
            unary: UnaryUnaryMethod[bytes, bytes] = UnaryUnaryMethod(channel, method, bytes, bytes)
            outcome = await unary(request, timeout=timeout)
        except Exception as error:  # noqa: BLE001 - a peer without gRPC trips assertions of h2 and grpclib
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
    """A channel for one call. `fault` is why we closed its connection: grpclib does not keep the reason."""

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
