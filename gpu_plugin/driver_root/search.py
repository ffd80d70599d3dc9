"""Finds a driver's user space below its root, again only where something there has changed."""

import os
from collections.abc import Sequence

from gpu_plugin.access.cdi import driver
from gpu_plugin.access.cdi.found import DriverFiles, Listing, Seen
from gpu_plugin.driver_root.tree import Tree


class Search:
    """Keeps what was found below the first of these roots that has a driver, until a directory there changes.

    `roots` are (as this process sees it, as the host calls it), both without a slash at the end, empty for /.
    """

    def __init__(self, roots: Sequence[tuple[str, str]], kernel: str = os.uname().release) -> None:
        self.roots = tuple(dict.fromkeys(roots))
        self.host_root = self.roots[0][1]
        """The root in use, as the host calls it."""
        self.searches = 0
        """How often the files were searched, for those who watch that it is not done in vain."""
        self._kernel = kernel
        self._trees: tuple[Tree, ...] = ()
        self._running = ""
        self._found = DriverFiles()

    def files(self, running: str) -> DriverFiles:
        """What there is for the driver of this version, empty where it is not known. Blocks.

        Raises:
            OSError: a directory cannot be read.
        """
        if not self._trees or running != self._running or any(tree.changed for tree in self._trees):
            self._found = self._search(running)
            self._running = running
        return self._found

    def _search(self, running: str) -> DriverFiles:
        self.searches += 1
        remembered = {tree.root: tree.libraries for tree in self._trees}
        self._trees = ()  # a search that fails halfway is made again
        trees, faults = [], []
        for seen_at, host in self.roots:
            tree = Tree(seen_at, remembered.get(seen_at, {}))
            trees.append(tree)
            found = self._in(tree, running, host or "/")
            if found.libraries or found.version:
                self.host_root = host
                break
            faults.append(found)
        else:
            found, self.host_root = faults[0], self.roots[0][1]
        self._trees = tuple(trees)
        return found

    def _in(self, tree: Tree, running: str, root: str) -> DriverFiles:
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
