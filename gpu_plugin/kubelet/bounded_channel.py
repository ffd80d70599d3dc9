"""gRPC calls to the kubelet, on a connection that limits the size of the answer: grpclib itself has no limit."""

from pathlib import Path
from typing import Self

import anyio
from grpclib.client import Channel, Handler, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.protocol import H2Protocol

from gpu_plugin.kubelet.codec import BytesCodec
from gpu_plugin.runtime.printable import excerpt

MAX_ANSWER_BYTES = 16 * 1024 * 1024  # the longest accepted answer: the usual limit of the Go clients of PodResources


class CallError(Exception):
    """The call failed. The text has the reason, in the kubelet's words if it sent any.

    The request may or may not have taken effect.
    """


# Advice if the socket exists and the kernel refuses the connection (EACCES, EPERM; unix(7)).
HOW_TO_BE_ADMITTED = (
    "a connection needs write permission on the socket and search permission on its directories: compare the user and the mode "
    "(ls -l), or check whether SELinux refused it (ausearch -m avc)"
)


async def call(socket: Path, method: str, request: bytes, timeout: float, who: str) -> bytes:
    """Connect to a server, make one call, and return the answer.

    Args:
        socket: the server's unix socket.
        method: the path of the method.
        request: the encoded request.
        timeout: seconds for the connection, and seconds for the answer.
        who: the server's name in error messages.

    Raises:
        CallError: the socket does not exist, no server answers on it, the server refuses the call, does not answer within
            `timeout` seconds, or is not a gRPC server.
    """
    with BoundedChannel(socket, who) as channel:
        await channel.connect(timeout)
        return await channel.ask(method, request, timeout)


class BoundedChannel(Channel):
    """A connection to the gRPC server on a unix socket. `who` is the server's name in error messages."""

    def __init__(self, socket: Path, who: str) -> None:
        super().__init__(path=str(socket), codec=BytesCodec())
        self._socket = socket
        self._who = who
        self.fault = ""
        """Why we closed the connection: grpclib does not keep the reason."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def connect(self, timeout: float) -> None:
        """Connect within `timeout` seconds. Raises CallError."""
        try:
            with anyio.fail_after(timeout):
                await self.__connect__()
        except Exception as error:
            raise self._failure(error, timeout) from error

    async def ask(self, method: str, request: bytes, timeout: float) -> bytes:
        """Make a call, and return the answer. Raises CallError."""
        outcome: bytes | CallError = CallError(f"{self._who} closed the connection during the call")

        async def exchange() -> None:
            # In a task of its own: when a connection breaks, grpclib cancels the task that waits on it and swallows the
            # cancellation. Code that continued in that task would be half cancelled.
            nonlocal outcome
            try:
                unary: UnaryUnaryMethod[bytes, bytes] = UnaryUnaryMethod(self, method, bytes, bytes)
                outcome = await unary(request, timeout=timeout)
            except Exception as error:  # noqa: BLE001 - a peer without gRPC trips assertions of h2 and grpclib
                outcome = self._failure(error, timeout)
                outcome.__cause__ = error

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange)
        if isinstance(outcome, CallError):
            raise outcome
        return outcome

    def _failure(self, error: Exception, timeout: float) -> CallError:
        match error:
            case TimeoutError() | GRPCError(status=Status.DEADLINE_EXCEEDED, message=None | ""):
                return CallError(f"{self._who} did not answer within {timeout:g} s")
            case GRPCError(status=status, message=message):
                text = excerpt(message or "")
                said = text if text and status is Status.UNKNOWN else f"{status.name} {text}".strip()
                return CallError(f"{self._who} refused: {said}")
            case StreamTerminatedError() | ProtocolError():
                return CallError(f"{self._who} ended the call: {excerpt(self.fault or str(error))}")
            case PermissionError():
                return CallError(f"{self._socket}: {error.strerror}: {HOW_TO_BE_ADMITTED}")
            case OSError():
                return CallError(f"no answer on {self._socket}: {error.strerror or error}")
        return CallError(f"{self._socket} does not answer as a kubelet does: {excerpt(repr(error))}")

    def _protocol_factory(self) -> H2Protocol:
        return _Bounded(self)


class _Bounded(H2Protocol):
    def __init__(self, channel: BoundedChannel) -> None:
        super().__init__(Handler(), channel._config, channel._h2_config)  # noqa: SLF001 - as Channel itself makes them
        self._channel = channel
        self._read = 0

    def data_received(self, data: bytes) -> None:
        self._read += len(data)
        if self._read > MAX_ANSWER_BYTES:
            self._channel.fault = f"its answer has more than {MAX_ANSWER_BYTES} bytes"
            self.processor.close(self._channel.fault)
        else:
            super().data_received(data)
