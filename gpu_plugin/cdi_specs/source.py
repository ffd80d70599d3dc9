"""What the CDI specifications of this node should say now. Every call blocks: it runs on a thread of its own."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpu_plugin.access.cdi.build import Built, Wishes, build
from gpu_plugin.access.cdi.found import HostDevices
from gpu_plugin.devices.device import TEGRA_GPU, WSL_GPUS
from gpu_plugin.devices.node import Gpu
from gpu_plugin.driver_root.search import Search
from gpu_plugin.nvml.port import HostView

if TYPE_CHECKING:
    from gpu_plugin.driver_root.tegra import TegraSearch
    from gpu_plugin.driver_root.wsl import WslSearch

Roots = Sequence[tuple[str, str]]
"""Driver roots, best first: each as this process sees it and as the host calls it, without a slash at the end."""


@dataclass(frozen=True, slots=True)
class Request:
    """What specifications are for: the GPUs that may be handed out, the driver's version, and what the operator wants."""

    gpus: tuple[Gpu, ...]
    driver_version: str
    wishes: Wishes


class SpecSource:
    """Builds the specifications of one node; the very same object as before where nothing has changed."""

    def __init__(self, host: HostView, roots: Callable[[], Roots]) -> None:
        """Takes the host's device nodes, and how to learn the driver roots, which blocks too."""
        self._host = host
        self._roots = roots
        self._search: Search | None = None
        self._wsl: WslSearch | None = None
        self._tegra: TegraSearch | None = None
        self._last: tuple[object, Built] | None = None

    def build(self, request: Request) -> Built:
        """The specifications for a request. Raises OSError where a directory of the driver root cannot be read."""
        host = self._host.devices(gpu.pci_bus_id for gpu in request.gpus)
        files, driver_root, make = self._found(request, host)
        hook, complaint = self._hook(request.wishes.hook)
        wishes = replace(request.wishes, driver_root=driver_root, hook=hook)
        inputs = (request, files, host, wishes)
        if self._last is not None and self._last[0] == inputs:
            return self._last[1]
        built = make(wishes)
        if complaint:
            built = replace(built, complaints=(*built.complaints, complaint))
        self._last = inputs, built
        return built

    def _found(self, request: Request, host: HostDevices) -> tuple[object, str, Callable[[Wishes], Built]]:
        """The files found, the driver root they lie below, as the host calls it, and what makes specifications of them.

        What kind of node this is, the one device of WSL and of a Tegra says by its name.
        """
        uuids = {gpu.uuid for gpu in request.gpus}
        if WSL_GPUS in uuids:
            from gpu_plugin.access.cdi.wsl import wsl_specs  # noqa: PLC0415 - few nodes are of that kind
            from gpu_plugin.driver_root.wsl import WslSearch  # noqa: PLC0415

            self._wsl = self._wsl or WslSearch(self.search.roots)
            on_windows = self._wsl.files()
            return on_windows, self._wsl.host_root, lambda wishes: wsl_specs(on_windows, host, wishes)
        if TEGRA_GPU in uuids:
            from gpu_plugin.access.cdi.tegra import tegra_specs  # noqa: PLC0415
            from gpu_plugin.driver_root.tegra import TegraSearch  # noqa: PLC0415

            self._tegra = self._tegra or TegraSearch(self.search.roots)
            on_tegra = self._tegra.files()
            return on_tegra, self._tegra.host_root, lambda wishes: tegra_specs(on_tegra, wishes)
        files = self.search.files(request.driver_version)
        return files, self.search.host_root, lambda wishes: build(request.gpus, host, files, wishes)

    @property
    def search(self) -> Search:
        """The search below the driver roots."""
        if self._search is None:
            self._search = Search(self._roots())
        return self._search

    def exists(self, host_path: str) -> bool:
        """Whether a path of the host is there, as far as this process can see it."""
        return any(os.path.lexists(path) for path in self._seen_as(host_path))

    def _hook(self, hook: str) -> tuple[str, str]:
        """NVIDIA's hook if it is on the host, else none, and a sentence that says so."""
        if not hook or any(os.access(path, os.X_OK) for path in self._seen_as(hook)):
            return hook, ""
        return "", (
            f"--nvidia-cdi-hook-path: there is no program {hook} on the host, as far as it can be seen from here; CDI "
            "specifications go without hooks, which they do not need"
        )

    def _seen_as(self, host_path: str) -> list[str]:
        inside = [
            f"{seen_at}{host_path.removeprefix(host)}"
            for seen_at, host in self.search.roots
            if host_path.startswith(f"{host}/")
        ]
        return [*inside, host_path]
