"""One call of the kubelet's Registration.Register."""

from collections.abc import Callable
from pathlib import Path

from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.bounded_channel import CallError, call

DEADLINE = 15.0
"""Seconds. The kubelet itself allows 10 s for dialling us back: waiting longer lets its own words reach us."""


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
        CallError: it refused, could not be reached, or did not answer within `deadline` seconds.
    """

    def connected() -> None:
        if not listening():
            raise CallError("our socket went while the kubelet was starting")

    request = wire.encode_register(endpoint, resource, pre_start=False, preferred=True)
    await call(kubelet_socket, wire.REGISTER, request, deadline, "the kubelet", connected)
