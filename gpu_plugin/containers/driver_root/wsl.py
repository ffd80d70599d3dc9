"""Finds the files for Linux of a Windows host's driver below a root. Searches again only after a change."""

import filecmp
from collections.abc import Sequence
from pathlib import Path

from gpu_plugin.containers.cdi import wsl
from gpu_plugin.containers.cdi.build import Built
from gpu_plugin.containers.cdi.directories import DXCORE, DXCORE_DIRECTORIES, WSL_LIBRARIES
from gpu_plugin.containers.cdi.host_files import HostDevices, Kind, SeenLibrary
from gpu_plugin.containers.cdi.options import CdiOptions
from gpu_plugin.containers.driver_root.tree import FirstRoot, Tree
from gpu_plugin.devices.node import Gpu

_LOADED_AS = ("libcuda.so.1", "libcuda.so.1.1")  # the names of the loader of CUDA in WSL's own directory


class WslSearch(FirstRoot[wsl.WslFiles]):
    """Finds the files for Linux of a Windows host's driver."""

    def _in(self, tree: Tree, root: str, running: str) -> tuple[wsl.WslFiles, bool]:
        del running
        dxcore = _dxcore(tree)
        listing = tree.names([wsl.STORE])
        listing = tree.names(wsl.of_nvidia(listing.get(wsl.STORE, ())))
        stores = [_store(tree, directory, names) for directory, names in listing.items() if wsl.CUDA in names]
        if not stores:
            return wsl.WslFiles(fault=wsl.no_driver(root)), False
        store, complaints = wsl.choose(stores, root)
        libraries, files, lacking = wsl.pick(store, root)
        seen = tuple(map(tree.library, libraries)), tuple(map(tree.look, files))
        return wsl.WslFiles(dxcore, *seen, (*complaints, *lacking)), bool(libraries)

    def specs(self, files: wsl.WslFiles, gpus: Sequence[Gpu], host: HostDevices, options: CdiOptions) -> Built:
        """Build the specification of the single device."""
        del gpus
        return wsl.wsl_specs(files, host, options)


def _store(tree: Tree, directory: str, names: tuple[str, ...]) -> wsl.Store:
    cuda = tree.look(f"/{directory}/{wsl.CUDA}")
    try:
        written = Path(tree.root + cuda.target).stat().st_mtime_ns if cuda.kind is Kind.FILE else 0
    except OSError:
        written = 0  # removed just now
    return wsl.Store(directory, names, _current(tree, f"/{directory}/{wsl.CUDA_LOADER}"), written)


def _current(tree: Tree, loader: str) -> bool:
    """Whether this loader of CUDA equals the loader in WSL's own directory."""
    own = tree.look(loader)
    for name in _LOADED_AS:
        loaded = tree.look(f"/{WSL_LIBRARIES}/{name}")
        if own.kind is loaded.kind is Kind.FILE and not own.fault and not loaded.fault:
            try:
                return filecmp.cmp(tree.root + own.target, tree.root + loaded.target, shallow=False)
            except OSError:
                return False  # a file was removed just now
    return False


def _dxcore(tree: Tree) -> SeenLibrary | None:
    """Return the first libdxcore that can be loaded; if none can be loaded, the first libdxcore; None without a libdxcore."""
    there = [directory for directory, names in tree.names(DXCORE_DIRECTORIES).items() if DXCORE in names]
    libraries = [tree.library(f"/{directory}/{DXCORE}") for directory in there]
    return next((library for library in libraries if not library.fault), libraries[0] if libraries else None)
