"""One call of the kubelet's Registration.Register."""

from collections.abc import Callable
from pathlib import Path

from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.bounded_channel import CallError, call

DEADLINE = 15.0
"""Seconds. The kubelet tries for 10 s to connect to us: a longer deadline lets its own error message reach us."""


async def register(
    kubelet_socket: Path,
    endpoint: str,
    resource: str,
    listening: Callable[[], bool],
    deadline: float = DEADLINE,
) -> None:
    """Register `resource` with the kubelet. `endpoint` is the name of our socket in the directory of the kubelet's socket.

    Our server must answer already: the kubelet connects to it before it answers the registration. A kubelet that starts first
    removes all sockets and then listens. So `listening` is called after the kubelet has accepted our connection, and returns
    whether our socket still exists. If it does not, nothing is sent, because the kubelet would try to connect for 10 s.

    Raises:
        CallError: our socket was removed, or the kubelet refused the call, could not be reached, or did not answer within
            `deadline` seconds.
    """

    def connected() -> None:
        if not listening():
            raise CallError("our socket was removed while the kubelet was starting")

    request = wire.encode_register(endpoint, resource, pre_start=False, preferred=True)
    await call(kubelet_socket, wire.REGISTER, request, deadline, "the kubelet", connected)
