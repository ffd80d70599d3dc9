"""Call our own server as the kubelet does, to check that a resource's socket accepts connections and answers."""

from pathlib import Path

from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.bounded_channel import CallError, call
from gpu_plugin.kubelet.server import OUT_OF_RESOURCES

PATIENCE = 2.0  # seconds to wait for our own server


class ShortageError(Exception):
    """The call cannot be made for lack of a file descriptor or memory. The state of the socket is not known."""


async def self_call(socket: Path, patience: float = PATIENCE) -> str:
    """Call GetDevicePluginOptions on `socket`, and return why there is no answer within `patience` seconds; empty if there is.

    The call opens a connection of its own and closes it. It opens no ListAndWatch stream, so the server does not count it as the
    kubelet.

    Raises:
        ShortageError: the process lacks a file descriptor or memory for the call.
    """
    try:
        await call(socket, wire.OPTIONS, wire.EMPTY, patience, "it")
    except CallError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in OUT_OF_RESOURCES:
            raise ShortageError(cause.strerror) from None
        return str(error)
    return ""
