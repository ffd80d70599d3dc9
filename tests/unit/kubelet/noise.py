"""Requests and HTTP/2 frames with something wrong, made and sent for as little as can be: the server is what takes the time.

Headers are encoded once: a connection begins with a request of each method, after which each has a few bytes that mean it.
"""

import asyncio
import random
from contextlib import suppress
from pathlib import Path

import anyio
from h2.config import H2Configuration
from h2.connection import H2Connection
from hpack import Encoder

from gpu_plugin.kubelet import messages, wire
from tests.unit.kubelet.peer import REQUEST
from tests.unit.kubelet.serving import devices

METHODS = (wire.ALLOCATE, wire.PREFERRED, wire.PRE_START, wire.OPTIONS, "/v1beta1.DevicePlugin/None")
GOOD = bytes(messages.AllocateRequest([messages.ContainerAllocateRequest([devices(1)[0].id])]))

AT_ONCE = 50
"""Requests of a connection that are not answered yet; a kubelet may have 100."""

DATA, HEADERS, GOAWAY, WINDOW = 0, 1, 7, 8
END_STREAM, END_HEADERS = 1, 4
WIDEST = (1 << 31) - 1 - 65_535
"""What is added to a connection's window at its beginning, so that it need not be widened later."""


def http2_frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    """RFC 9113, 4.1: length, type, flags, stream, and what it carries."""
    return b"".join((len(body).to_bytes(3, "big"), bytes((kind, flags)), stream.to_bytes(4, "big"), body))


def _greeting() -> bytes:
    peer = H2Connection(H2Configuration(client_side=True))
    peer.initiate_connection()
    return peer.data_to_send()


def _headers() -> tuple[list[bytes], dict[str, bytes]]:
    """What a connection must begin with, a block each, and by method what says the same ever after."""
    encoder = Encoder()
    each = {method: [(k, method if k == ":path" else v) for k, v in REQUEST] for method in METHODS}
    first = [encoder.encode(headers) for headers in each.values()]
    return first, {method: encoder.encode(headers) for method, headers in each.items()}


GREETING = _greeting()
FIRST, AGAIN = _headers()


def request(dice: random.Random) -> tuple[str, bytes]:
    """A call and the bytes of its request: none, random ones, or right ones with something wrong."""
    method = dice.choice(METHODS)
    good = bytearray(GOOD)
    match dice.randrange(4):
        case 0:
            return method, dice.randbytes(dice.randrange(64))
        case 1:
            good[dice.randrange(len(good))] ^= 1 << dice.randrange(8)
        case 2:
            del good[dice.randrange(len(good)) :]
    return method, bytes(good)


def malformed(dice: random.Random) -> bytes:
    """What a peer says after a good beginning: a frame with a wrong length, type, flag, stream or body, or pure noise."""
    if dice.random() < 0.1:
        return dice.randbytes(dice.randrange(200))
    begun = GREETING
    if dice.random() < 0.3:
        begun += http2_frame(HEADERS, END_HEADERS, 1, FIRST[0])
    body = dice.randbytes(dice.randrange(40))
    declared = len(body) if dice.random() < 0.8 else dice.randrange(1 << 24)
    head = declared.to_bytes(3, "big") + bytes((dice.choice([*range(12), dice.randrange(256)]), dice.randrange(256)))
    return begun + head + dice.choice([0, 1, 2, 3, dice.getrandbits(31)]).to_bytes(4, "big") + body


class _Answers:
    """Counts the answers in what a server sends."""

    def __init__(self) -> None:
        self.ended = 0
        self._rest = b""

    def take(self, data: bytes) -> None:
        data = self._rest + data
        at = 0
        while len(data) >= at + 9 and len(data) >= (end := at + 9 + int.from_bytes(data[at : at + 3], "big")):
            assert data[at + 3] != GOAWAY, "a request that was wrong ended the connection"
            self.ended += data[at + 3] in (DATA, HEADERS) and bool(data[at + 4] & END_STREAM)
            at = end
        self._rest = data[at:]


async def ask(path: Path, dice: random.Random, many: int) -> int:
    """Makes so many requests on one connection; how many were answered."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(GREETING + http2_frame(WINDOW, 0, 0, WIDEST.to_bytes(4, "big")))
    stream, answers, asked = 1, _Answers(), 0
    while asked < many:
        said = []
        for _ in range(min(AT_ONCE, many - asked)):
            method, body = request(dice)
            block = AGAIN[method]
            if asked < len(FIRST):
                block = FIRST[asked]
            said.append(http2_frame(HEADERS, END_HEADERS, stream, block))
            said.append(http2_frame(DATA, END_STREAM, stream, b"\0" + len(body).to_bytes(4, "big") + body))
            stream += 2
            asked += 1
        writer.write(b"".join(said))
        while answers.ended < asked:
            data = await asyncio.wait_for(reader.read(1 << 16), 30)
            assert data, "a request that was wrong ended the connection"
            answers.take(data)
    writer.close()
    return answers.ended


async def break_in(path: Path, dice: random.Random, many: int) -> None:
    """Sends so many malformed frames, each on a connection of its own."""
    for _ in range(many):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(malformed(dice))
        writer.write_eof()
        with suppress(ConnectionError):  # the server hung up on it, as it may
            await asyncio.wait_for(reader.read(), 5)
        writer.close()


async def make_noise(path: Path, dice: random.Random, requests: int, frames: int) -> int:
    """So many requests on a few connections that last, and so many frames. Returns how many requests were answered."""
    answered = 0

    async def count(many: int) -> None:
        nonlocal answered
        mine = await ask(path, dice, many)
        answered += mine

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(count, requests // 4)
            tasks.start_soon(break_in, path, dice, frames // 4)
    return answered
