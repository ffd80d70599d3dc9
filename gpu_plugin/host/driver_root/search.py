"""Finds a driver's user space below its root, again only where something there has changed."""

import os
from collections.abc import Sequence
from functools import partial

from gpu_plugin.access.cdi import driver
from gpu_plugin.access.cdi.host_files import DriverFiles, Listing, Seen
from gpu_plugin.host.driver_root.tree import FirstRoot, Tree


class Search(FirstRoot[DriverFiles]):
    """Keeps what was found below the first of these roots that has a driver, until a directory there changes."""

    def __init__(self, roots: Sequence[tuple[str, str]], kernel: str = os.uname().release) -> None:
        super().__init__(roots)
        self._kernel = kernel
        self._running = ""
        self._found = DriverFiles()

    def files(self, running: str) -> DriverFiles:
        """What there is for the driver of this version, empty where it is not known. Blocks.

        Raises OSError where a directory cannot be read.
        """
        if running != self._running or self._stale:
            self._found = self._first(partial(self._in, running), lambda found: bool(found.libraries or found.version))
            self._running = running
        return self._found

    def _in(self, running: str, tree: Tree, root: str) -> DriverFiles:
        listing = tree.names(driver.directories())
        more = self._linked(tree, listing)
        listing = {**listing, **tree.names(each for at in more for each in driver.with_subdirectories(at))}
        picked = driver.pick(listing, running, root, more)
        if picked.version:  # only now it is known where its firmware lies
            listing = {**listing, **tree.names(driver.firmware_directories(picked.version, self._kernel))}
            picked = driver.pick(listing, running, root, more)
        libraries = [tree.library(path) for path in picked.libraries]
        files = [(self._look(tree, path), group) for path, group in picked.files]
        return driver.chosen(picked, libraries, files, root)

    @staticmethod
    def _linked(tree: Tree, listing: Listing) -> tuple[str, ...]:
        """Directories, without a slash in front, to which a driver's libraries are linked and whose names are not known yet."""
        targets = (tree.look(path).target for path in driver.linked_libraries(listing))
        found = dict.fromkeys(target.rpartition("/")[0].strip("/") for target in targets if target)
        return tuple(directory for directory in found if directory not in listing)

    @staticmethod
    def _look(tree: Tree, path: str) -> Seen:
        return tree.look_for(path) if path[1:] in driver.COMING_AND_GOING else tree.look(path)
