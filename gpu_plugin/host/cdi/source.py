"""What the CDI specifications of this node should say now. Every call blocks: it runs on a thread of its own."""

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from gpu_plugin.access.cdi.spec import DeviceNode, Spec, device_nodes, host_paths
from gpu_plugin.devices.device import TEGRA_GPU, WSL_GPUS
from gpu_plugin.devices.node import Gpu
from gpu_plugin.host.driver_root.tree import device_at
from gpu_plugin.host.view import HostView

if TYPE_CHECKING:
    from gpu_plugin.access.cdi.build import Built
    from gpu_plugin.access.cdi.host_files import HostDevices
    from gpu_plugin.access.cdi.options import CdiOptions

Roots = Sequence[tuple[str, str]]
"""Driver roots, best first: each as this process sees it and as the host calls it, without a slash at the end."""


class Request(msgspec.Struct, frozen=True):
    """What specifications are for: the GPUs that may be handed out, the driver's version, and what the operator wants."""

    gpus: tuple[Gpu, ...]
    driver_version: str
    options: "CdiOptions"
    complaints: tuple[str, ...] = ()  # sentences on what was asked for, to be said with those on what was found


class SpecSource:
    """Builds the specifications of one node; the very same object as before where nothing has changed."""

    def __init__(self, host: HostView, roots: Callable[[], Roots]) -> None:
        """Takes the host's device nodes, and how to learn the driver roots, which blocks too."""
        self._host = host
        self._ask_roots = roots
        self._searches: dict[Callable[[Roots], Any], Any] = {}
        self._last: tuple[object, Built] | None = None

    def build(self, request: Request) -> "Built":
        """The specifications for a request. Raises OSError where a directory of the driver root cannot be read."""
        host = self._host.devices(gpu.pci_bus_id for gpu in request.gpus)
        search, make = self._platform(request.gpus, host)
        files, driver_root = search.files(request.driver_version), search.host_root
        hook, complaint = self._hook(request.options.hook)
        options = replace(request.options, driver_root=driver_root, hook=hook)
        inputs = (request, files, host, options)
        if self._last is not None and self._last[0] == inputs:
            return self._last[1]
        built = make(files, options)
        more = (*request.complaints, *([complaint] if complaint else []))
        if more:
            built = replace(built, complaints=(*built.complaints, *more))
        self._last = inputs, built
        return built

    def _platform(self, gpus: Sequence[Gpu], host: "HostDevices") -> "tuple[Any, Callable[[Any, CdiOptions], Built]]":
        """What finds the driver's files on such a node, and what makes specifications of them.

        What kind of node this is, the one device of WSL and of a Tegra says by its name.
        """
        uuids = {gpu.uuid for gpu in gpus}
        if WSL_GPUS in uuids:
            from gpu_plugin.access.cdi.wsl import wsl_specs  # noqa: PLC0415 - few nodes are of that kind
            from gpu_plugin.host.driver_root.wsl import WslSearch  # noqa: PLC0415

            return self._kept(WslSearch), lambda files, options: wsl_specs(files, host, options)
        if TEGRA_GPU in uuids:
            from gpu_plugin.access.cdi.tegra import tegra_specs  # noqa: PLC0415
            from gpu_plugin.host.driver_root.tegra import TegraSearch  # noqa: PLC0415

            return self._kept(TegraSearch), tegra_specs
        from gpu_plugin.access.cdi.build import build  # noqa: PLC0415 - 15 ms for which no pod need wait: see `holds`
        from gpu_plugin.host.driver_root.search import Search  # noqa: PLC0415

        return self._kept(Search), lambda files, options: build(gpus, host, files, options)

    @cached_property
    def roots(self) -> Roots:
        """The driver roots, once it is known what they are."""
        return self._ask_roots()

    def _kept(self, kind: Callable[[Roots], Any]) -> Any:
        """The search of this kind, which remembers what it has found."""
        if kind not in self._searches:
            self._searches[kind] = kind(self.roots)
        return self._searches[kind]

    def holds(self, spec: Spec) -> bool:
        """Whether all that a specification names is on the host, its device nodes with their numbers, as far as can be seen."""
        there = all(any(map(os.path.lexists, self._seen_as(path))) for path in host_paths(spec))
        return there and all(map(self._numbered, device_nodes(spec)))

    def _numbered(self, node: DeviceNode) -> bool:
        """Whether a device node has the numbers that a specification gives it; it may give none."""
        if not node.major and not node.minor:
            return True
        there = filter(None, map(device_at, self._seen_as(node.host_path or node.path)))
        return any((found.major, found.minor) == (node.major, node.minor) for found in there)

    def _hook(self, hook: str) -> tuple[str, str]:
        """NVIDIA's hook if it is on the host, else none, and a sentence that says so."""
        if not hook or any(os.access(path, os.X_OK) for path in self._seen_as(hook)):
            return hook, ""
        return "", (
            f"--nvidia-cdi-hook-path: there is no program {hook} on the host, as far as this process can see it; CDI "
            "specifications are written without hooks, and work without them"
        )

    def _seen_as(self, host_path: str) -> list[str]:
        """Where this process may see a path of the host: below a driver root, under /dev, or as it is where it runs on the host.

        In a container the same path in its own root is another file.
        """
        inside = [
            f"{seen_at}{host_path.removeprefix(host)}"
            for seen_at, host in self.roots
            if host_path.startswith(f"{host}/")
        ]
        on_host = any(seen_at == host for seen_at, host in self.roots)
        return [*inside, host_path] if on_host or host_path.startswith("/dev/") else inside
