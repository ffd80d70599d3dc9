"""The subject of `gpu-plugin cdi generate`: this node, a copy of a node's files, or a simulated node."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec
from msgspec.structs import replace

from gpu_plugin.cli.topology_source import simulated_hardware
from gpu_plugin.config.settings import Settings
from gpu_plugin.containers.cdi.build import Built
from gpu_plugin.containers.cdi.host_files import LIBRARY_DIRECTORIES, WSL_LIBRARIES
from gpu_plugin.containers.cdi.options import cdi_options, ignored_options
from gpu_plugin.containers.cdi.spec import Edits, Spec, minimum_version
from gpu_plugin.containers.cdi_files.directory import said
from gpu_plugin.containers.cdi_files.source import Request, Roots, SpecSource, UnsafeSpecError
from gpu_plugin.containers.driver_root.inside import resolve
from gpu_plugin.containers.driver_root.tegra import TegraSearch
from gpu_plugin.containers.edits import is_cdi
from gpu_plugin.containers.host_view import HostView, LinuxHost, any_partitioned, kernel_driver_version, listed_gpus
from gpu_plugin.containers.plan import access_warnings, plan_access
from gpu_plugin.daemon.hardware import hardware_for
from gpu_plugin.devices.device import TEGRA_GPU, WSL_GPUS
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.devices.plan import plan, served_gpus
from gpu_plugin.nvml.driver import SONAME
from gpu_plugin.nvml.opening_remedies import opening_remedy
from gpu_plugin.nvml.platforms.choice import Platform, choose
from gpu_plugin.nvml.platforms.driver import look
from gpu_plugin.nvml.port import Driver, NvmlError
from gpu_plugin.nvml.traits import probe_gpu

_NO_MIG = (
    "MIG devices are left out: a node's files do not have their uuids; run `gpu-plugin cdi generate` on the node itself "
    "for a specification with them"
)


class _Copy(msgspec.Struct, frozen=True):
    """The paths of a copy of a node's files, here and on the node, without a slash at the end, empty for /.

    `root` is the directory that the operator names, `driver` the driver root in it. `host_driver` and `hook` are the node's own
    paths of its driver root and of NVIDIA's hook (empty: none).
    """

    root: str
    driver: str
    host_driver: str
    hook: str

    @property
    def hook_here(self) -> str:
        """The path of the hook in the copy."""
        if self.host_driver and self.hook.startswith(f"{self.host_driver}/"):
            return f"{self.driver}{self.hook.removeprefix(self.host_driver)}"
        return f"{self.root}{self.hook}" if self.hook else ""

    def renamed(self, spec: Spec) -> Spec:
        """Return a specification of the copy with the node's own paths."""
        devices = tuple(replace(each, container_edits=self._edits(each.container_edits)) for each in spec.devices)
        renamed = replace(spec, devices=devices, container_edits=self._edits(spec.container_edits))
        return replace(renamed, cdi_version=minimum_version(renamed))

    def _edits(self, edits: Edits) -> Edits:
        mounts = tuple(
            replace(mount, host_path=f"{self.host_driver}{mount.host_path.removeprefix(self.driver)}")
            for mount in edits.mounts
        )
        return replace(edits, mounts=mounts, hooks=tuple(replace(hook, path=self.hook) for hook in edits.hooks))


class _Subject(msgspec.Struct, frozen=True):
    """A node, its host, and the directory of its driver's files: the path in this process, and the path on that host.

    `copy` has the paths of a copy of the node's files, None for a real or simulated node. `complaints` are sentences about
    facts that the files lack.
    """

    node: Node
    host: HostView
    roots: tuple[tuple[str, str], ...]
    dev_root: str | None = None
    copy: _Copy | None = None
    complaints: tuple[str, ...] = ()


class _CopySource(SpecSource):
    """`SpecSource` of another node: its specifications contain no facts of this machine."""

    def __init__(self, host: HostView, roots: Callable[[], Roots]) -> None:
        super().__init__(host, roots)
        self._searches[TegraSearch] = TegraSearch(self.roots, own=False)

    def _unsafe_roots(self) -> Iterator[str]:
        """Yield nothing: on the node, the files are not below the directory of the copy."""
        yield from ()


def built(settings: Settings, root: str | None) -> Built:
    """Return the specifications for the node of the settings and `root`. Messages have the paths of a copy.

    Raises:
        ConfigError: the settings are impossible on this node.
        ClickException: there is no driver or no GPU, or a directory cannot be read.
    """
    if not any(map(is_cdi, settings.device_list_strategy)):
        # The command is for CDI, even if the daemon uses envvar or auto
        settings = replace(settings, device_list_strategy=("cdi-cri",))
    with _subject(settings, root) as subject:
        node, copy = replace(subject.node, device_nodes=frozenset(subject.host.device_roots())), subject.copy
        options = cdi_options(settings, plan_access(settings, node, subject.dev_root))
        if copy is not None:
            options = replace(options, hook=copy.hook_here)
        asked = (*plan(node, settings).warnings, *access_warnings(settings, node), *ignored_options(settings))
        request = Request(served_gpus(node, settings), node.driver_version, options, (*subject.complaints, *asked))
        source = (SpecSource if copy is None else _CopySource)(subject.host, lambda: subject.roots)
        try:
            made = source.build(request)
        except OSError as error:
            raise click.ClickException(said(error)) from None
        except UnsafeSpecError as error:
            raise click.ClickException(str(error)) from None
    if copy is None:
        return made
    return replace(made, specs={name: copy.renamed(spec) for name, spec in made.specs.items()})


@contextmanager
def _subject(settings: Settings, root: str | None) -> Iterator[_Subject]:
    if root is not None:
        yield _copied(settings, root.rstrip("/"))
    elif settings.simulate:
        from gpu_plugin.simulation import driver_files  # noqa: PLC0415 - only simulated nodes need it

        node, host = _simulated(settings)
        with tempfile.TemporaryDirectory() as made:
            files = driver_files.make(Path(made), node.driver_version)
            yield _Subject(node, host, ((str(files), settings.driver_root.rstrip("/")),), settings.dev_root or None)
    else:
        yield _live(settings)


def _copied(settings: Settings, root: str) -> _Subject:
    """Return the node of a directory, or a simulated node with the driver of that directory.

    The directory has the files of a whole node, with the node's path of the driver root, or of a driver root alone.
    """
    host_driver = settings.driver_root.rstrip("/")
    inside = f"{root}{host_driver}"
    copy = _Copy(root, inside if Path(inside or "/").is_dir() else root, host_driver, settings.nvidia_cdi_hook_path)
    complaints: tuple[str, ...] = ()
    if settings.simulate:
        node, host = _simulated(settings)
    else:
        node, complaints = _copied_node(root, settings.device_discovery_strategy)
        places = [(copy.driver, host_driver), (root, "")]
        host = LinuxHost(places, sysfs=f"{root}/sys", procfs=f"{root}/proc", own=False)
    return _Subject(node, host, ((copy.driver, copy.driver),), settings.dev_root or None, copy, complaints)


def _copied_node(root: str, strategy: str) -> tuple[Node, tuple[str, ...]]:
    """Return the node whose files are below a directory, and sentences about facts that the files lack. Blocks.

    The platform is chosen as on the node itself (`strategy` is --device-discovery-strategy), with the kernel's files in place
    of NVML.

    Raises:
        ClickException: the files name no GPU, or the files of a WSL node lack NVML.
    """
    files = Path(root or "/", "proc")
    try:
        gpus, trouble = tuple(listed_gpus(files)), None
    except OSError as error:
        gpus, trouble = (), error
    platform = choose(strategy, look([root or "/"]), lambda: [gpu.model for gpu in gpus] or None).platform
    if platform is Platform.WSL:
        paths = (f"{root}/{directory}/{SONAME}" for directory in (WSL_LIBRARIES, *LIBRARY_DIRECTORIES))
        if not any((path := resolve(root, each)) is not None and Path(path).is_file() for each in paths):
            raise click.ClickException(
                f"--root: {root or '/'} is a copy of a WSL node and has no {SONAME} where WSL or a distribution puts it: "
                "copy usr/lib/wsl as a whole"
            )
        return Node((Gpu(uuid=WSL_GPUS, index=0),)), ()
    if platform is Platform.TEGRA:
        return Node((Gpu(uuid=TEGRA_GPU, index=0),)), ()
    if trouble is not None:
        raise click.ClickException(
            f"--root: {trouble.filename}: {trouble.strerror}; a copy of a node needs proc/driver/nvidia/gpus, or name "
            "GPUs with --simulate"
        )
    return Node(gpus, driver_version=kernel_driver_version(files)), (_NO_MIG,) if any_partitioned(files) else ()


def _simulated(settings: Settings) -> tuple[Node, HostView]:
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
