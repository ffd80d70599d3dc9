"""Finds a driver's user space below its root. Searches again only after a change."""

import os
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from gpu_plugin.containers.cdi import driver
from gpu_plugin.containers.cdi.build import Built, build
from gpu_plugin.containers.cdi.host_files import LIBRARY_DIRECTORIES, DriverFiles, HostDevices, Kind, Listing, Seen
from gpu_plugin.containers.cdi.options import CdiOptions
from gpu_plugin.containers.driver_root.loader import loader_directories
from gpu_plugin.containers.driver_root.tree import FirstRoot, Tree
from gpu_plugin.devices.node import Gpu


class Search(FirstRoot[DriverFiles]):
    """Finds a driver for Linux."""

    def __init__(self, roots: Sequence[tuple[str, str]], kernel: str = os.uname().release) -> None:
        super().__init__(roots)
        self._kernel = kernel

    def _in(self, tree: Tree, root: str, running: str) -> tuple[DriverFiles, bool]:
        configured = loader_directories(tree)
        listing = tree.names((*driver.DIRECTORIES, *configured))
        linked = _linked(tree, listing, dict.fromkeys((*LIBRARY_DIRECTORIES, *configured)))
        places = tuple(dict.fromkeys((*LIBRARY_DIRECTORIES, *linked, *configured)))
        listing = {**listing, **tree.names(linked)}
        found_places = [at for at in places if at in listing]
        listing = {**listing, **tree.names(f"{at}/{sub}" for at in found_places for sub in driver.SUBDIRECTORIES)}
        try:
            version, complaints = driver.version_in(listing, places, running, root)
        except driver.NoVersionError as error:
            return DriverFiles(fault=str(error)), False
        listing = {**listing, **tree.names(driver.firmware_directories(version, self._kernel))}
        paths, too_many = driver.libraries_of(listing, places, version, root)
        libraries = [tree.library(path) for path in paths]
        files = [(_look(tree, path), group) for path, group in driver.other_files(listing, version)]
        links = [tree.look(path) for path in driver.unversioned(listing, paths)]
        found = driver.chosen(version, libraries, files, root, links)
        return replace(found, complaints=(*complaints, *too_many, *found.complaints)), True

    def specs(self, files: DriverFiles, gpus: Sequence[Gpu], host: HostDevices, options: CdiOptions) -> Built:
        """Build the specifications for these GPUs and all of their MIG devices."""
        return build(gpus, host, files, options)


def _linked(tree: Tree, listing: Listing, places: Iterable[str]) -> list[str]:
    """Return directories of other names with the targets of links to a driver's libraries, such as Debian's nvidia/tesla-535."""
    names = ("libcuda.so.1", "libnvidia-ml.so.1")
    targets = [tree.look(f"/{at}/{name}").target for at in places for name in names if name in listing.get(at, ())]
    return [target.rpartition("/")[0].strip("/") for target in targets if target]


def _look(tree: Tree, path: str) -> Seen:
    expected = driver.COMING_AND_GOING.get(path[1:])
    if expected is None:
        return tree.look(path)
    _, kind = expected
    return tree.look_for(path, kind, links=kind is Kind.FILE)
