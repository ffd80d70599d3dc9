"""The paths of the cluster's files, and the ports it listens on.

The cluster always uses the same directory, owned by root, so that a run can find and remove the files of a killed run. Only the
device plugin directory is outside: no option of the kubelet changes its path.
"""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/var/lib/gpu-plugin-e2e")
LOCK = Path("/run/gpu-plugin-e2e.lock")
DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
KUBELET_SOCKET = "kubelet.sock"

NODE = "node-1"
BRIDGE = "gpu-e2e0"
SERVICE_BRIDGE = "gpu-e2e1"
"""A bridge without ports, which has only the service's address. The CNI plugin needs its own bridge for itself."""
NETWORK = "gpu-plugin-e2e"
POD_SUBNET = "10.253.0.0/16"
SERVICE_SUBNET = "10.254.0.0/24"
SERVICE_ADDRESS = "10.254.0.1"
"""The first address of the range. The API server assigns it to the service `kubernetes`."""
CGROUP = "gpu-plugin-e2e"

MARK = "GPU_PLUGIN_E2E"
"""Environment variable of every process of the cluster, by which a later run recognises the processes."""


@dataclass(frozen=True)
class Layout:
    """Directories and files of the cluster, below one root."""

    root: Path = ROOT

    @property
    def logs(self) -> Path:
        """The directory with a log file for each process. A restart appends to the file."""
        return self.root / "logs"

    @property
    def etcd(self) -> Path:
        return self.root / "etcd"

    @property
    def credentials(self) -> Path:
        """Certificates, tokens, kubeconfig files and the service account key."""
        return self.root / "credentials"

    @property
    def ca(self) -> Path:
        """The API server's certificate chain, which the server writes at its first start."""
        return self.credentials / "apiserver.crt"

    @property
    def kubelet(self) -> Path:
        """The kubelet's --root-dir."""
        return self.root / "kubelet"

    @property
    def pod_resources(self) -> Path:
        """The socket of the kubelet's PodResources service, below the kubelet's root directory."""
        return self.kubelet / "pod-resources" / "kubelet.sock"

    @property
    def pod_logs(self) -> Path:
        return self.root / "pod-logs"

    @property
    def containerd(self) -> Path:
        return self.root / "containerd"

    @property
    def containerd_socket(self) -> Path:
        return self.root / "run" / "containerd.sock"

    @property
    def containerd_state(self) -> Path:
        return self.root / "run" / "containerd"

    @property
    def tasks(self) -> Path:
        """containerd's directory with a bundle for each running container."""
        return self.containerd_state / "io.containerd.runtime.v2.task" / "k8s.io"

    @property
    def cni(self) -> Path:
        return self.root / "cni"

    @property
    def owns_device_plugins(self) -> Path:
        """A file that exists while the content of the device plugin directory belongs to this cluster."""
        return self.root / "owns-device-plugins"

    @property
    def tunables(self) -> Path:
        """The kernel settings as they were before the first kubelet."""
        return self.root / "tunables.json"

    @property
    def plugin_states(self) -> Path:
        """The daemon's state directories, one for each simulated node that it serves."""
        return self.root / "plugin"

    @property
    def cdi(self) -> Path:
        """An additional directory in which containerd reads CDI specifications."""
        return self.root / "cdi"

    @property
    def plugin_configs(self) -> Path:
        """Config files that tests write for the daemon."""
        return self.root / "plugin-configs"


@dataclass(frozen=True)
class Ports:
    """TCP ports on 127.0.0.1, chosen once, so that a restarted process uses the same port."""

    etcd_client: int
    etcd_peer: int
    apiserver: int
    kubelet: int
    kubelet_healthz: int

    @classmethod
    def free(cls) -> "Ports":
        """Return ports without a listener.

        Raises:
            OSError: fewer than five are free.
        """
        ports = _free_ports()
        try:
            return cls(*(next(ports) for _ in range(5)))
        except StopIteration:
            raise OSError("no free TCP ports on 127.0.0.1 between 21000 and 22000") from None


def _free_ports() -> Iterator[int]:
    # Use ports below the kernel's range for outgoing connections, so that they are still free at a restart.
    for port in range(21000, 22000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port
