"""What `gpu-plugin cdi generate` makes specifications of: this node, a directory that has a node's files, or a simulated one."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click

from gpu_plugin.access.cdi.build import Built
from gpu_plugin.access.cdi.wishes import wishes
from gpu_plugin.access.plan import plan_access
from gpu_plugin.cdi_specs.source import Request, SpecSource
from gpu_plugin.config.settings import Settings
from gpu_plugin.devices.node import Node
from gpu_plugin.devices.plan import served_gpus
from gpu_plugin.nvml.port import Driver, HostView, NvmlError


@dataclass(frozen=True, slots=True)
class _Subject:
    """A node, what its host has, and where its driver's files are: as this process sees it, and as that host calls it."""

    node: Node
    host: HostView
    roots: tuple[tuple[str, str], ...]
    dev_root: str = ""


def built(settings: Settings, root: str | None) -> Built:
    """The specifications for the node that settings and `root` name.

    Raises:
        ConfigError: the settings ask for what cannot be.
        ClickException: there is no driver, no GPU, or a directory that cannot be read.
    """
    with _subject(settings, root) as subject:
        node = replace(subject.node, device_nodes=subject.host.device_nodes())
        # What a specification holds does not depend on the strategy, which may be left to the node.
        access = plan_access(replace(settings, device_list_strategy=("cdi-cri",)), node, subject.dev_root)
        request = Request(served_gpus(node, settings), node.driver_version, wishes(settings, access))
        try:
            return SpecSource(subject.host, lambda: subject.roots).build(request)
        except OSError as error:
            raise click.ClickException(f"{error.filename}: {error.strerror}") from None


@contextmanager
def _subject(settings: Settings, root: str | None) -> Iterator[_Subject]:
    host_root = settings.driver_root.rstrip("/")
    roots = ((root.rstrip("/"), host_root),) if root is not None else ()
    if settings.simulate:
        with _simulated(settings, roots) as subject:
            yield subject
    elif root is not None:
        yield _offline(settings, Path(root), roots)
    else:
        yield _live(settings)


@contextmanager
def _simulated(settings: Settings, roots: tuple[tuple[str, str], ...]) -> Iterator[_Subject]:
    from gpu_plugin.simulation import driver_files  # noqa: PLC0415 - only who simulates needs it
    from gpu_plugin.simulation.driver import SimulatedDriver  # noqa: PLC0415
    from gpu_plugin.simulation.hardware import SimulatedNode  # noqa: PLC0415
    from gpu_plugin.simulation.host import SimulatedHost  # noqa: PLC0415
    from gpu_plugin.simulation.profile import load  # noqa: PLC0415

    hardware = SimulatedNode(load(settings.simulate))
    host = SimulatedHost(hardware)
    with tempfile.TemporaryDirectory() as made:
        if not roots:
            version = hardware.profile.driver_version
            roots = ((str(driver_files.make(Path(made), version)), settings.driver_root.rstrip("/")),)
        yield _Subject(_probed(SimulatedDriver(hardware), host), host, roots, settings.effective_dev_root)


def _offline(settings: Settings, root: Path, roots: tuple[tuple[str, str], ...]) -> _Subject:
    from gpu_plugin.driver_root import proc  # noqa: PLC0415 - only who has a copy of a node needs it
    from gpu_plugin.nvml.host import LinuxHost  # noqa: PLC0415

    try:
        gpus = tuple(proc.gpus(root / "proc"))
    except OSError as error:
        raise click.ClickException(
            f"--root: {error.filename}: {error.strerror}; a copy of a node needs proc/driver/nvidia/gpus, or name "
            "GPUs with --simulate"
        ) from None
    host = LinuxHost([str(root)], sysfs=str(root / "sys"), procfs=str(root / "proc"), own=False)
    return _Subject(
        Node(gpus, driver_version=proc.driver_version(root / "proc")), host, roots, settings.effective_dev_root
    )


def _live(settings: Settings) -> _Subject:
    from gpu_plugin.hardware import hardware_for  # noqa: PLC0415 - only a real node needs it

    hardware = hardware_for(settings)
    try:
        node = _probed(hardware.driver, hardware.host)
    except NvmlError as error:
        raise click.ClickException(
            f"the NVIDIA driver cannot be used: {error} (or name a copy of a node with --root, or a simulated one "
            "with --simulate)"
        ) from None
    return _Subject(node, hardware.host, tuple(hardware.driver_roots()), hardware.dev_root)


def _probed(driver: Driver, host: HostView) -> Node:
    from gpu_plugin.nvml.probe import probe_gpu  # noqa: PLC0415

    driver.open()
    try:
        gpus = tuple(probe_gpu(driver, host, index)[1] for index in range(driver.device_count()))
        return Node(gpus, driver_version=driver.driver_version())
    finally:
        driver.close()
