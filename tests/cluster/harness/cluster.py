"""The whole cluster: it starts its processes in order and removes them at the end."""

import shutil
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from .api import Api
from .binaries import Binaries, cache_directory
from .control_plane import PLUGIN_USER, ApiServer, ControllerManager, Credentials, Etcd, Scheduler, grant_plugin
from .guardian import Guardian
from .layout import DEVICE_PLUGINS, KUBELET_SOCKET, NODE, Layout, Ports
from .node import Containerd, Kubelet
from .plugin import GPUS, RESOURCE, Plugin
from .pods import Pods
from .process import Piece
from .service_address import ServiceAddress
from .sweep import sweep
from .wait import expect, wait_until

NODE_PATH = f"/api/v1/nodes/{NODE}"


class Cluster:
    """One node with its control plane, as host processes on 127.0.0.1.

    A context manager: all processes run inside the context, and all are removed at its end, also after an exception.
    """

    def __init__(self, binaries: Binaries, plugin: Path) -> None:
        """Describe the cluster without starting it.

        Args:
            binaries: the programs.
            plugin: the daemon's command, `gpu-plugin`.
        """
        self.layout = layout = Layout()
        ports = Ports.free()
        self._binaries = binaries
        self._credentials = credentials = Credentials(layout, ports)
        self.api = Api(ports.apiserver, layout.ca, credentials.admin)
        self.etcd = Etcd(layout, binaries, ports)
        self.apiserver = ApiServer(layout, binaries, ports, credentials, self.api)
        self.controller_manager = ControllerManager(layout, binaries, credentials, self.api)
        self.scheduler = Scheduler(layout, binaries, credentials)
        self.service_address = ServiceAddress(layout, binaries, ports)
        self.containerd = Containerd(layout, binaries)
        self.kubelet = Kubelet(layout, binaries, ports, credentials)
        self.plugin = Plugin(layout, plugin)
        self.pods = Pods(self.api, layout, self.containerd)
        self._guardian: Guardian | None = None

    @property
    def pieces(self) -> list[Piece]:
        """All processes, in the order in which they start."""
        return [
            self.etcd,
            self.containerd,
            self.apiserver,
            self.controller_manager,
            self.scheduler,
            self.service_address,
            self.kubelet,
            self.plugin,
        ]

    def __enter__(self) -> Self:
        self._guardian = Guardian(self.layout)
        try:
            sweep(self.layout)
            self._make_directories()
            self._credentials.write()
            self._start()
        except BaseException as error:
            error.add_note(self.log_tails())
            self._clear_away()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._clear_away()

    @property
    def plugin_kubeconfig(self) -> Path:
        """A new kubeconfig file with which the daemon may read its own node."""
        return self._credentials.kubeconfig(PLUGIN_USER, self._credentials.plugin)

    @property
    def admin_kubeconfig(self) -> Path:
        """A new kubeconfig file of the administrator, for helm and kubectl."""
        return self._credentials.kubeconfig("admin", self._credentials.admin)

    @property
    def kubectl(self) -> Path:
        """The program."""
        return self._binaries.kubectl

    def label_node(self, label: str, value: str | None) -> None:
        """Set a label of the node, or remove it if `value` is None."""
        self.api.patch(NODE_PATH, {"metadata": {"labels": {label: value}}})

    def node_resources(self) -> dict[str, tuple[int, int]]:
        """Return (capacity, allocatable) by name of extended resource, from a node status that is written after this call.

        Raises:
            DeadlineError: the kubelet did not write a status in time, although it should write one every second.
        """
        asked = datetime.now(UTC)

        def fresh() -> dict[str, tuple[int, int]]:
            status = self.api.get(NODE_PATH)["status"]
            ready = next(each for each in status["conditions"] if each["type"] == "Ready")
            # The time stamp is rounded down to a second: a time stamp after the call's start is from after the call.
            expect(
                holds=datetime.fromisoformat(ready["lastHeartbeatTime"]) > asked,
                seen=f"the node status of {ready['lastHeartbeatTime']}",
            )
            capacity, allocatable = status["capacity"], status["allocatable"]
            names = {name for name in (*capacity, *allocatable) if "/" in name}
            return {name: (int(capacity.get(name, "0")), int(allocatable.get(name, "0"))) for name in names}

        return wait_until(fresh, "the kubelet writes a new node status", within=30)

    def node_gpus(self) -> tuple[int, int]:
        """Return (capacity, allocatable) of whole GPUs that are not shared, as `node_resources` does."""
        return self.node_resources().get(RESOURCE, (0, 0))

    def wait_offers(self, expected: dict[str, int], *, within: float = 30.0) -> None:
        """Wait until a new node status has exactly these extended resources allocatable. Others are missing or 0.

        Raises:
            DeadlineError: no node status had them within `within` seconds.
        """

        def offered() -> None:
            resources = self.node_resources()
            allocatable = {name: count for name, (_, count) in resources.items() if count}
            expect(holds=allocatable == expected, seen=f"(capacity, allocatable) {resources}")

        wait_until(offered, f"allocatable is {expected}", within=within)

    def wait_allocatable(self, count: int, *, within: float = 30.0) -> None:
        """Wait until a new node status has exactly `count` allocatable GPUs.

        Raises:
            DeadlineError: no node status had them within `within` seconds.
        """

        def offered() -> None:
            capacity, allocatable = self.node_gpus()
            expect(holds=allocatable == count, seen=f"capacity {capacity}, allocatable {allocatable}")

        wait_until(offered, f"{count} GPUs are allocatable", within=within)

    def start_apiserver(self) -> None:
        """Start the API server after a kill, and wait until scheduler, controllers and kubelet are connected to it again.

        A client doubles its pause between two connections up to a minute (client-go's reflector: 30 s, and up to 30 s of jitter).
        A pod may therefore wait for a minute until the scheduler is connected.

        Raises:
            DeadlineError: a pod without a GPU did not start in time.
        """
        self.apiserver.start()
        self.pods.create("probe-of-the-control-plane", gpus=0)
        self.pods.wait_running("probe-of-the-control-plane", within=120)
        self.pods.delete("probe-of-the-control-plane")

    def remove_former_resources(self) -> None:
        """Remove the resources of other tests from the node's status.

        A kubelet whose checkpoint was damaged has no record of former resources. It then reports the capacity that is still in
        the node's status as allocatable (nodestatus/setters.go, MachineInfo). A kubelet with a record of the resource lists it
        again, with 0 allocatable devices.
        """
        capacity = self.api.get(NODE_PATH)["status"]["capacity"]
        if former := dict.fromkeys(name for name in capacity if "/" in name and name != RESOURCE):
            self.api.patch(f"{NODE_PATH}/status", {"status": {"capacity": former, "allocatable": former}})

    def wait_usual(self) -> None:
        """Wait until the node offers all its whole GPUs, and the daemon has only one socket.

        Raises:
            DeadlineError: this is not so after half a minute.
        """

        def usual() -> None:
            sockets = {path.name for path in DEVICE_PLUGINS.iterdir() if path.is_socket()} - {KUBELET_SOCKET}
            gpus = self.node_gpus()
            expect(holds=gpus == (GPUS, GPUS) and len(sockets) == 1, seen=f"node {gpus}, sockets {sorted(sockets)}")

        wait_until(usual, "the node is as it was before the test", within=30)

    def log_tails(self, lines: int = 20) -> str:
        """Return the end of each process's log."""
        return "\n".join(f"=== {piece.name} ===\n{piece.log_tail(lines)}" for piece in self.pieces)

    def _start(self) -> None:
        self.etcd.start(wait=False)
        self.containerd.start(wait=False)
        self.etcd.wait_ready()
        self.apiserver.start(wait=False)
        self.containerd.wait_ready()
        self.containerd.import_image()
        self.apiserver.wait_ready()
        grant_plugin(self.api)
        self.controller_manager.start(wait=False)
        self.scheduler.start()
        self.service_address.start()
        self.kubelet.start(wait=False)
        self.plugin.start(wait=False)
        self.controller_manager.wait_ready()
        self.kubelet.wait_ready()
        self.plugin.wait_ready()
        wait_until(self._node_ready, "the node is Ready", within=60)
        self.wait_allocatable(GPUS)

    def _node_ready(self) -> None:
        expect(holds=self.api.exists(NODE_PATH), seen="the kubelet has not made its node object")
        expect(holds=self._ready_condition().get("status") == "True", seen=self._ready_condition())

    def _ready_condition(self) -> dict[str, str]:
        conditions = self.api.get(NODE_PATH)["status"].get("conditions", [])
        return next((each for each in conditions if each["type"] == "Ready"), {})

    def _make_directories(self) -> None:
        self.layout.root.mkdir(mode=0o700, parents=True)
        for directory in (self.layout.logs, self.layout.root / "tmp", self.layout.root / "run"):
            directory.mkdir()

    def _clear_away(self) -> None:
        for piece in reversed(self.pieces):
            piece.kill()
        self._keep_logs()
        assert self._guardian is not None
        self._guardian.release()

    def _keep_logs(self) -> None:
        kept = last_logs()
        shutil.rmtree(kept, ignore_errors=True)
        if self.layout.logs.is_dir():
            shutil.copytree(self.layout.logs, kept)


def last_logs() -> Path:
    """Return the directory with the logs of the last run."""
    return cache_directory() / "last-logs"
