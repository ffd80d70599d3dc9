"""An HTTP/2 client that sends any frames, and counts of tasks, threads, descriptors and memory."""

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    PingAckReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    TrailersReceived,
)

from gpu_plugin.kubelet import wire

REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", wire.ALLOCATE),
    (":authority", "localhost"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),  # codespell:ignore te
]


class Peer:
    """One connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.reader, self.writer = reader, writer
        self.events: list[object] = []

    async def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())
        await self.writer.drain()

    def take(self, data: bytes) -> None:
        """Takes in what the server says, and lets it say more."""
        new = self.h2.receive_data(data)
        self.events += new
        for event in new:
            if isinstance(event, DataReceived) and event.flow_controlled_length:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id or 0)

    def begin(self, *more: tuple[str, str], path: str = wire.ALLOCATE) -> int:
        stream = self.h2.get_next_available_stream_id()
        headers = [(name, path if name == ":path" else value) for name, value in REQUEST]
        self.h2.send_headers(stream, [*headers, *more])
        return stream

    async def until(self, kind: type) -> object:
        """The first event of a kind."""
        await self.flush()
        with anyio.fail_after(5):
            while True:
                found = next((event for event in self.events if isinstance(event, kind)), None)
                if found is not None:
                    return found
                data = await self.reader.read(65536)
                assert data, "the connection ended"
                self.take(data)
                await self.flush()

    async def met(self) -> None:
        """Wait until the server has sent its settings and read all earlier frames."""
        await self.until(RemoteSettingsChanged)
        self.h2.ping(b"anybody?")
        await self.until(PingAckReceived)

    async def rest(self) -> list[object]:
        """Every event up to the connection's end."""
        with anyio.fail_after(2):
            while data := await self.reader.read(65536):
                self.take(data)
        return self.events

    async def status(self) -> tuple[int, str]:
        """Return the gRPC status and message of the answer."""
        await self.until(StreamEnded)
        kinds = (TrailersReceived, ResponseReceived)
        headers = {str(k): str(v) for event in self.events if isinstance(event, kinds) for k, v in event.headers or ()}
        return int(headers["grpc-status"]), headers.get("grpc-message", "")


@asynccontextmanager
async def meeting(path: Path) -> AsyncIterator[Peer]:
    """A connection to the server at `path`, before its first byte."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()


async def settle() -> None:
    """Lets the server notice the connections that are gone."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()
    await anyio.sleep(0.05)


def left_behind() -> tuple[int, int, int]:
    """Tasks, threads and descriptors there are."""
    gc.collect()
    return len(asyncio.all_tasks()), threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
