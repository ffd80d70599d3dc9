"""A copy of a node's files: the GPUs that the files name, and specifications with that node's own paths."""

from collections.abc import Callable, Iterator
from pathlib import Path

import click
import msgspec
from msgspec.structs import replace

from gpu_plugin.config.settings import Settings
from gpu_plugin.containers.cdi.build import Built
from gpu_plugin.containers.cdi.directories import LIBRARY_DIRECTORIES, WSL_LIBRARIES
from gpu_plugin.containers.cdi.spec import Edits, Spec, minimum_version
from gpu_plugin.containers.cdi_files.source import Roots, SpecSource
from gpu_plugin.containers.driver_root.inside import resolve
from gpu_plugin.containers.driver_root.tegra import TegraSearch
from gpu_plugin.containers.host_view import HostView, any_partitioned, kernel_driver_version, listed_gpus
from gpu_plugin.devices.device import TEGRA_GPU, WSL_GPUS
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.nvml.driver import SONAME
from gpu_plugin.nvml.platforms.choice import Platform, choose
from gpu_plugin.nvml.platforms.driver import look

NO_MIG = (
    "MIG devices are left out: a node's files do not have their uuids; run `gpu-plugin cdi generate` on the node itself "
    "for a specification with them"
)


class CopySource(SpecSource):
    """`SpecSource` of another node: its specifications contain no facts of this machine."""

    def __init__(self, host: HostView, roots: Callable[[], Roots]) -> None:
        super().__init__(host, roots)
        self._searches[TegraSearch] = TegraSearch(self.roots, own=False)

    def _unsafe_roots(self) -> Iterator[str]:
        """Yield nothing: on the node, the files are not below the directory of the copy."""
        yield from ()


class Copy(msgspec.Struct, frozen=True):
    """The paths of the copy here and on the node, without a slash at the end, empty for /.

    `root` is the directory that the operator names, `driver` the driver root in it. `host_driver` and `hook` are the node's own
    paths of its driver root and of NVIDIA's hook (empty: none).
    """

    root: str
    driver: str
    host_driver: str
    hook: str

    @classmethod
    def of(cls, root: str, settings: Settings) -> "Copy":
        """Return the copy below `root`: of a whole node, with the node's path of the driver root, or of a driver root alone."""
        at, host = root.rstrip("/"), settings.driver_root.rstrip("/")
        inside = f"{at}{host}"
        driver = inside if Path(inside or "/").is_dir() else at
        return cls(at, driver, host, settings.nvidia_cdi_hook_path)

    @property
    def hook_here(self) -> str:
        """The path of the hook in the copy."""
        if self.host_driver and self.hook.startswith(f"{self.host_driver}/"):
            return f"{self.driver}{self.hook.removeprefix(self.host_driver)}"
        return f"{self.root}{self.hook}" if self.hook else ""

    def as_on_node(self, built: Built) -> Built:
        """Return the specifications of the copy with the node's own paths. Messages keep the paths of the copy."""
        return replace(built, specs={name: self._renamed(spec) for name, spec in built.specs.items()})

    def _renamed(self, spec: Spec) -> Spec:
        devices = tuple(replace(each, container_edits=self._edits(each.container_edits)) for each in spec.devices)
        renamed = replace(spec, devices=devices, container_edits=self._edits(spec.container_edits))
        return replace(renamed, cdi_version=minimum_version(renamed))

    def _edits(self, edits: Edits) -> Edits:
        return replace(
            edits,
            mounts=tuple(
                replace(mount, host_path=f"{self.host_driver}{mount.host_path.removeprefix(self.driver)}")
                for mount in edits.mounts
            ),
            hooks=tuple(replace(hook, path=self.hook) for hook in edits.hooks),
        )


def copied_node(root: str, strategy: str) -> tuple[Node, tuple[str, ...]]:
    """Return the node whose files are below a directory, and sentences about facts that the files lack. Blocks.

    The platform is chosen as on the node itself, with the kernel's files in place of NVML.

    Args:
        root: the directory, without a slash at the end.
        strategy: the value of --device-discovery-strategy.

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
    return Node(gpus, driver_version=kernel_driver_version(files)), (NO_MIG,) if any_partitioned(files) else ()
