"""The one message of a request, read within bounds: grpclib would believe any length, and takes no compression."""

import struct

from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

LONGEST = 8 * 1024 * 1024
"""Bytes of a request. A kubelet's names the ids of one resource twice at most, as available and as to be included; the list that
it has them from has no more than 4 MiB, with more than the ids in it."""


async def received(stream: Stream[bytes, bytes], longest: int = LONGEST) -> bytes:
    """The message of a request.

    Raises GRPCError: it is compressed, has more than `longest` bytes, or ends before it is whole.
    """
    try:
        head = await stream._stream.recv_data(5)  # noqa: SLF001 - what grpclib reads itself has no bounds
        if len(head) < 5:
            raise GRPCError(Status.INVALID_ARGUMENT, "the request ended before its message")
        compressed, size = struct.unpack(">BI", head)
        if compressed:
            raise GRPCError(Status.UNIMPLEMENTED, "only uncompressed messages are accepted")
        if size > longest:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, f"a message of {size} bytes is longer than {longest}")
        data = await stream._stream.recv_data(size)  # noqa: SLF001
    except AssertionError:  # what grpclib makes of a stream that ends too early
        raise GRPCError(Status.INVALID_ARGUMENT, "the request ended within its message") from None
    if len(data) < size:
        raise GRPCError(Status.INVALID_ARGUMENT, "the request ended within its message")
    return data
