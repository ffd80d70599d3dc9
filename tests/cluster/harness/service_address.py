"""The address of the service `kubernetes`, through which pods reach the API server. The cluster has no kube-proxy."""

import socket
from typing import ClassVar

from .binaries import Binaries
from .layout import SERVICE_ADDRESS, SERVICE_BRIDGE, Layout, Ports
from .process import Piece, run
from .wait import NotYet


class ServiceAddress(Piece):
    """Forwards port 443 of the service's address to the API server on 127.0.0.1."""

    name: ClassVar[str] = "service-address"

    def __init__(self, layout: Layout, binaries: Binaries, ports: Ports) -> None:
        super().__init__(layout)
        self._socat = binaries.socat
        self._ports = ports

    def command(self) -> list[str]:
        listen = f"TCP-LISTEN:443,bind={SERVICE_ADDRESS},fork,reuseaddr"
        return [str(self._socat), listen, f"TCP:127.0.0.1:{self._ports.apiserver}"]

    def prepare(self) -> None:
        """Add the address to this machine."""
        if not any(name == SERVICE_BRIDGE for _, name in socket.if_nameindex()):
            run(["ip", "link", "add", SERVICE_BRIDGE, "type", "bridge"])
            run(["ip", "address", "add", f"{SERVICE_ADDRESS}/32", "dev", SERVICE_BRIDGE])
            run(["ip", "link", "set", SERVICE_BRIDGE, "up"])

    def check_ready(self) -> None:
        try:
            socket.create_connection((SERVICE_ADDRESS, 443), timeout=5).close()
        except OSError as error:
            raise NotYet(f"{SERVICE_ADDRESS}: {error}") from error
