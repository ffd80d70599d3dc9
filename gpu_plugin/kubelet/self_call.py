"""A call of our own server, the way the kubelet makes it: whether a resource's socket takes connections and is answered on."""

from pathlib import Path

from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.bounded_channel import CallError, call
from gpu_plugin.kubelet.server import OUT_OF_RESOURCES

PATIENCE = 2.0
"""Seconds that our own server may take to answer."""


class ShortageError(Exception):
    """The call cannot be made: it lacks a descriptor or memory. Says nothing of the socket."""


async def self_call(socket: Path, patience: float = PATIENCE) -> str:
    """Why nobody answers GetDevicePluginOptions on `socket` within `patience` seconds; empty where somebody does.

    Takes a connection of its own, which is closed again. It opens no ListAndWatch, so the server does not take it for a
    kubelet's.

    Raises:
        ShortageError: it could not be asked.
    """
    try:
        await call(socket, wire.OPTIONS, wire.EMPTY, patience, "it")
    except CallError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in OUT_OF_RESOURCES:
            raise ShortageError(cause.strerror) from None
        return str(error)
    return ""
