"""The driver and the host of the node: real or simulated. Only the modules of the selected kind are imported."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from gpu_plugin.config.settings import Settings
from gpu_plugin.containers.host_view import HostView
from gpu_plugin.nvml.port import Driver
from gpu_plugin.runtime.control.server import Verb

log = logging.getLogger(__name__)


class Hardware(msgspec.Struct, frozen=True):
    """The driver and host that this daemon serves, real or simulated.

    `dev_root` is the directory of the host with the device nodes for containers; None: the paths at which `host` found them.
    `verbs` has the commands of the control socket that only this hardware has. `driver_roots` blocks and returns the roots
    below which the driver's files may be, best first: each as the path in this process and the path on the host, without a
    slash at the end. `library` returns the path of the loaded NVML library, empty if no library is loaded. `keep` writes the
    file of a simulated node again if it is gone.
    """

    driver: Driver
    host: HostView
    dev_root: str | None
    verbs: Mapping[str, Verb] = msgspec.field(default_factory=dict)
    driver_roots: Callable[[], Sequence[tuple[str, str]]] = tuple
    library: Callable[[], str] = str
    keep: Callable[[], object] = tuple


def hardware_for(settings: Settings) -> Hardware:
    """Return the real driver, or the simulated node of the settings. Raises ConfigError if it cannot be simulated."""
    if settings.simulate:
        return _simulated(settings)
    from gpu_plugin.containers.host_view import LinuxHost  # noqa: PLC0415
    from gpu_plugin.nvml.driver import PynvmlDriver  # noqa: PLC0415
    from gpu_plugin.nvml.platforms.driver import PlatformDriver  # noqa: PLC0415

    roots = (settings.driver_root_ctr_path, settings.driver_root)
    driver = PlatformDriver(PynvmlDriver(roots), (*roots, "/"), settings.device_discovery_strategy)
    return Hardware(
        driver,
        LinuxHost([(root, settings.driver_root) for root in roots]),
        settings.dev_root or None,
        driver_roots=partial(_driver_roots, settings),
        library=loaded_library,
    )


def loaded_library(maps: Path = Path("/proc/self/maps")) -> str:
    """Return the path of libnvidia-ml in this process's memory map (proc_pid_maps(5)); empty if absent or unreadable."""
    try:
        mapped = maps.read_text(errors="backslashreplace").splitlines()
    except OSError:
        return ""
    files = (line.split(maxsplit=5)[5:] for line in mapped)
    return next((file[0] for file in files if file and "/libnvidia-ml.so" in file[0]), "")


def _driver_roots(settings: Settings) -> list[tuple[str, str]]:
    """Return the single root with the host's driver.

    In a container only the mounted directory belongs to the host. The container's own root may have a driver, too, which an
    NVIDIA container runtime put there under paths that do not exist on the host.
    """
    from gpu_plugin.containers.node_files.evidence import contained  # noqa: PLC0415 - only CDI specifications need it

    return [_root(settings, own=not contained())]


def _root(settings: Settings, *, own: bool) -> tuple[str, str]:
    """Return the path of the host's root in this process, and its path on the host.

    Both are the path on the host if nothing is mounted and this process is not in a container (`own`).
    """
    mounted, host = settings.driver_root_ctr_path.rstrip("/"), settings.driver_root.rstrip("/")
    return (host if own and not Path(mounted or "/").is_dir() else mounted), host


def _simulated(settings: Settings) -> Hardware:
    from gpu_plugin.simulation import device_nodes, faults  # noqa: PLC0415
    from gpu_plugin.simulation.driver import SimulatedDriver  # noqa: PLC0415
    from gpu_plugin.simulation.hardware import SimulatedNode  # noqa: PLC0415
    from gpu_plugin.simulation.host import SimulatedHost  # noqa: PLC0415
    from gpu_plugin.simulation.profile import load  # noqa: PLC0415

    profile = load(settings.simulate)
    state = Path(settings.state_dir)
    node = SimulatedNode(profile, state)
    try:
        made = None if settings.dev_root else device_nodes.make(node, state)
    except OSError as error:
        log.warning("no device nodes for the simulated node: %s", error)
        made = None

    dev_root = str(made) if made is not None else settings.dev_root or None
    return Hardware(
        SimulatedDriver(node),
        SimulatedHost(node),
        dev_root,
        {"fault": faults.verb(node)},
        partial(_simulated_driver_roots, settings, profile.driver_version),
        library=lambda: "simulated",
        keep=node.keep,
    )


def _simulated_driver_roots(settings: Settings, version: str) -> list[tuple[str, str]]:
    """Return the driver root of the settings, or else a driver root made for the simulated node."""
    if settings.driver_root != "/":
        return [_root(settings, own=True)]
    from gpu_plugin.simulation import driver_files  # noqa: PLC0415

    made = str(driver_files.make(Path(settings.state_dir) / driver_files.DIRECTORY, version))
    return [(made, made)]
