"""The node that the checks read: each fact is read once, on a thread of its own, and with a time limit."""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, TypeVarTuple

from msgspec.structs import replace

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.settings import Settings
from gpu_plugin.containers.host_view import HostView
from gpu_plugin.containers.strategy_choice import NodeEvidence
from gpu_plugin.daemon.hardware import Hardware, hardware_for
from gpu_plugin.daemon.health_watch import EVERY_GPU
from gpu_plugin.daemon.list_strategy import evidence_for
from gpu_plugin.devices.absent import no_gpu
from gpu_plugin.devices.gpu_names import short_bus_id
from gpu_plugin.doctor.daemon import Daemon, read_daemon, released_gpus, written_releases
from gpu_plugin.doctor.driver import Driver, Gpu, KernelModule, describe_gpu, open_driver, read_module
from gpu_plugin.doctor.finding import Known, Unknown
from gpu_plugin.doctor.pod_resources import PodResources, read_pod_resources
from gpu_plugin.doctor.process import Process, read_process
from gpu_plugin.nvml.platforms.choice import Platform

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

GPU_SECONDS = 1.0  # least seconds for the queries of each GPU, even if the driver took all other time to open


class Read(threading.Thread, Generic[T]):
    """The read of a fact, under way. It has `seconds`; a read that hangs keeps its thread."""

    def __init__(self, name: str, seconds: float, read: Callable[[*Ts], Known[T]], *args: *Ts) -> None:
        super().__init__(name=f"doctor-{name}", daemon=True)
        self._call: Callable[..., Known[T]] = read
        self._arguments = args
        self.until = time.monotonic() + seconds
        self._found: Known[T] = Unknown(f"no answer within {round(seconds, 1):g} s", hung=True)
        try:
            self.start()
        except RuntimeError as error:  # the process may have no more threads
            self._found = Unknown(f"RuntimeError: {error}")

    def run(self) -> None:
        """Read the fact, on this thread."""
        try:
            self._found = self._call(*self._arguments)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            self._found = Unknown(f"{where}{error.strerror or error}")
        except Exception as error:  # noqa: BLE001 - a read that fails must not stop the others
            self._found = Unknown(f"{type(error).__name__}: {error}")

    def found(self) -> Known[T]:
        """Wait for the fact until its time is over, and return it."""
        if self.ident is not None:
            self.join(max(0.0, self.until - time.monotonic()))
        return self._found


def longest(settings: Settings, patience: float) -> float:
    """Return the longest time in seconds that the checks take even if reads hang.

    The longest sequence is a simulated node's files, the daemon, the releases, the driver, the device nodes, and their majors.
    """
    return 5 * patience + max(patience, settings.nvml_timeout) + GPU_SECONDS


class Node:
    """One node, as the checks read it.

    Args:
        settings: the daemon's settings.
        patience: seconds that each read may take; for the driver at least `--nvml-timeout`.
        configuration: the error in the config file if `settings` come from flags and environment alone; an `Unknown` if the
            file could not be read in time.
        file: the config file of `settings`, empty for none.
        root: the directory with /proc, /sys and /dev; the directories that options name are not below it.

    Raises:
        ConfigError: the simulated node of the settings cannot be loaded.
    """

    def __init__(
        self,
        settings: Settings,
        patience: float,
        configuration: Known[str] = "",
        file: str = "",
        root: Path = Path("/"),
    ) -> None:
        self.settings = settings
        self.configuration = configuration
        self.file = file
        self.patience = patience
        self.driver_patience = max(patience, settings.nvml_timeout)
        self.root = root
        self.roots = (str(root), settings.driver_root_ctr_path, settings.driver_root)
        self.hardware = _hardware(settings, patience)
        self._reads: dict[str, Read[Any]] = {}
        self._lock = threading.Lock()

    def begin(self, name: str, read: Callable[[*Ts], Known[T]], *args: *Ts, seconds: float = 0.0) -> Read[T]:
        """Return the read of the fact of this name, and start it if it is the first; it has `seconds`, 0 for `patience`."""
        with self._lock:
            if name not in self._reads:
                self._reads[name] = Read(name, seconds or self.patience, read, *args)
            return self._reads[name]

    def known(self, name: str, read: Callable[[*Ts], Known[T]], *args: *Ts, seconds: float = 0.0) -> Known[T]:
        """Return the fact of this name; an `Unknown` if the read fails or takes too long."""
        return self.begin(name, read, *args, seconds=seconds).found()

    @property
    def simulated(self) -> bool:
        """True if the node's GPUs are simulated."""
        return bool(self.settings.simulate)

    def process(self) -> Known[Process]:
        """Return the facts of this process."""
        return self.known("process", read_process, self.root)

    def uid(self) -> int:
        """Return the user of this process; 0 if it is not known."""
        process = self.process()
        return 0 if isinstance(process, Unknown) else process.uid

    def contained(self) -> bool:
        """Return True if this process is known to be in a container."""
        process = self.process()
        return not isinstance(process, Unknown) and process.contained

    def evidence(self) -> Known[NodeEvidence]:
        """Return the files of kubelet and container runtime as evidence of the device list strategy that works here."""
        return self.known("evidence", evidence_for, self.settings)

    def pod_resources(self) -> Known[PodResources]:
        """Return the answer of the kubelet's PodResources service."""
        socket = self.settings.effective_pod_resources_socket
        return self.known("pod_resources", read_pod_resources, socket, self.patience * 0.9)

    def daemon(self) -> Known[Daemon]:
        """Return the status of the running daemon."""
        return self.known("daemon", read_daemon, Path(self.settings.state_dir))

    def module(self) -> Known[KernelModule]:
        """Return the state of the driver's kernel module."""
        return self.known("module", read_module, self.root)

    def pci_gpus(self) -> Known[dict[str, str]]:
        """Return the kernel driver of each GPU on the PCI bus, by bus id in sysfs's form; empty if no driver is bound."""
        if isinstance(self.hardware, Unknown):
            return self.hardware
        return self.known("pci_gpus", _pci_gpus, self.hardware.host)

    def device_roots(self) -> Known[Mapping[str, str]]:
        """Return the NVIDIA driver's paths under /dev, as `HostView.device_roots` does."""
        if isinstance(self.hardware, Unknown):
            return self.hardware
        return self.known("device_roots", self.hardware.host.device_roots)

    def released(self) -> Known[tuple[str, ...]]:
        """Return the GPUs that an operator has released. Nothing may open them, so that they can be reset.

        If no daemon answers, read the releases that a daemon stored: they still hold if the daemon hangs or was killed.
        """
        if isinstance(self.hardware, Unknown):
            return self.hardware
        daemon = self.daemon()
        if isinstance(daemon, Unknown) and not daemon.hung:
            return daemon
        if not isinstance(daemon, Unknown) and daemon.status is not None:
            return released_gpus(daemon.status)
        boot_id = self.hardware.host.boot_id()
        return self.known("releases", written_releases, Path(self.settings.state_dir), boot_id)

    def driver(self) -> Known[Driver]:
        """Return the driver with its GPUs, opened unless GPUs are released."""
        if isinstance(self.hardware, Unknown):
            return self.hardware
        released = self.released()
        if isinstance(released, Unknown):
            return Unknown(
                f"the driver is left alone: whether GPUs are released for maintenance is not known ({released.why})"
            )
        if released:
            return Unknown(f"{_gpus(released)} released for maintenance, so the driver is left alone")
        reading = self.begin("driver", open_driver, self.hardware, seconds=self.driver_patience)
        driver = reading.found()
        if isinstance(driver, Unknown) or driver.trouble or driver.platform != Platform.NVML:
            return driver
        left = max(GPU_SECONDS, reading.until - time.monotonic())
        port = self.hardware.driver
        reads = [self.begin(f"gpu-{index}", describe_gpu, port, index, seconds=left) for index in range(driver.count)]
        gpus = [each.found() for each in reads]
        return replace(
            driver,
            gpus=tuple(
                Gpu(index, trouble=gpu.why) if isinstance(gpu, Unknown) else gpu for index, gpu in enumerate(gpus)
            ),
        )

    def opened(self) -> Driver | None:
        """Return the driver if it is open and its GPUs can be queried, else None."""
        driver = self.driver()
        if isinstance(driver, Unknown) or driver.trouble or driver.platform != Platform.NVML:
            return None
        return driver

    def no_gpu(self) -> str:
        """Return the reason why this node need not have a GPU, for people; empty if there may be a GPU, or that is not known."""
        bus, device_nodes, module = self.pci_gpus(), self.device_roots(), self.module()
        driver, daemon = self.driver(), self.daemon()
        if isinstance(bus, Unknown) or isinstance(device_nodes, Unknown) or isinstance(module, Unknown):
            return ""
        if module.loaded and not bus and not self.simulated:
            return ""  # the module loads only where it finds a GPU, so a GPU has fallen off the bus
        if not isinstance(driver, Unknown) and driver.platform != Platform.NVML:
            return ""
        if not isinstance(daemon, Unknown) and daemon.status is not None and daemon.status.missing:
            return ""  # the daemon knows GPUs of this node that are missing now
        return no_gpu(bus, (), device_nodes)


def _pci_gpus(host: HostView) -> Known[dict[str, str]]:
    gpus = host.pci_gpus()
    if gpus is None:
        return Unknown("sysfs does not list the PCI bus")
    return {short_bus_id(bus_id): bound for bus_id, bound in sorted(gpus.items())}


def _hardware(settings: Settings, patience: float) -> Known[Hardware]:
    """Return the driver and host to read. Raises ConfigError for a simulated node that cannot be loaded."""
    if not settings.simulate:
        return hardware_for(settings)
    read: Read[Hardware | ConfigError] = Read("simulated", patience, _simulated, settings)
    found = read.found()
    if isinstance(found, Unknown):
        return Unknown(f"the simulated node {settings.simulate}: {found.why}", found.hung)
    if isinstance(found, ConfigError):
        raise found
    return found


def _simulated(settings: Settings) -> Hardware | ConfigError:
    """Return the simulated node with the faults in the state directory, or the error if it cannot be loaded."""
    from gpu_plugin.simulation.driver import SimulatedDriver  # noqa: PLC0415 - only simulated nodes need it
    from gpu_plugin.simulation.hardware import SimulatedNode  # noqa: PLC0415
    from gpu_plugin.simulation.host import SimulatedHost  # noqa: PLC0415
    from gpu_plugin.simulation.profile import load  # noqa: PLC0415

    try:
        node = SimulatedNode(load(settings.simulate), Path(settings.state_dir), keep=False)
    except ConfigError as error:
        return error
    return Hardware(SimulatedDriver(node), SimulatedHost(node), None, library=_simulated_library)


def _simulated_library() -> str:
    return "simulated"


def _gpus(names: tuple[str, ...]) -> str:
    if EVERY_GPU in names:
        return "all GPUs are"
    return f"GPU {names[0]} is" if len(names) == 1 else f"GPUs {', '.join(names)} are"
