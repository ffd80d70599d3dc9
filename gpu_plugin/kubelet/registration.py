"""One call of the kubelet's Registration.Register."""

from collections.abc import Callable
from pathlib import Path

from grpclib.client import UnaryUnaryMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.bounded_channel import BoundedChannel

DEADLINE = 15.0
"""Seconds. The kubelet itself allows 10 s for dialling us back: waiting longer lets its own words reach us."""


MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""What is read of a kubelet's answer, which is empty or a sentence."""


class RegistrationError(Exception):
    """The kubelet did not take our registration; the text says why, in its words where it had any."""


async def register(
    kubelet_socket: Path,
    endpoint: str,
    resource: str,
    listening: Callable[[], bool],
    deadline: float = DEADLINE,
) -> None:
    """Registers `resource` with the kubelet, to be served on the socket named `endpoint` beside the kubelet's.

    Our server must be answering already: the kubelet dials it before it answers us. A kubelet that starts removes all
    sockets first and listens after, so once it has taken our connection, `listening` tells whether ours was among them;
    asked to dial one that is gone, it would try for 10 s.

    Raises:
        RegistrationError: it refused, could not be reached, or did not answer within `deadline` seconds.
    """
    channel = BoundedChannel(str(kubelet_socket), MAX_ANSWER_BYTES)
    try:
        await channel.__connect__()
        if not listening():
            raise RegistrationError("our socket went while the kubelet was starting")
        call: UnaryUnaryMethod[bytes, bytes] = UnaryUnaryMethod(channel, wire.REGISTER, bytes, bytes)
        await call(wire.encode_register(endpoint, resource, pre_start=False, preferred=True), timeout=deadline)
    except GRPCError as error:
        if error.status is Status.DEADLINE_EXCEEDED and not error.message:
            raise RegistrationError(f"the kubelet did not answer within {deadline:g} s") from None
        raise RegistrationError(f"the kubelet refused: {error.message or error.status.name}") from None
    except TimeoutError:
        raise RegistrationError(f"the kubelet did not answer within {deadline:g} s") from None
    except (StreamTerminatedError, ProtocolError) as error:
        raise RegistrationError(f"the kubelet ended the call: {channel.fault or error}") from None
    except OSError as error:
        raise RegistrationError(f"nobody answers on {kubelet_socket}: {error.strerror or error}") from None
    except RegistrationError:
        raise
    except Exception as error:  # what hangs up or does not speak gRPC meets h2's and grpclib's own assertions
        raise RegistrationError(f"{kubelet_socket} does not answer as a kubelet does: {error!r}") from error
    finally:
        channel.close()
