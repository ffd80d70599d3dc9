"""A minimal device plugin on the project's packages, for comparison with the daemon's start: it listens and registers.

It finds no GPU, stores nothing and reads no configuration. It uses betterproto's messages, as is usual with these packages; the
daemon encodes its messages itself.

Usage: python -m bench.bare_plugin DIRECTORY, the one with the kubelet's socket.
"""

import signal
import sys
from pathlib import Path

import anyio
import asyncinotify  # noqa: F401 - imported by the daemon, as are the two that follow
import click  # noqa: F401
import msgspec  # noqa: F401
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Cardinality, Handler
from grpclib.server import Server, Stream

from gpu_plugin.kubelet import messages

SOCKET = "bare.sock"
RESOURCE = "example.com/bare"


class Plugin:
    """Answers GetDevicePluginOptions, and lists no device."""

    def __mapping__(self) -> dict[str, Handler]:
        """Return the handlers by path."""
        empty, listed = messages.Empty, messages.ListAndWatchResponse
        return {
            "/v1beta1.DevicePlugin/GetDevicePluginOptions": Handler(
                self._options, Cardinality.UNARY_UNARY, empty, messages.DevicePluginOptions
            ),
            "/v1beta1.DevicePlugin/ListAndWatch": Handler(self._list, Cardinality.UNARY_STREAM, empty, listed),
        }

    async def _options(self, stream: "Stream[messages.Empty, messages.DevicePluginOptions]") -> None:
        await stream.recv_message()
        await stream.send_message(messages.DevicePluginOptions())

    async def _list(self, stream: "Stream[messages.Empty, messages.ListAndWatchResponse]") -> None:
        await stream.recv_message()
        await stream.send_message(messages.ListAndWatchResponse())
        await anyio.sleep_forever()


async def serve(directory: Path) -> None:
    """Listen, register, and serve until SIGTERM."""
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        server = Server([Plugin()])
        await server.start(path=str(directory / SOCKET))
        async with Channel(path=str(directory / "kubelet.sock")) as channel:
            register = UnaryUnaryMethod(
                channel, "/v1beta1.Registration/Register", messages.RegisterRequest, messages.Empty
            )
            await register(messages.RegisterRequest("v1beta1", SOCKET, RESOURCE))
        async for _ in signals:
            server.close()
            return


if __name__ == "__main__":
    anyio.run(serve, Path(sys.argv[1]))
