"""A search below several driver roots, of which the first that has a driver counts."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from gpu_plugin.host.driver_root.tree import Tree

Files = TypeVar("Files")


class FirstRoot(Generic[Files]):
    """Which of these roots is in use, and whether anything has changed below those that were looked at.

    `roots` are (as this process sees it, as the host calls it), both without a slash at the end, empty for /.
    """

    def __init__(self, roots: Sequence[tuple[str, str]]) -> None:
        self.roots = tuple(dict.fromkeys(roots))
        self.host_root = self.roots[0][1]
        """The root in use, as the host calls it."""
        self.searches = 0
        """How often the files were searched, for those who watch that it is not done in vain."""
        self._trees: tuple[Tree, ...] = ()

    @property
    def _stale(self) -> bool:
        """Whether no search has come to an end yet, or something has changed since the last that has. Blocks."""
        return not self._trees or any(tree.changed for tree in self._trees)

    def _first(self, find: Callable[[Tree, str], Files], serves: Callable[[Files], bool]) -> Files:
        """What `find` makes of the first root where that `serves`, else of the first root of all. Blocks.

        `find` takes a tree, and what the operator calls its root. Where it raises, so does this, and what was known stays.
        """
        self.searches += 1
        remembered = {tree.root: tree.libraries for tree in self._trees}
        trees: list[Tree] = []
        faulty: list[Files] = []
        for seen_at, host in self.roots:
            tree = Tree(seen_at, remembered.get(seen_at, {}))
            trees.append(tree)
            found = find(tree, host or "/")
            if serves(found):
                self.host_root = host
                break
            faulty.append(found)
        else:
            found, self.host_root = faulty[0], self.roots[0][1]
        self._trees = tuple(trees)
        return found
