"""Follow links in a directory that is the root of an installed file system.

An absolute link in a driver root starts at that root. Followed from `/`, it would leave the driver root.
"""

import errno
import os
import stat

import msgspec

MAX_LINKS = 40  # the most links on the way to one file, the same as in the kernel; more are a circle

# The most directory entries on the way to one file; a driver's files need some 40. Each directory takes an open file, and a
# process may have only 1,024: a user's link through very many directories must not stop the search for other files.
MAX_NAMES = 300

# Each name is opened without following a link, and without any effect on a device or a FIFO.
_OPEN_NAME = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

# The process or the system cannot open another file. This is not a fault of the path.
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Name(msgspec.Struct, frozen=True):
    """A directory entry on the way: its directory and the file itself, each with its path and its status.

    Paths begin with the root.
    """

    directory: str
    directory_status: os.stat_result  # read before the entry was opened
    path: str
    status: os.stat_result

    @property
    def link(self) -> bool:
        """Whether the name is a symbolic link."""
        return stat.S_ISLNK(self.status.st_mode)


class Way(msgspec.Struct):
    """The way to a file below a root, every link on it included."""

    # The path of the file without links; the root for the root itself. None if the file does not exist, links form a circle, or
    # there are more than MAX_NAMES entries.
    path: str | None = None
    status: os.stat_result | None = None  # the file's
    names: list[Name] = msgspec.field(default_factory=list)  # every directory entry on the way, in order
    link: bool = False  # True if the path itself is a link, and False if only directories on the way are


class _Directory(msgspec.Struct):
    path: str
    descriptor: int
    status: os.stat_result


def resolve(root: str, path: str) -> str | None:
    """Return `path` without links, or None; both paths are below `root`. See `walk`."""
    return walk(root, path).path


def walk(root: str, path: str) -> Way:
    """Follow a path below `root`. Absolute links start at the root. Blocks.

    Each entry is opened in the open directory before it, so the result is consistent even if a directory is renamed or
    replaced at the same time.

    Args:
        root: without a slash at its end, empty for the real one.
        path: begins with the root.

    Raises:
        OSError: the process or the system cannot open another file.
    """
    way = Way()
    opened: list[_Directory] = []
    try:
        descriptor = os.open(root or "/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.append(_Directory(root, descriptor, os.fstat(descriptor)))
        if _follow(way, opened, path.removeprefix(root)):
            way.path, way.status = opened[-1].path, opened[-1].status
    except ValueError:
        pass  # no file has a NUL in its name
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
    finally:
        for each in opened:
            os.close(each.descriptor)
    return way


def _follow(way: Way, opened: list[_Directory], path: str) -> bool:
    """Open each directory on the way, and then the file. Return False if the way continues after a file, or is too long."""
    root, links, left = opened[0].path, 0, _steps(path)
    while left:
        at = opened[-1]
        if not stat.S_ISDIR(at.status.st_mode):
            return False
        step = left.pop()
        if step == ".":
            continue
        if step == "..":
            if len(opened) > 1:  # the root is its own parent
                os.close(opened.pop().descriptor)
            continue
        here = f"{at.path}/{step}"
        descriptor = os.open(step, _OPEN_NAME, dir_fd=at.descriptor)
        opened.append(_Directory(here, descriptor, os.fstat(descriptor)))
        name = Name(at.path, at.status, here, opened[-1].status)
        way.names.append(name)
        if len(way.names) > MAX_NAMES:
            return False
        if not name.link:
            continue
        way.link = way.link or not left
        links += 1
        if links > MAX_LINKS:
            return False
        target = os.readlink("", dir_fd=descriptor)
        os.close(opened.pop().descriptor)
        if target.startswith("/"):
            while len(opened) > 1:
                os.close(opened.pop().descriptor)
            if root and f"{target}/".startswith(f"{root}/"):
                target = target.removeprefix(root)  # the link was written with the path at which the root is mounted
        left += _steps(target)
    return True


def _steps(path: str) -> list[str]:
    """Return the parts of a path, the last part first. A slash at the end becomes ".", which only a directory has."""
    parts = [part for part in reversed(path.split("/")) if part]
    return [".", *parts] if path.endswith("/") else parts
