"""Finds a driver's user space below its root. Searches again only after a change."""

import os
from collections.abc import Sequence

from msgspec.structs import replace

from gpu_plugin.containers.cdi import driver
from gpu_plugin.containers.cdi.build import Built, build
from gpu_plugin.containers.cdi.host_files import LIBRARY_DIRECTORIES, DriverFiles, HostDevices, Kind, Seen
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
        listing = tree.names((*driver.directories(), *configured))
        # Further directories that are targets of links to a driver's libraries.
        places = tuple(dict.fromkeys((*LIBRARY_DIRECTORIES, *configured)))
        targets = (tree.look(path).target for path in driver.linked_libraries(listing, places))
        linked = [target.rpartition("/")[0].strip("/") for target in targets if target]
        places = tuple(dict.fromkeys((*LIBRARY_DIRECTORIES, *linked, *configured)))
        listing = {**listing, **tree.names(linked)}
        listing = {**listing, **tree.names(driver.subdirectories(at for at in places if at in listing))}
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


def _look(tree: Tree, path: str) -> Seen:
    expected = driver.COMING_AND_GOING.get(path[1:])
    if expected is None:
        return tree.look(path)
    _, kind = expected
    return tree.look_for(path, kind, links=kind is Kind.FILE)
