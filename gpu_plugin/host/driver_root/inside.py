"""Following links in a directory that is the root of a file system for whoever installed it there.

An absolute link in a driver root is meant for those who have that root as their own: followed as it stands, it leaves it.
"""

import errno
import os
from collections.abc import Callable

MAX_LINKS = 40  # links on the way to one file, as the kernel counts them: more are a circle


def resolve(root: str, path: str, passed: Callable[[str], object] | None = None) -> str | None:
    """The real file behind `path`, both of them below `root`: every link on the way is taken as meant within it.

    Gives a path below `root` whose last part is no link; None where there is nothing, or a circle of links. `root` has no slash
    at its end and is empty for the real one. `passed` gets the directory of every link on the way, in which a change would
    change the answer.
    """
    at, links = root, 0
    left = _steps(path.removeprefix(root))
    while left:
        step = left.pop()
        if step in (".", ".."):
            if not os.path.isdir(at or "/"):  # noqa: PTH112
                return None
            if step == ".." and at != root:
                at = at.rpartition("/")[0]
            continue
        here = f"{at}/{step}"
        try:
            target = os.readlink(here)  # noqa: PTH115
            if passed is not None:
                passed(at)
                target = os.readlink(here)  # noqa: PTH115 - again: it may have changed before anyone looked at `at`
        except OSError as error:
            if error.errno != errno.EINVAL:  # readlink(2): there is something, and it is no link
                return None
            at = here
            continue
        links += 1
        if links > MAX_LINKS:
            return None
        if target.startswith("/"):
            at = root
            if root and f"{target}/".startswith(f"{root}/"):
                target = target.removeprefix(root)  # written by someone who saw the root where it is mounted
        left += _steps(target)
    return at if at != root or os.path.isdir(root or "/") else None  # noqa: PTH112


def _steps(path: str) -> list[str]:
    """The parts of a path, the last one first; a slash at its end is a part that only a directory has."""
    parts = [part for part in reversed(path.split("/")) if part]
    return [".", *parts] if path.endswith("/") else parts
