"""The subject of `gpu-plugin cdi generate`: this node, a directory with a node's files, or a simulated node."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec
from msgspec.structs import replace

from gpu_plugin.cli.cdi_copy import Copy, CopySource, copied_node
from gpu_plugin.cli.topology_source import simulated_hardware
from gpu_plugin.config.settings import Settings
from gpu_plugin.containers.cdi.build import Built
from gpu_plugin.containers.cdi.options import cdi_options, ignored_options
from gpu_plugin.containers.cdi_files.directory import said
from gpu_plugin.containers.cdi_files.source import Request, SpecSource, UnsafeSpecError
from gpu_plugin.containers.edits import is_cdi
from gpu_plugin.containers.host_view import HostView, LinuxHost
from gpu_plugin.containers.plan import access_warnings, plan_access
from gpu_plugin.daemon.hardware import hardware_for
from gpu_plugin.devices.node import Node
from gpu_plugin.devices.plan import plan, served_gpus
from gpu_plugin.nvml.opening_remedies import opening_remedy
from gpu_plugin.nvml.port import Driver, NvmlError
from gpu_plugin.nvml.traits import probe_gpu


class _Subject(msgspec.Struct, frozen=True):
    """A node, its host, and the directories of its driver's files: the path in this process, and the path on that host.

    `copy` has the paths of a copy of the node's files, None for a real or simulated node. `complaints` are sentences about
    facts that the files lack.
    """

    node: Node
    host: HostView
    roots: tuple[tuple[str, str], ...]
    dev_root: str | None = None
    copy: Copy | None = None
    complaints: tuple[str, ...] = ()


def built(settings: Settings, root: str | None) -> Built:
    """Return the specifications for the node of the settings and `root`.

    Raises:
        ConfigError: the settings are impossible on this node.
        ClickException: there is no driver or no GPU, or a directory cannot be read.
    """
    if not any(
        map(is_cdi, settings.device_list_strategy)
    ):  # the command is for CDI, even if the daemon uses envvar or auto
        settings = replace(settings, device_list_strategy=("cdi-cri",))
    with _subject(settings, root) as subject:
        node = replace(subject.node, device_nodes=frozenset(subject.host.device_roots()))
        wanted = cdi_options(settings, plan_access(settings, node, subject.dev_root))
        asked = (*plan(node, settings).warnings, *access_warnings(settings, node), *ignored_options(settings))
        request = Request(served_gpus(node, settings), node.driver_version, wanted, (*subject.complaints, *asked))
        copy = subject.copy
        if copy is not None:
            request = replace(request, options=replace(request.options, hook=copy.hook_here))
        source = (SpecSource if copy is None else CopySource)(subject.host, lambda: subject.roots)
        try:
            made = source.build(request)
        except OSError as error:
            raise click.ClickException(said(error)) from None
        except UnsafeSpecError as error:
            raise click.ClickException(str(error)) from None
        return made if copy is None else copy.as_on_node(made)


@contextmanager
def _subject(settings: Settings, root: str | None) -> Iterator[_Subject]:
    if root is not None:
        yield _copied(settings, root)
    elif settings.simulate:
        with tempfile.TemporaryDirectory() as made:
            yield _simulated(settings, Path(made))
    else:
        yield _live(settings)


def _copied(settings: Settings, root: str) -> _Subject:
    """Return the node of a directory, or a simulated node with the driver of that directory."""
    copy = Copy.of(root, settings)
    roots = ((copy.driver, copy.driver),)  # messages should name the paths of the copy
    if settings.simulate:
        node, host = _simulated_node(settings)
        return _Subject(node, host, roots, settings.dev_root or None, copy)
    node, complaints = copied_node(copy.root, settings.device_discovery_strategy)
    places = [(copy.driver, copy.host_driver), (copy.root, "")]
    host = LinuxHost(places, sysfs=f"{copy.root}/sys", procfs=f"{copy.root}/proc", own=False)
    return _Subject(node, host, roots, settings.dev_root or None, copy, complaints)


def _simulated(settings: Settings, made: Path) -> _Subject:
    """Return a simulated node, and create its driver's files in the directory `made`."""
    from gpu_plugin.simulation import driver_files  # noqa: PLC0415 - only simulated nodes need it

    node, host = _simulated_node(settings)
    roots = ((str(driver_files.make(made, node.driver_version)), settings.driver_root.rstrip("/")),)
    return _Subject(node, host, roots, settings.dev_root or None)


def _simulated_node(settings: Settings) -> tuple[Node, HostView]:
    driver, host = simulated_hardware(settings.simulate)
    return _probed(driver, host), host


def _live(settings: Settings) -> _Subject:
    hardware = hardware_for(settings)
    try:
        node = _probed(hardware.driver, hardware.host)
    except NvmlError as error:
        raise click.ClickException(
            f"the NVIDIA driver cannot be used: {error}: {opening_remedy(error.code)}\n"
            "or name a copy of a node with --root, or a simulated node with --simulate"
        ) from None
    return _Subject(node, hardware.host, tuple(hardware.driver_roots()), hardware.dev_root)


def _probed(driver: Driver, host: HostView) -> Node:
    driver.open()
    try:
        gpus = tuple(probe_gpu(driver, host, index)[1] for index in range(driver.device_count()))
        return Node(gpus, driver_version=driver.driver_version())
    finally:
        driver.close()
