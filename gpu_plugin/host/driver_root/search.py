"""Finds a driver's user space below its root, again only where something there has changed."""

import os
from collections.abc import Sequence

from gpu_plugin.access.cdi import driver
from gpu_plugin.access.cdi.host_files import DriverFiles, Seen
from gpu_plugin.host.driver_root.tree import FirstRoot, Tree


class Search(FirstRoot[DriverFiles]):
    """Finds a driver for Linux."""

    def __init__(self, roots: Sequence[tuple[str, str]], kernel: str = os.uname().release) -> None:
        super().__init__(roots)
        self._kernel = kernel

    def _in(self, tree: Tree, root: str, running: str) -> tuple[DriverFiles, bool]:
        listing = tree.names(driver.directories())
        # Directories to which a driver's libraries are linked and whose names are not known yet.
        targets = (tree.look(path).target for path in driver.linked_libraries(listing))
        linked = dict.fromkeys(target.rpartition("/")[0].strip("/") for target in targets if target)
        more = tuple(directory for directory in linked if directory not in listing)
        listing = {**listing, **tree.names(each for at in more for each in driver.with_subdirectories(at))}
        picked = driver.pick(listing, running, root, more)
        if picked.version:  # only now it is known where its firmware lies
            listing = {**listing, **tree.names(driver.firmware_directories(picked.version, self._kernel))}
            picked = driver.pick(listing, running, root, more)
        libraries = [tree.library(path) for path in picked.libraries]
        files = [(_look(tree, path), group) for path, group in picked.files]
        found = driver.chosen(picked, libraries, files, root)
        return found, bool(found.libraries or found.version)


def _look(tree: Tree, path: str) -> Seen:
    return tree.look_for(path) if path[1:] in driver.COMING_AND_GOING else tree.look(path)
