"""A call of our own server, the way the kubelet makes it: whether a resource's socket takes connections and is answered on."""

from pathlib import Path

from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.codec import BytesCodec
from gpu_plugin.kubelet.server import OUT_OF_RESOURCES

PATIENCE = 2.0
"""Seconds that our own server may take to answer."""


class ShortageError(Exception):
    """The call cannot be made: it lacks a descriptor or memory. Says nothing of the socket."""


async def self_call(socket: Path, patience: float = PATIENCE) -> str:
    """Why nobody answers GetDevicePluginOptions on `socket` within `patience` seconds; empty where somebody does.

    Takes a connection of its own, which is closed again. It opens no ListAndWatch, so the server does not take it for a
    kubelet's. To be run in a task of its own: when a connection breaks, grpclib cancels the task that waits on it.

    Raises:
        ShortageError: it could not be asked.
    """
    channel = Channel(path=str(socket), codec=BytesCodec())
    try:
        call: UnaryUnaryMethod[bytes, bytes] = UnaryUnaryMethod(channel, wire.OPTIONS, bytes, bytes)
        await call(wire.EMPTY, timeout=patience)
    except TimeoutError:
        return f"no answer within {patience:g} s"
    except GRPCError as error:
        return f"the answer is {error.status.name}: {error.message or 'no reason given'}"
    except (StreamTerminatedError, ProtocolError) as error:
        return f"the connection broke: {error}"
    except OSError as error:
        if error.errno in OUT_OF_RESOURCES:
            raise ShortageError(error.strerror) from None
        return f"no connection: {error.strerror or error}"
    finally:
        channel.close()
    return ""
