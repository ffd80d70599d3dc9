"""Finds a driver's user space below its root. Searches again only after a change."""

import os
from collections.abc import Sequence

from gpu_plugin.containers.cdi import driver
from gpu_plugin.containers.cdi.directories import LIBRARY_DIRECTORIES
from gpu_plugin.containers.cdi.host_files import DriverFiles, Kind, Seen
from gpu_plugin.containers.driver_root.loader import loader_directories
from gpu_plugin.containers.driver_root.tree import FirstRoot, Tree


class Search(FirstRoot[DriverFiles]):
    """Finds a driver for Linux."""

    def __init__(self, roots: Sequence[tuple[str, str]], kernel: str = os.uname().release) -> None:
        super().__init__(roots)
        self._kernel = kernel

    def _in(self, tree: Tree, root: str, running: str) -> tuple[DriverFiles, bool]:
        configured = loader_directories(tree)
        listing = tree.names((*driver.directories(), *configured))
        # Further directories that are targets of links to a driver's libraries.
        targets = (tree.look(path).target for path in driver.linked_libraries(listing, configured))
        linked = dict.fromkeys(target.rpartition("/")[0].strip("/") for target in targets if target)
        beside = dict.fromkeys((*linked, *configured))
        more = tuple(directory for directory in beside if directory not in LIBRARY_DIRECTORIES)
        listing = {**listing, **tree.names(more)}
        libraries = [directory for directory in (*LIBRARY_DIRECTORIES, *more) if directory in listing]
        listing = {**listing, **tree.names(driver.subdirectories(libraries))}
        picked = driver.pick(listing, running, root, more)
        if picked.version:  # the firmware's directory depends on the version
            listing = {**listing, **tree.names(driver.firmware_directories(picked.version, self._kernel))}
            picked = driver.pick(listing, running, root, more)
        seen = [tree.library(path) for path in picked.libraries]
        files = [(_look(tree, path), group) for path, group in picked.files]
        links = [tree.look(path) for path in driver.unversioned(listing, picked.libraries)]
        found = driver.chosen(picked, seen, files, root, links)
        return found, bool(found.libraries or found.version)


def _look(tree: Tree, path: str) -> Seen:
    expected = driver.COMING_AND_GOING.get(path[1:])
    if expected is None:
        return tree.look(path)
    _, kind = expected
    return tree.look_for(path, kind, links=kind is Kind.FILE)
