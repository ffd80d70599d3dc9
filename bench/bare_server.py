"""A gRPC server that sends fixed bytes. It shows the cost of grpclib itself for comparison with the daemon.

Usage: python -m bench.bare_server SOCKET PATH=HEX...
"""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping

from grpclib.const import Cardinality, Handler
from grpclib.server import Server, Stream

from gpu_plugin.kubelet.codec import BytesCodec

BytesStream = Stream[bytes, bytes]


class FixedAnswers:
    """Answers each method path with its bytes."""

    def __init__(self, answers: Mapping[str, bytes]) -> None:
        self._answers = answers

    def __mapping__(self) -> dict[str, Handler]:
        """Return the handlers by path."""
        return {
            path: Handler(_answering(answer), Cardinality.UNARY_UNARY, bytes, bytes)
            for path, answer in self._answers.items()
        }


def _answering(answer: bytes) -> Callable[[BytesStream], Awaitable[None]]:
    async def handle(stream: BytesStream) -> None:
        await stream.recv_message()
        await stream.send_message(answer)

    return handle


async def serve(socket: str, answers: Mapping[str, bytes]) -> None:
    """Serve until SIGTERM. Prints a line once it listens."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    server = Server([FixedAnswers(answers)], codec=BytesCodec())
    await server.start(path=socket)
    print("listening", flush=True)
    await ended.wait()
    server.close()


def main(arguments: list[str]) -> None:
    """Read the command line and serve."""
    socket, *pairs = arguments
    answers = {path: bytes.fromhex(answer) for path, _, answer in (pair.partition("=") for pair in pairs)}
    asyncio.run(serve(socket, answers))


if __name__ == "__main__":
    main(sys.argv[1:])
