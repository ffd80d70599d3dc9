"""The facts of a node: the only input of the checks. Immutable.

Paths are as in this process's file system. A fact that could not be gathered, or not in time, is an `Unknown`.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec

from gpu_plugin.config.settings import Settings
from gpu_plugin.containers.strategy_choice import NodeEvidence
from gpu_plugin.devices.absent import no_gpu
from gpu_plugin.health.observation import Fabric


class Unknown(msgspec.Struct, frozen=True):
    """`why` a fact is not known, as a sentence. `hung` is True if its probe did not answer in time."""

    why: str
    hung: bool = False


T = TypeVar("T")

Known: TypeAlias = T | Unknown


class Process(msgspec.Struct, frozen=True):
    """This process. `capabilities` is CapEff of proc(5), `seccomp` its mode there: 0 off, 1 strict, 2 a filter.

    `selinux` is enforcing, permissive, or empty if it is off. `label` is the process's label under SELinux or AppArmor.
    `host_processes` is True if the process can see the node's other processes.
    """

    uid: int
    capabilities: int
    seccomp: int
    no_new_privileges: bool
    contained: bool
    read_only_root: bool
    selinux: str
    label: str
    host_processes: bool


class Gpu(msgspec.Struct, frozen=True):
    """The driver's values of one GPU, None for a value that it does not report. `trouble` is the driver's error, empty for none.

    `mig_pending` is the MIG mode after the next reset if it changes then, `vgpu_licensed` whether a vGPU has its license.
    `compute_mode` is nvmlComputeMode_t. `nvswitch` is True if an NVLink of the GPU leads to a switch. `fabric` is None for a GPU
    without NVLinks, such as a GPU that was passed through alone: it has no fabric to wait for, even if the driver reports one.
    """

    index: int
    uuid: str = ""
    bus_id: str = ""
    minor: int | None = None
    model: str = ""
    mig: bool = False
    mig_pending: bool | None = None
    vgpu_licensed: bool | None = None
    persistence: bool | None = None
    fabric: Fabric | None = None
    nvswitch: bool = False
    compute_mode: int | None = None
    trouble: str = ""


class Driver(msgspec.Struct, frozen=True):
    """The result of opening the driver's library: `code` is the nvmlReturn_t, `trouble` its text, empty if it is open.

    `library` is the path of the loaded file, empty for none. `version` is the version that the driver reports, or else that in
    the file's name. `platform` is nvml, wsl or tegra. `count` is the number of GPUs, -1 if the driver does not report it;
    `count_trouble` is the reason.
    """

    code: int = 0
    trouble: str = ""
    library: str = ""
    version: str = ""
    platform: str = "nvml"
    count: int = 0
    count_trouble: str = ""
    gpus: tuple[Gpu, ...] = ()


class KernelModule(msgspec.Struct, frozen=True):
    """The driver's kernel module: whether it is loaded, its version (empty if unknown), and whether nouveau is loaded."""

    loaded: bool
    version: str = ""
    nouveau: bool = False


class Pci(msgspec.Struct, frozen=True):
    """NVIDIA's GPUs and NVSwitches in sysfs: the bound kernel driver by bus id, empty if no driver is bound.

    `dxg` is True if /dev/dxg exists, through which WSL has GPUs without a PCI bus.
    """

    gpus: Mapping[str, str] = msgspec.field(default_factory=dict)
    switches: Mapping[str, str] = msgspec.field(default_factory=dict)
    dxg: bool = False


class DeviceNode(msgspec.Struct, frozen=True):
    """A path under /dev. `major` is None if it is not a character device.

    `error` is the errno of opening it, 0 if that worked, and `reason` the system's text for it. `error` is None if the device
    was not opened, and `why` is the reason.
    """

    path: str
    there: bool = False
    major: int | None = None
    minor: int | None = None
    mode: int = 0
    error: int | None = None
    reason: str = ""
    why: str = ""


class DeviceNodes(msgspec.Struct, frozen=True):
    """Device nodes by path, and the majors of character devices by their driver's name (/proc/devices)."""

    nodes: Mapping[str, DeviceNode] = msgspec.field(default_factory=dict)
    majors: Mapping[str, int] = msgspec.field(default_factory=dict)
    imex_channels: tuple[str, ...] = ()


class Directory(msgspec.Struct, frozen=True):
    """A directory. `error` is the system's text if stat(2) failed; empty if it worked, or if there is no such directory.

    `writable` is for this process. `removed` is True if the directory was removed on the host and is still mounted here.
    `mount` and `filesystem` are the mount point and the type of its file system. `free_bytes` and `free_inodes` are -1 if the
    file system does not report them. For a missing directory, these fields and `writable` are of the nearest parent directory.
    """

    path: str
    there: bool = True
    is_directory: bool = True
    error: str = ""
    writable: bool = True
    read_only: bool = False
    removed: bool = False
    mode: int = 0o755
    mount: str = "/"
    filesystem: str = ""
    free_bytes: int = -1
    free_inodes: int = -1


class KubeletDirectory(msgspec.Struct, frozen=True):
    """The device plugin directory.

    `checkpoint` is True if it has the kubelet's checkpoint file. `others` are sockets in it that accept connections, without
    the kubelet's and this plugin's own.
    """

    directory: Directory
    checkpoint: bool = False
    others: tuple[str, ...] = ()


class Socket(msgspec.Struct, frozen=True):
    """A Unix socket. `error` is the system's text if no connection was possible, empty otherwise.

    `http2` is True if the server answers as a gRPC server does. `pid` and `program` are those of the process that listens, 0
    for a process of another container.
    """

    path: str
    there: bool = True
    is_socket: bool = True
    error: str = ""
    http2: bool = True
    pid: int = 0
    program: str = ""


class PodResources(msgspec.Struct, frozen=True):
    """The answer of the kubelet's PodResources service, and the time it took in seconds.

    `allocated` is the number of devices that pods have, `healthy` the number of devices of each resource that are healthy for
    the kubelet. `trouble` is the reason if there is no answer. `absent` is True if there is no socket.
    """

    path: str
    seconds: float = 0.0
    allocated: int = 0
    healthy: Mapping[str, int] = msgspec.field(default_factory=dict)
    trouble: str = ""
    absent: bool = False


class Daemon(msgspec.Struct, frozen=True):
    """The status of the running daemon (`NodeView.status`), None if no daemon answers; then `trouble` is the reason.

    `forbidden` is True if this process may not connect to the daemon's socket. `refused` is True if a daemon answered with an
    error, such as that it waits for another daemon; `trouble` is its text. `abandoned` is True if the socket exists and no
    process listens on it, so that the daemon was killed.
    """

    status: Mapping[str, Any] | None = None
    trouble: str = ""
    forbidden: bool = False
    refused: bool = False
    abandoned: bool = False


class Clock(msgspec.Struct, frozen=True):
    """The system's clock: Unix time in seconds, and the kernel's state of it (adjtimex(2)).

    `synchronised` is None if the kernel does not report it, and `why` is the reason. `may_be_off` is in seconds.
    """

    now: float
    synchronised: bool | None = None
    may_be_off: float = 0.0
    why: str = ""


class Mps(msgspec.Struct, frozen=True):
    """Traces of MPS: the ids and names of visible processes, and the directories of resources below the MPS root.

    The value of a directory is True if a control daemon accepts connections there.
    """

    processes: tuple[tuple[int, str], ...] = ()
    directories: Mapping[str, bool] = msgspec.field(default_factory=dict)
    root: str = ""


class Right(msgspec.Struct, frozen=True):
    """A right on the Kubernetes API, and the option that needs it.

    `namespace` is empty for a resource without a namespace, or for all namespaces.
    """

    verb: str
    resource: str
    needed_by: str
    subresource: str = ""
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        """Return the right as a ClusterRole names it, such as patch on nodes/status."""
        resource = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        return f"{self.verb} on {resource}" + (f" in namespace {self.namespace}" if self.namespace else "")


class Api(msgspec.Struct, frozen=True):
    """The Kubernetes API: its address, the time of its answer in seconds, and the `asked` rights that are `missing`.

    `trouble` is the reason if it did not answer. It is empty if it answered, or if no option needs it (then `asked` is empty).
    """

    asked: tuple[Right, ...] = ()
    server: str = ""
    seconds: float = 0.0
    missing: tuple[Right, ...] = ()
    trouble: str = ""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts.

    `file` is the config file of `settings`, in addition to flags and environment; empty for none. `configuration` is the error
    in the config file if `settings` come from flags and environment alone; an `Unknown` if the file could not be read in time.
    `fabric_manager` is a trace of nvidia-fabricmanager, a process or its socket's path, empty for none. `released` are the GPUs
    that an operator has released for maintenance.
    """

    settings: Settings
    configuration: Known[str] = ""
    file: str = ""
    process: Known[Process]
    daemon: Known[Daemon]
    module: Known[KernelModule]
    driver: Known[Driver]
    pci: Known[Pci]
    nodes: Known[DeviceNodes]
    kubelet_directory: Known[KubeletDirectory]
    kubelet_socket: Known[Socket] | None = None
    pod_resources: Known[PodResources]
    evidence: Known[NodeEvidence]
    cdi_directory: Known[Directory]
    cdi_conflicts: Known[tuple[str, ...]] = ()
    state: Known[Directory]
    features: Known[Directory]
    clock: Known[Clock]
    fabric_manager: Known[str]
    mps: Known[Mps]
    api: Known[Api]
    released: Known[tuple[str, ...]] = ()

    @property
    def simulated(self) -> bool:
        """True if the node's GPUs are simulated."""
        return bool(self.settings.simulate)

    @property
    def no_gpu(self) -> str:
        """The reason why this node need not have a GPU, for people; empty if there may be a GPU, or that is not known."""
        if isinstance(self.pci, Unknown) or isinstance(self.module, Unknown):
            return ""
        if self.module.loaded and not self.pci.gpus and not self.simulated:
            return ""  # the module loads only where it finds a GPU, so a GPU has fallen off the bus
        if not isinstance(self.driver, Unknown) and self.driver.platform != "nvml":
            return ""
        if not isinstance(self.daemon, Unknown) and (self.daemon.status or {}).get("missing"):
            return ""  # the daemon knows GPUs of this node that are missing now
        return no_gpu(self.pci.gpus, (), ("/dev/dxg",) if self.pci.dxg else ())

    @property
    def opened(self) -> Driver | None:
        """The driver if it is open and its GPUs can be queried, else None."""
        if isinstance(self.driver, Unknown) or self.driver.trouble or self.driver.platform != "nvml":
            return None
        return self.driver
