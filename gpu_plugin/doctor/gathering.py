"""Gather the facts of a node with concurrent probes. Each probe has a time limit; a probe that hangs keeps its thread."""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
from msgspec.structs import replace

from gpu_plugin.config.settings import Settings
from gpu_plugin.config.values import AUTO
from gpu_plugin.containers.edits import imex_node
from gpu_plugin.daemon.hardware import Hardware, hardware_for
from gpu_plugin.daemon.health_watch import EVERY_GPU
from gpu_plugin.daemon.list_strategy import evidence_for
from gpu_plugin.devices.gpu_names import short_bus_id
from gpu_plugin.doctor.edges import api, host, kubelet, sockets
from gpu_plugin.doctor.edges.clock import clock
from gpu_plugin.doctor.edges.directories import cdi_conflicts, directory
from gpu_plugin.doctor.edges.driver import described, kernel_module, opened
from gpu_plugin.doctor.edges.process import process
from gpu_plugin.doctor.edges.state_directory import simulated, written_releases
from gpu_plugin.doctor.facts import (
    Api,
    Daemon,
    DeviceNode,
    DeviceNodes,
    Driver,
    Facts,
    Gpu,
    Known,
    Pci,
    Unknown,
)
from gpu_plugin.health.signals.orders import MAINTENANCE
from gpu_plugin.mps.directories import root_here
from gpu_plugin.runtime import control
from gpu_plugin.runtime.threads import begin

T = TypeVar("T")

GPU_SECONDS = 1.0
"""Least seconds for the queries of each GPU, even if the driver took all other time to open."""


class Places(msgspec.Struct, frozen=True):
    """Paths of the kernel's file systems and of the process's root."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    root: str = ""


async def gather(
    settings: Settings, patience: float, configuration: Known[str] = "", file: str = "", places: Places | None = None
) -> Facts:
    """Gather all facts of this node.

    Args:
        settings: the daemon's settings.
        patience: seconds that each probe may take; for the driver at least `--nvml-timeout`.
        configuration: the error in the config file if it is not used; an `Unknown` if the file could not be read in time.
        file: the config file in use.
        places: the paths of the kernel's file systems.

    Raises:
        ConfigError: the simulated node of the settings cannot be loaded.
    """
    facts = await _Gathering(settings, patience, places or Places(), await _hardware(settings, patience)).facts()
    return replace(facts, configuration=configuration, file=file)


def longest(settings: Settings, patience: float) -> float:
    """Return the longest time in seconds that `gather` takes even if probes hang.

    The longest sequence is a simulated node's files, the daemon, the state directory, the driver and the device nodes.
    """
    return 3 * patience + max(patience, settings.nvml_timeout) + 2 * patience + 10.0


async def _hardware(settings: Settings, patience: float) -> Known[Hardware]:
    """Return the driver and host to probe. Raises ConfigError for a simulated node that cannot be loaded."""
    if not settings.simulate:
        return hardware_for(settings)
    job = begin(partial(simulated, settings), "doctor-simulated")
    if not await job.wait(patience):
        return _unanswered(patience, f"the simulated node {settings.simulate}: ")
    return job.done.result()


def _unanswered(patience: float, whose: str = "") -> Unknown:
    return Unknown(f"{whose}no answer within {round(patience, 1):g} s", hung=True)


class _Gathering:
    """One gathering of the facts. Every probe runs on its own thread, with a time limit."""

    def __init__(self, settings: Settings, patience: float, places: Places, hardware: Known[Hardware]) -> None:
        self._settings = settings
        self._patience = patience
        self._driver_patience = max(patience, settings.nvml_timeout)
        self._places = places
        self._hardware = hardware
        self._roots = (settings.driver_root_ctr_path, settings.driver_root, "/")

    async def facts(self) -> Facts:
        settings, places = self._settings, self._places
        found: dict[str, Any] = {}
        probes: dict[str, Callable[[], object]] = {
            "process": partial(process, places.proc, places.sys),
            "module": partial(kernel_module, places.proc, places.sys),
            "pci": self._pci,
            "kubelet_directory": partial(kubelet.kubelet_directory, settings.socket_dir, settings.registration_socket),
            "evidence": partial(evidence_for, settings),
            "cdi_directory": partial(directory, settings.cdi_dir),
            "cdi_conflicts": partial(cdi_conflicts, settings.cdi_dir),
            "state": partial(directory, settings.state_dir),
            "features": partial(directory, settings.features_dir),
            "clock": clock,
            "fabric_manager": partial(host.fabric_manager, (f"{places.root}/", *self._roots), places.proc),
            "mps": lambda: host.mps(str(root_here(root)) if (root := settings.mps_root) else "", places.proc),
            "pod_resources": partial(
                kubelet.pods, settings.effective_pod_resources_socket, self._patience * 0.9, time.monotonic
            ),
        }
        if settings.registration_socket:
            probes["kubelet_socket"] = partial(sockets.look, settings.registration_socket, self._patience * 0.4)

        async def run(name: str, probe: Callable[[], object], patience: float) -> None:
            found[name] = await self._within(probe, patience, name)

        async def gpus() -> None:
            daemon: Known[Daemon] = await self._within(self._daemon, self._patience, "daemon")
            found["daemon"] = daemon
            hardware = self._hardware
            if isinstance(hardware, Unknown):
                found["released"] = found["driver"] = found["nodes"] = hardware
                return
            found["released"] = released = await self._released(daemon, hardware)
            found["driver"] = driver = await self._driver(released, hardware)
            found["nodes"] = await self._nodes(driver, released, hardware)

        async with anyio.create_task_group() as tasks:
            for name, probe in probes.items():
                tasks.start_soon(run, name, probe, self._patience)
            tasks.start_soon(run, "api", self._api, self._driver_patience)
            tasks.start_soon(gpus)
        return Facts(settings=settings, **found)

    async def _within(self, probe: Callable[[], T], patience: float, name: str) -> Known[T]:
        """Return the result of a probe, which runs on its own thread."""
        job = begin(probe, f"doctor-{name}")
        if not await job.wait(patience):
            return _unanswered(patience)
        try:
            return job.done.result()
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            return Unknown(f"{where}{error.strerror or error}")
        except Exception as error:  # noqa: BLE001 - a probe that fails must not stop the others
            return Unknown(f"{type(error).__name__}: {error}")

    def _pci(self) -> Pci:
        hardware = self._hardware
        if self._settings.simulate and not isinstance(hardware, Unknown):
            return Pci({short_bus_id(bus_id): bound for bus_id, bound in (hardware.host.pci_gpus() or {}).items()})
        return host.pci(self._places.sys, (f"{self._places.root}/", *self._roots))

    def _daemon(self) -> Known[Daemon]:
        directory = Path(self._settings.state_dir)
        path = directory / control.SOCKET
        try:
            return Daemon(control.request(directory, "status"))
        except control.SilentDaemonError as error:
            return Unknown(str(error), hung=True)
        except control.NoDaemonError as error:
            forbidden = _forbidden(path)
            abandoned = not forbidden and path.is_socket() and not control.answers(directory)
            return Daemon(trouble=str(error), forbidden=forbidden, abandoned=abandoned)
        except control.ControlError as error:
            return Daemon(trouble=str(error), refused=True)

    async def _released(self, daemon: Known[Daemon], hardware: Hardware) -> Known[tuple[str, ...]]:
        """Return the GPUs that an operator has released. Nothing may open them, so that they can be reset.

        If no daemon answers, read the releases that a daemon stored: they still hold if the daemon hangs or was killed.
        """
        if not isinstance(daemon, Unknown) and daemon.status is not None:
            try:
                return released(daemon.status)
            except (AttributeError, KeyError, TypeError):
                return Unknown("the daemon's status has no such list: is it of another version?")
        state_dir, host = Path(self._settings.state_dir), hardware.host
        return await self._within(lambda: written_releases(state_dir, host.boot_id()), self._patience, "releases")

    async def _driver(self, released: Known[tuple[str, ...]], hardware: Hardware) -> Known[Driver]:
        if isinstance(released, Unknown):
            return Unknown(
                f"the driver is left alone: whether GPUs are released for maintenance is not known ({released.why})"
            )
        if released:
            return Unknown(f"{_gpus(released)} released for maintenance, so the driver is left alone")
        patience = self._driver_patience
        until = time.monotonic() + patience
        driver = await self._within(partial(opened, hardware), patience, "driver")
        if isinstance(driver, Unknown) or driver.trouble or driver.platform != "nvml":
            return driver
        gpus: dict[int, Gpu] = {}

        async def describe(index: int) -> None:
            left = max(GPU_SECONDS, until - time.monotonic())
            gpu = await self._within(partial(described, hardware.driver, index), left, f"gpu-{index}")
            gpus[index] = Gpu(index, trouble=gpu.why) if isinstance(gpu, Unknown) else gpu

        async with anyio.create_task_group() as tasks:
            for index in range(driver.count):
                tasks.start_soon(describe, index)
        return replace(driver, gpus=tuple(gpu for _, gpu in sorted(gpus.items())))

    async def _nodes(
        self, driver: Known[Driver], released: Known[tuple[str, ...]], hardware: Hardware
    ) -> Known[DeviceNodes]:
        """Return the device nodes that CUDA needs. The node of a GPU is opened only if the driver answered for the GPU."""
        if self._settings.simulate:
            there = hardware.host.device_roots()
            channels = tuple(sorted(path for path in there if path.startswith(imex_node(0)[:-1])))
            return DeviceNodes({path: DeviceNode(path, True, why="simulated") for path in sorted(there)}, {}, channels)
        gpus = () if isinstance(driver, Unknown) else driver.gpus
        wanted = [*host.CONTROL, *(f"/dev/nvidia{gpu.minor}" for gpu in gpus if gpu.minor is not None)]
        if isinstance(released, Unknown) or released:
            wanted = []
        nodes: dict[str, DeviceNode] = {}

        async def open_one(path: str) -> None:
            node = await self._within(
                partial(host.device_node, path, self._places.root), self._patience, path.rpartition("/")[2]
            )
            nodes[path] = DeviceNode(path, True, why=f"opening it: {node.why}") if isinstance(node, Unknown) else node

        async with anyio.create_task_group() as tasks:
            for path in wanted:
                tasks.start_soon(open_one, path)
        majors = await self._within(partial(host.majors, self._places.proc), self._patience, "majors")
        channels_seen: Known[tuple[str, ...]] = ()
        if self._settings.imex_channel_ids == AUTO or self._settings.imex_channel_ids:
            roots = (f"{self._places.root}/", *self._roots)
            channels_seen = await self._within(partial(host.imex_channels, roots), self._patience, "imex")
        return DeviceNodes(
            {path: nodes[path] for path in wanted},
            {} if isinstance(majors, Unknown) else majors,
            () if isinstance(channels_seen, Unknown) else channels_seen,
        )

    def _api(self) -> Api:
        asked = api.needed(self._settings)
        return anyio.run(api.rights, self._settings.kubeconfig, asked, time.monotonic) if asked else Api()


def _forbidden(path: Path) -> bool:
    try:
        path.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return not os.access(path, os.W_OK, effective_ids=True)


def released(status: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the indices of the released GPUs in a daemon's status."""
    gpus = status.get("health", {}).get("gpus", ())
    return tuple(str(gpu["index"]) for gpu in gpus if MAINTENANCE in gpu.get("signals", ()))


def _gpus(names: tuple[str, ...]) -> str:
    if EVERY_GPU in names:
        return "all GPUs are"
    return f"GPU {names[0]} is" if len(names) == 1 else f"GPUs {', '.join(names)} are"
