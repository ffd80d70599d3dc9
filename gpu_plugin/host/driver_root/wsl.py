"""Finds what the driver of a Windows host has for Linux, below a root, again only where something there has changed."""

import filecmp
from pathlib import Path

from gpu_plugin.access.cdi import wsl
from gpu_plugin.access.cdi.directories import DXCORE, DXCORE_DIRECTORIES, WSL_LIBRARIES
from gpu_plugin.access.cdi.host_files import Kind, SeenLibrary
from gpu_plugin.host.driver_root.tree import FirstRoot, Tree

_LOADED_AS = ("libcuda.so.1", "libcuda.so.1.1")  # what the loader of CUDA is called in WSL's own directory


class WslSearch(FirstRoot[wsl.WslFiles]):
    """Finds what the driver of a Windows host has for Linux."""

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


def _store(tree: Tree, directory: str, names: tuple[str, ...]) -> wsl.Store:
    cuda = tree.look(f"/{directory}/{wsl.CUDA}")
    try:
        written = Path(tree.root + cuda.target).stat().st_mtime_ns if cuda.kind is Kind.FILE else 0
    except OSError:
        written = 0  # taken away since
    return wsl.Store(directory, names, _current(tree, f"/{directory}/{wsl.CUDA_LOADER}"), written)


def _current(tree: Tree, loader: str) -> bool:
    """Whether a loader of CUDA is the one that WSL's own directory has."""
    own = tree.look(loader)
    for name in _LOADED_AS:
        loaded = tree.look(f"/{WSL_LIBRARIES}/{name}")
        if own.kind is loaded.kind is Kind.FILE:
            try:
                return filecmp.cmp(tree.root + own.target, tree.root + loaded.target, shallow=False)
            except OSError:
                return False  # one was taken away since
    return False


def _dxcore(tree: Tree) -> SeenLibrary | None:
    """The first libdxcore that can be loaded, else the first there is."""
    there = [directory for directory, names in tree.names(DXCORE_DIRECTORIES).items() if DXCORE in names]
    libraries = [tree.library(f"/{directory}/{DXCORE}") for directory in there]
    return next((library for library in libraries if not library.fault), libraries[0] if libraries else None)
