"""Builds the CDI specifications of this node from its present files. Every call blocks and needs a thread of its own."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from gpu_plugin.config.settings import Settings
from gpu_plugin.containers.cdi.host_files import Kind
from gpu_plugin.containers.cdi.spec import DeviceNode, Spec, device_nodes, hook_programs, mounted
from gpu_plugin.containers.driver_root.safe import Judged, judge
from gpu_plugin.containers.driver_root.tree import device_node
from gpu_plugin.containers.edits import Access
from gpu_plugin.containers.host_view import HostView
from gpu_plugin.devices.device import TEGRA_GPU, WSL_GPUS
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.devices.plan import served_gpus
from gpu_plugin.runtime.printable import printable

if TYPE_CHECKING:
    from gpu_plugin.containers.cdi.build import Built
    from gpu_plugin.containers.cdi.options import CdiOptions
    from gpu_plugin.containers.driver_root.tree import FirstRoot

MAX_NAMED_FAULTS = 3  # unsafe paths that one error names

_SEARCHES = 2  # attempts for one specification: a file may change after the search has found it

_MOUNTED = (Kind.FILE, Kind.SOCKET, Kind.DIRECTORY)


class UnsafeSpecError(Exception):
    """Specifications would name paths that ordinary users can change. The text has the paths and the reasons."""


Roots = Sequence[tuple[str, str]]
"""Driver roots, best first. Each entry is the path in this process and the path on the host, without a slash at the end."""


class Request(msgspec.Struct, frozen=True):
    """The GPUs that containers may get, the driver's version, and the operator's options."""

    gpus: tuple[Gpu, ...]
    driver_version: str
    options: "CdiOptions"
    complaints: tuple[str, ...] = ()  # sentences about the options, which the result repeats


class Wanted(msgspec.Struct, frozen=True):
    """The node, the settings and the data for Allocate that specifications are made for."""

    node: Node
    settings: Settings
    access: Access

    def request(self) -> Request:
        """Return the request. The first call imports modules, so it belongs on a thread."""
        from gpu_plugin.containers.cdi.options import cdi_options, ignored_options  # noqa: PLC0415 - no pod waits for them

        options = cdi_options(self.settings, self.access)
        complaints = tuple(ignored_options(self.settings))
        return Request(served_gpus(self.node, self.settings), self.node.driver_version, options, complaints)


class SpecSource:
    """Builds the specifications of one node. Returns the same object as before if nothing has changed."""

    def __init__(self, host: HostView, roots: Callable[[], Roots]) -> None:
        """`roots` returns the driver roots, and blocks."""
        self._host = host
        self._ask_roots = roots
        self._searches: dict[type[FirstRoot[Any]], FirstRoot[Any]] = {}
        self._last: tuple[object, Built] | None = None

    def build(self, request: Request) -> "Built":
        """Build the specifications for a request.

        Raises:
            OSError: a directory of the driver root cannot be read.
            UnsafeSpecError: users could replace the driver root, or files keep changing while they are searched.
        """
        if unsafe := [*self._unsafe_roots()]:
            raise UnsafeSpecError("; ".join(unsafe))
        for _ in range(_SEARCHES):
            search, inputs, built = self._build(request)
            if self._last is not None and built is self._last[1]:
                return built
            faults = [fault for spec in built.specs.values() for fault in self._unsafe(spec)]
            if not faults:
                self._last = inputs, built
                return built
            search.forget()
        raise UnsafeSpecError("; ".join(faults[:MAX_NAMED_FAULTS]))

    def _build(self, request: Request) -> "tuple[FirstRoot[Any], object, Built]":
        """Return the search, the inputs, and the specifications. Equal inputs give the same object as before."""
        host = self._host.devices(gpu.pci_bus_id for gpu in request.gpus)
        search = self._search(request.gpus)
        files, driver_root = search.files(request.driver_version), search.host_root
        hook, complaint = self._hook(request.options.hook)
        options = replace(request.options, driver_root=driver_root, hook=hook)
        inputs = (request, files, host, options, complaint)
        if self._last is not None and self._last[0] == inputs:
            return search, inputs, self._last[1]
        built = search.specs(files, request.gpus, host, options)
        more = (*request.complaints, *([complaint] if complaint else []))
        if more:
            built = replace(built, complaints=(*built.complaints, *more))
        return search, inputs, built

    def _search(self, gpus: Sequence[Gpu]) -> "FirstRoot[Any]":
        """Return the search for the driver's files on this kind of node, with its earlier results.

        WSL nodes and Tegras have one device, whose name identifies the kind of node.
        """
        kind: type[FirstRoot[Any]]
        uuids = {gpu.uuid for gpu in gpus}
        if WSL_GPUS in uuids:
            from gpu_plugin.containers.driver_root.wsl import WslSearch  # noqa: PLC0415 - few nodes need it

            kind = WslSearch
        elif TEGRA_GPU in uuids:
            from gpu_plugin.containers.driver_root.tegra import TegraSearch  # noqa: PLC0415

            kind = TegraSearch
        else:
            from gpu_plugin.containers.driver_root.search import Search  # noqa: PLC0415 - 15 ms that no pod waits for

            kind = Search
        if kind not in self._searches:
            self._searches[kind] = kind(self.roots)
        return self._searches[kind]

    @cached_property
    def roots(self) -> Roots:
        """The driver roots, read once."""
        return self._ask_roots()

    def holds(self, spec: Spec) -> bool:
        """Whether every file of a specification exists on the host and is safe, and device nodes have their numbers."""
        programs = all(self._looks(path, (Kind.FILE,)) for path in hook_programs(spec))
        mounts = all(self._looks(path, _MOUNTED) for path in mounted(spec))
        unsafe = any(self._unsafe_roots()) or any(self._unsafe(spec))
        return programs and mounts and not unsafe and all(map(self._numbered, device_nodes(spec)))

    def _unsafe_roots(self) -> Iterator[str]:
        """Yield a sentence for each driver root that other users than root could replace."""
        for seen_at, host in self.roots:
            seen = judge("", seen_at, (Kind.DIRECTORY,)).seen
            if seen_at and seen.kind is Kind.DIRECTORY and seen.fault:
                yield f"other users than root can change or replace the driver root {printable(host)}: {seen.fault}"

    def _unsafe(self, spec: Spec) -> Iterator[str]:
        """Yield a sentence for each unsafe host path, and for each mounted path that includes a link."""
        for path in mounted(spec):
            for each in self._looks(path, _MOUNTED):
                if each.seen.fault:
                    yield f"{printable(path)} must not be given to containers: {each.seen.fault}"
                elif each.seen.target != each.seen.path:
                    yield f"{printable(path)} must not be given to containers: it leads over a link"
        for path in hook_programs(spec):
            for each in self._looks(path, (Kind.FILE,)):
                if each.seen.fault:
                    yield f"{printable(path)} must not be run as a hook: {each.seen.fault}"

    def _numbered(self, node: DeviceNode) -> bool:
        """Whether a device node exists with its numbers in the specification, which may have no numbers."""
        looks = self._looks(node.host_path or node.path, (Kind.DEVICE,))
        if any(each.seen.fault for each in looks):
            return False
        numbers = (device_node(each.way.status) for each in looks if each.way.status is not None)
        found = [(each.major, each.minor) for each in numbers if each is not None]
        wanted = (node.major, node.minor)
        return wanted in found if any(wanted) else bool(found)

    def _hook(self, hook: str) -> tuple[str, str]:
        """Return NVIDIA's hook if it exists on the host and is safe; else empty, and a sentence with the reason."""
        if not hook:
            return "", ""
        looks = self._looks(hook, (Kind.FILE,))
        fault = next((each.seen.fault for each in looks if each.seen.fault), "")
        if fault:
            why = (
                f"the program {printable(hook)} of the host, which the runtime would run as root, is not safe: {fault}"
            )
        elif any(os.access(f"{root}{path}", os.X_OK) for root, path in self._places(hook)):
            return hook, ""
        else:
            why = f"there is no program {hook} on the host, as far as this process can see it"
        return "", (
            f"--nvidia-cdi-hook-path: {why}; CDI specifications are written without hooks, and work without them"
        )

    def _looks(self, host_path: str, kinds: Sequence[Kind]) -> list[Judged]:
        """Return the files in this process that may be a path of the host, each with its faults."""
        judged = [judge(root, path, kinds) for root, path in self._places(host_path)]
        return [each for each in judged if each.seen.kind is not Kind.MISSING]

    def _places(self, host_path: str) -> list[tuple[str, str]]:
        """Return the paths in this process that may be a path of the host, each as a root and a path below it.

        The path may be below a driver root, in /dev, or the same path if this process runs on the host. In a container, the same
        path in the container's own root is another file.
        """
        inside = [
            (seen_at, host_path.removeprefix(host)) for seen_at, host in self.roots if host_path.startswith(f"{host}/")
        ]
        on_host = any(seen_at == host for seen_at, host in self.roots)
        if (on_host and not inside) or host_path.startswith("/dev/"):
            inside.append(("", host_path))
        return list(dict.fromkeys(inside))
