"""The processes of the node: containerd with the runc shim and a bridge network for pods, and the kubelet."""

import json
import secrets
from pathlib import Path
from typing import ClassVar

from . import cgroups, tunables
from .binaries import Binaries
from .control_plane import Credentials, check_http
from .image import IMAGE, write_busybox
from .layout import BRIDGE, CGROUP, DEVICE_PLUGINS, NETWORK, NODE, POD_SUBNET, SERVICE_SUBNET, Layout, Ports
from .process import Piece, PieceError, run
from .wait import NotYet

# The configuration moves all files that containerd would write to shared places into the cluster's directory.
CONTAINERD_CONFIG = """\
version = 3
root = "{layout.containerd}"
state = "{layout.containerd_state}"
temp = "{layout.root}/tmp"

[grpc]
  address = "{layout.containerd_socket}"

[plugins.'io.containerd.shim.v1.manager']
  socket_dir = "{layout.root}/run/s"

[plugins.'io.containerd.internal.v1.opt']
  path = "{layout.root}/opt"

[plugins.'io.containerd.nri.v1.nri']
  disable = true

[plugins.'io.containerd.cri.v1.images']
  snapshotter = "{snapshotter}"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{image}"

[plugins.'io.containerd.cri.v1.runtime']
  # A machine without CAP_SYS_RESOURCE cannot give a container a negative oom_score_adj, and runc then fails.
  restrict_oom_score_adj = true
  disable_apparmor = true
  netns_mounts_under_state_dir = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi", "{layout.cdi}"]
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "runc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      snapshotter = "{snapshotter}"
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = "{runc}"
        Root = "{layout.root}/run/runc"
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{cni}"]
    conf_dir = "{layout.cni}"
    use_internal_loopback = true
"""


class Containerd(Piece):
    """containerd. Its shims and containers outlive it, as on any node."""

    name: ClassVar[str] = "containerd"

    def __init__(self, layout: Layout, binaries: Binaries) -> None:
        super().__init__(layout)
        self._binaries = binaries

    def command(self) -> list[str]:
        return [self._binaries.containerd("containerd"), "--config", str(self._config)]

    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self._binaries.containerd_directory}:/usr/sbin:/usr/bin:/sbin:/bin"}

    def prepare(self) -> None:
        self.layout.cni.mkdir(parents=True, exist_ok=True)
        (self.layout.cni / f"{NETWORK}.conflist").write_text(json.dumps(_network(self.layout)))
        self._config.write_text(
            CONTAINERD_CONFIG.format(
                layout=self.layout,
                image=IMAGE,
                snapshotter="overlayfs",
                runc=self._binaries.runc,
                cni=self._binaries.cni,
            )
        )

    def check_ready(self) -> None:
        try:
            services = self.ctr("plugins", "list")
        except PieceError as error:
            raise NotYet(str(error)) from error
        state = {fields[1]: fields[-1] for fields in map(str.split, services.splitlines()) if len(fields) > 2}
        if state.get("cri") != "ok":
            raise NotYet(f"its CRI service is {state.get('cri', 'not there')}")

    def import_image(self) -> None:
        """Create the image of all pods and sandboxes, and import it into containerd."""
        archive = self.layout.root / "image.tar"
        write_busybox(archive, busybox=self._binaries.busybox)
        self.import_archive(archive)

    def import_archive(self, archive: Path) -> None:
        """Import an image (`image.write_directory`) into containerd."""
        self.ctr("images", "import", "--snapshotter", "overlayfs", str(archive))

    def execute(self, container_id: str, command: list[str]) -> str:
        """Run a program inside a running container and return its standard output.

        Raises:
            PieceError: the container does not exist, or the program's exit status was not 0.
        """
        fifos = str(self.layout.root / "run" / "fifo")
        return self.ctr("tasks", "exec", "--exec-id", secrets.token_hex(8), "--fifo-dir", fifos, container_id, *command)

    def ctr(self, *arguments: str) -> str:
        """Run containerd's command line (ctr) in the kubelet's namespace."""
        socket = str(self.layout.containerd_socket)
        return run([self._binaries.containerd("ctr"), "--address", socket, "--namespace", "k8s.io", *arguments])

    @property
    def _config(self) -> Path:
        return self.layout.root / "containerd.toml"


def _network(layout: Layout) -> dict[str, object]:
    # Pods reach the node, which calls their probes, and the API server by its service's address. There is no masquerading, and
    # no address outside is reachable.
    address = {
        "type": "host-local",
        "ranges": [[{"subnet": POD_SUBNET}]],
        "routes": [{"dst": SERVICE_SUBNET}],
        "dataDir": str(layout.root / "cni-addresses"),
    }
    return {
        "cniVersion": "1.0.0",
        "name": NETWORK,
        "plugins": [{"type": "bridge", "bridge": BRIDGE, "isGateway": True, "ipMasq": False, "ipam": address}],
    }


def foreign_files(layout: Layout) -> str:
    """Return why no kubelet may start: the machine's only device plugin directory is in use. Empty if a kubelet may start."""
    if layout.owns_device_plugins.exists() or not DEVICE_PLUGINS.is_dir() or not any(DEVICE_PLUGINS.iterdir()):
        return ""
    return f"{DEVICE_PLUGINS} holds files of another kubelet or plugin; stop them and empty it: two cannot share it"


class Kubelet(Piece):
    """The kubelet. A test may change its `topology_manager_policy`, which the next start applies."""

    name: ClassVar[str] = "kubelet"

    def __init__(self, layout: Layout, binaries: Binaries, ports: Ports, credentials: Credentials) -> None:
        super().__init__(layout)
        self._binaries = binaries
        self._ports = ports
        self._credentials = credentials
        self.topology_manager_policy = "none"

    def command(self) -> list[str]:
        return [
            self._binaries.kubernetes(self.name),
            f"--config={self._config}",
            f"--kubeconfig={self._credentials.kubeconfig('node', self._credentials.node)}",
            f"--root-dir={self.layout.kubelet}",
            f"--cert-dir={self.layout.credentials / 'kubelet'}",
            f"--hostname-override={NODE}",
            "--v=2",
        ]

    def prepare(self) -> None:
        if strangers := foreign_files(self.layout):
            raise PieceError(strangers)
        self.layout.owns_device_plugins.touch()
        cgroups.create()
        tunables.save(self.layout)
        self._config.write_text(json.dumps(self._configuration(), indent=1))

    def check_ready(self) -> None:
        check_http(self._ports.kubelet_healthz, "/healthz", expected="ok")

    @property
    def _config(self) -> Path:
        return self.layout.root / "kubelet.json"

    def _configuration(self) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": self._ports.kubelet,
            "healthzBindAddress": "127.0.0.1",
            "healthzPort": self._ports.kubelet_healthz,
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}},
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{self.layout.containerd_socket}",
            "podLogsDir": str(self.layout.pod_logs),
            "staticPodPath": "",
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": True,
            "cgroupRoot": f"/{CGROUP}",
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "failCgroupV1": False,  # still found on small virtual machines
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            "topologyManagerPolicy": self.topology_manager_policy,
            "evictionHard": {"memory.available": "1Mi"},
            "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "1s",
            "nodeStatusReportFrequency": "1s",
            "syncFrequency": "10s",
            "maxPods": 200,
            "serializeImagePulls": False,
            "registryPullQPS": 0,
            "eventRecordQPS": 0,
            "kubeAPIQPS": 200,
            "kubeAPIBurst": 400,
        }
