"""Which driver and host a daemon serves: the real ones, or a simulated node's. Imports only what is asked for."""

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

    `dev_root` is where the host keeps the device nodes that containers are given, None for where `host` found each.
    `verbs` has what can be asked of it through the control socket; `driver_roots` gives the roots below which the driver's
    files may lie, best first, each as this process sees it and as the host calls it, without a slash at the end. It blocks.
    `library` is the file of the NVML that is loaded now, empty where there is none. `keep` has a simulated node written down
    again where its file is gone.
    """

    driver: Driver
    host: HostView
    dev_root: str | None
    verbs: Mapping[str, Verb] = msgspec.field(default_factory=dict)
    driver_roots: Callable[[], Sequence[tuple[str, str]]] = tuple
    library: Callable[[], str] = str
    keep: Callable[[], object] = tuple


def hardware_for(settings: Settings) -> Hardware:
    """The real driver, or the simulated node that the settings ask for. Raises ConfigError for one that cannot be."""
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
    """The file of libnvidia-ml that this process has mapped (proc_pid_maps(5)); empty where it has none, or does not know."""
    try:
        mapped = maps.read_text(errors="backslashreplace").splitlines()
    except OSError:
        return ""
    files = (line.split(maxsplit=5)[5:] for line in mapped)
    return next((file[0] for file in files if file and "/libnvidia-ml.so" in file[0]), "")


def _driver_roots(settings: Settings) -> list[tuple[str, str]]:
    """The one root where the host's driver is seen.

    In a container only what is mounted there for us is the host's: the same path in its own root may have a driver, too, that an
    NVIDIA container runtime put there, under paths that mean nothing on the host.
    """
    from gpu_plugin.containers.node_files.evidence import contained  # noqa: PLC0415 - only CDI specifications need it

    return [_root(settings, own=not contained())]


def _root(settings: Settings, *, own: bool) -> tuple[str, str]:
    """Where the host's root is seen, and its name there; its name for both where nothing is mounted and it is our `own`."""
    seen_at, host = settings.driver_root_ctr_path.rstrip("/"), settings.driver_root.rstrip("/")
    return (host if own and not Path(seen_at or "/").is_dir() else seen_at), host


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
    """The driver root that the operator names, else one made for the simulated node."""
    if settings.driver_root != "/":
        return [_root(settings, own=True)]
    from gpu_plugin.simulation import driver_files  # noqa: PLC0415

    made = str(driver_files.make(Path(settings.state_dir) / driver_files.DIRECTORY, version))
    return [(made, made)]
