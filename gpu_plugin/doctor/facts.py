"""What was seen of a node: the only input of the checks. Immutable.

Paths are as this process sees them. A fact that could not be gathered in time, or at all, is an `Unknown`.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec

from gpu_plugin.config.settings import Settings
from gpu_plugin.containers.strategy_choice import NodeEvidence
from gpu_plugin.devices.absent import no_gpu
from gpu_plugin.health.observation import Fabric


class Unknown(msgspec.Struct, frozen=True):
    """`why` a fact is not known, as a sentence. `hung`: whoever was asked has not answered in time."""

    why: str
    hung: bool = False


T = TypeVar("T")

Known: TypeAlias = T | Unknown


class Process(msgspec.Struct, frozen=True):
    """This process. `capabilities` is CapEff of proc(5), `seccomp` its mode there: 0 off, 1 strict, 2 a filter.

    `selinux` is enforcing, permissive, or empty where it is off; `label` is the process's own under SELinux or AppArmor.
    `host_processes`: the node's other processes can be seen.
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
    """What the driver says of one GPU; None where it does not say. `trouble` is why it could not be asked, empty where it could.

    `mig_pending` is the MIG mode after the next reset if it changes then, `vgpu_licensed` whether a vGPU has its license.
    `compute_mode` is nvmlComputeMode_t; `nvswitch` whether an NVLink of it leads to a switch. `fabric` is None of a GPU without
    NVLinks, such as one that was passed through alone: it has none to wait for, whatever the driver says.
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
    """The driver's library as it was opened. `code` is nvmlReturn_t of the attempt, `trouble` its text, empty where it is open.

    `library` is the file that was loaded, empty for none; `version` what the driver says of itself, else what the name of the
    file says. `platform` is nvml, wsl or tegra. `count` is how many GPUs it counts; -1 where it does not say, and `count_trouble`
    is why.
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
    """The driver's half in the kernel: whether it is loaded, its version (empty: not said), and whether nouveau is loaded."""

    loaded: bool
    version: str = ""
    nouveau: bool = False


class Pci(msgspec.Struct, frozen=True):
    """NVIDIA's GPUs and NVSwitches that sysfs lists: by bus id the kernel driver that is bound to each, empty for none.

    `dxg`: /dev/dxg exists, which gives WSL its GPUs without a PCI bus.
    """

    gpus: Mapping[str, str] = msgspec.field(default_factory=dict)
    switches: Mapping[str, str] = msgspec.field(default_factory=dict)
    dxg: bool = False


class DeviceNode(msgspec.Struct, frozen=True):
    """A path under /dev. `major` is None where there is no character device; `error` is errno of opening it, 0 if that worked.

    `reason` is that error in the system's words. `error` is None where it was not opened, and `why` says why not.
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
    """A directory. `error` is why it cannot be looked at, in the system's words; empty where it can, or is not there.

    `writable` is by this process. `removed`: it was removed on the host and is still mounted here. `mount` and `filesystem` are
    the mount point and the type of what it lies on; `free_bytes` and `free_inodes` are -1 where that file system does not say.
    Of one that is not there they are those of the nearest one above it, as is `writable`.
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

    `checkpoint`: the kubelet's file is in it. `others` are sockets there that are neither the kubelet's nor ours and take
    connections.
    """

    directory: Directory
    checkpoint: bool = False
    others: tuple[str, ...] = ()


class Socket(msgspec.Struct, frozen=True):
    """A Unix socket. `error` is why nobody could be reached there, in the system's words, empty where somebody was.

    `http2`: what answers begins as a gRPC server does. `pid` and `program` are the process that listens, as far as the kernel
    tells: 0 for one of another container.
    """

    path: str
    there: bool = True
    is_socket: bool = True
    error: str = ""
    http2: bool = True
    pid: int = 0
    program: str = ""


class PodResources(msgspec.Struct, frozen=True):
    """What the kubelet's PodResources service answers, and in how many seconds.

    `allocated` is how many devices pods have, `healthy` how many of each resource the kubelet takes for healthy. `trouble` is
    why it does not answer; `absent`: there is no socket.
    """

    path: str
    seconds: float = 0.0
    allocated: int = 0
    healthy: Mapping[str, int] = msgspec.field(default_factory=dict)
    trouble: str = ""
    absent: bool = False


class Daemon(msgspec.Struct, frozen=True):
    """What the running daemon's status says (`NodeView.status`); None where none answers, and `trouble` is why.

    `forbidden`: its socket is there, or may be, and this process may not talk to it. `refused`: one answers, and `trouble` is its
    own word, such as that it waits for another one. `abandoned`: its socket is there and nobody is behind it, so it did not end
    of itself.
    """

    status: Mapping[str, Any] | None = None
    trouble: str = ""
    forbidden: bool = False
    refused: bool = False
    abandoned: bool = False


class Clock(msgspec.Struct, frozen=True):
    """The system's clock: Unix time in seconds, and what the kernel says of it (adjtimex(2)).

    `synchronised` is None where the kernel does not say, and `why` is why; `may_be_off` is in seconds.
    """

    now: float
    synchronised: bool | None = None
    may_be_off: float = 0.0
    why: str = ""


class Mps(msgspec.Struct, frozen=True):
    """Traces of MPS: processes that can be seen by id and name, and the directories of resources below the MPS root.

    Of each directory it is known whether a control daemon takes connections there.
    """

    processes: tuple[tuple[int, str], ...] = ()
    directories: Mapping[str, bool] = msgspec.field(default_factory=dict)
    root: str = ""


class Right(msgspec.Struct, frozen=True):
    """Something that the Kubernetes API is asked whether we may do, and the option that needs it.

    `namespace` is empty for what is in none, or for all namespaces.
    """

    verb: str
    resource: str
    needed_by: str
    subresource: str = ""
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        """As a ClusterRole names it, such as patch on nodes/status."""
        resource = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        return f"{self.verb} on {resource}" + (f" in namespace {self.namespace}" if self.namespace else "")


class Api(msgspec.Struct, frozen=True):
    """The Kubernetes API: where and in how many seconds it answered, and which rights it says that we do not have.

    `trouble` is why it could not be asked; empty where it could, or where no option needs it (then `asked` is empty).
    """

    asked: tuple[Right, ...] = ()
    server: str = ""
    seconds: float = 0.0
    missing: tuple[Right, ...] = ()
    trouble: str = ""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything.

    `file` is the config file that `settings` come from, besides flags and environment; empty for none. `configuration` is what is
    wrong with it, where they come from those alone; an `Unknown` where it could not be read in time.
    `fabric_manager` is a trace of nvidia-fabricmanager, a process or its socket's path, empty for none.
    `released` are the GPUs that an operator has released for maintenance.
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
        """Whether the node's GPUs are simulated."""
        return bool(self.settings.simulate)

    @property
    def no_gpu(self) -> str:
        """The reason why no GPU is to be expected on this node, for people; empty if there may be a GPU, or that is not known."""
        if isinstance(self.pci, Unknown) or isinstance(self.module, Unknown):
            return ""
        if self.module.loaded and not self.pci.gpus and not self.simulated:
            return ""  # the module loads only where it finds a GPU, so a GPU has fallen off the bus
        if not isinstance(self.driver, Unknown) and self.driver.platform != "nvml":
            return ""
        if not isinstance(self.daemon, Unknown) and (self.daemon.status or {}).get("missing"):
            return ""  # the daemon remembers GPUs of this node
        return no_gpu(self.pci.gpus, (), ("/dev/dxg",) if self.pci.dxg else ())

    @property
    def opened(self) -> Driver | None:
        """The driver where it is open and serves GPUs that can be asked."""
        if isinstance(self.driver, Unknown) or self.driver.trouble or self.driver.platform != "nvml":
            return None
        return self.driver
