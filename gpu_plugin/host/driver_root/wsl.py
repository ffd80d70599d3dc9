"""Finds what the driver of a Windows host has for Linux, below a root, again only where something there has changed."""

import filecmp
from collections.abc import Sequence
from pathlib import Path

from gpu_plugin.access.cdi import wsl
from gpu_plugin.access.cdi.directories import DXCORE, DXCORE_DIRECTORIES, WSL_LIBRARIES
from gpu_plugin.access.cdi.host_files import Kind, SeenLibrary
from gpu_plugin.host.driver_root.tree import FirstRoot, Tree

_LOADED_AS = ("libcuda.so.1", "libcuda.so.1.1")  # what the loader of CUDA is called in WSL's own directory


class WslSearch(FirstRoot[wsl.WslFiles]):
    """Keeps what was found below the first of these roots that has a driver for Linux, until a directory there changes."""

    def __init__(self, roots: Sequence[tuple[str, str]]) -> None:
        super().__init__(roots)
        self._found = wsl.WslFiles()

    def files(self) -> wsl.WslFiles:
        """What there is. Blocks. Raises OSError where a directory cannot be read."""
        if self._stale:
            self._found = self._first(find, lambda found: bool(found.libraries))
        return self._found


def find(tree: Tree, root: str) -> wsl.WslFiles:
    """What there is below the root of this tree, which the operator calls `root`. Blocks. Raises OSError."""
    dxcore = _dxcore(tree)
    listing = tree.names([wsl.STORE])
    listing = tree.names(wsl.of_nvidia(listing.get(wsl.STORE, ())))
    directories = wsl.listed(listing)
    if not directories:
        return wsl.WslFiles(fault=wsl.no_driver(root))
    store, complaints = wsl.choose([_store(tree, directory, listing[directory]) for directory in directories], root)
    libraries, files, lacking = wsl.pick(store, root)
    return wsl.WslFiles(
        dxcore,
        tuple(map(tree.library, libraries)),
        tuple(map(tree.look, files)),
        (*complaints, *lacking),
    )


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
