"""An HTTP server that sends one fixed answer and closes the connection. It shows the cost of asyncio itself for comparison.

Usage: python -m bench.bare_http PORT FILE
"""

import asyncio
import signal
import sys
from pathlib import Path


async def serve(port: int, answer: bytes) -> None:
    """Send these bytes to each request until SIGTERM. Prints a line once it listens."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    server = await asyncio.start_server(converse, "127.0.0.1", port)
    print("listening", flush=True)
    await ended.wait()
    server.close()


def main(arguments: list[str]) -> None:
    """Read the command line and serve."""
    port, file = arguments
    asyncio.run(serve(int(port), Path(file).read_bytes()))


if __name__ == "__main__":
    main(sys.argv[1:])
