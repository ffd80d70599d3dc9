"""Decides which files of a driver root containers may get.

A container runtime mounts host paths as root and follows every link in them. So a path is safe only if no ordinary user can
change the file, or any directory or link on the way. Only `judge` decides this.

It reads the owner and the mode of each directory, link and file through open descriptors, so a file cannot be exchanged
between the check and the next step. The runtime follows the path again later. Until then, only root can change it.
"""

import os
import shlex
import stat
from collections.abc import Sequence

import msgspec

from gpu_plugin.containers.cdi.host_files import Kind, Seen
from gpu_plugin.containers.driver_root.inside import Name, Way, walk
from gpu_plugin.runtime.printable import printable

_KINDS = {
    stat.S_IFREG: Kind.FILE,
    stat.S_IFSOCK: Kind.SOCKET,
    stat.S_IFDIR: Kind.DIRECTORY,
    stat.S_IFCHR: Kind.DEVICE,
    stat.S_IFBLK: Kind.DEVICE,
}

_WORDS = {Kind.FILE: "regular file", Kind.SOCKET: "socket", Kind.DIRECTORY: "directory", Kind.DEVICE: "device node"}

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH  # an access control list shows its widest entry as the group's bits

_TEMPORARY = "/tmp/"  # noqa: S108 - no file of the operating system is there, so a wrong one can be removed


class Judged(msgspec.Struct, frozen=True):
    """The file behind a path, whether it is safe (`seen.fault` is empty if so), and the way to it."""

    seen: Seen
    way: Way


def judge(root: str, path: str, kinds: Sequence[Kind] = (Kind.FILE,), *, links: bool = True) -> Judged:
    """Follow a path below a driver root and decide whether containers may get the file. Blocks.

    The file is safe under these conditions:

    - The file is of one of `kinds`, lies below the root, and has a printable path.
    - Root owns every directory on the way, and only root can write to it. A sticky directory, such as /tmp, may be writable
      by other users if the next file on the way is a directory of root and not a mount point. (Users can move root's other files
      into a sticky directory. A user may mount a FUSE file system there, which names root as the owner of its files.)
    - Root owns every link on the way. Links are followed inside the root only.
    - Root owns the file, and only root can write to it. Sockets and device nodes may have any owner and mode, since a user who
      may open them still cannot replace them.

    The user of this process counts as root, since this process makes the specifications. The directories above the root are
    not on the way: judge the root itself with an empty root.

    Args:
        root: without a slash at its end, empty for the real one.
        path: below the root, with a slash at its beginning.
        kinds: the kinds of file to accept.
        links: whether the path itself may be a link. Directories on the way may always be links.

    Raises:
        OSError: the process or the system cannot open another file.
    """
    way = walk(root, root + path)
    if way.path is None or way.status is None:
        return Judged(Seen(path, Kind.MISSING, link=way.link), way)
    kind = _KINDS.get(stat.S_IFMT(way.status.st_mode), Kind.OTHER)
    target = way.path.removeprefix(root)
    if way.link and not links:
        words = " or ".join(_WORDS[each] for each in kinds)
        fault = (
            f"it is a symbolic link, and containers would get its target: remove the link {_quoted(path)}, "
            f"or make it a {words}"
        )
    else:
        fault = _fault(root, path, target, kind, kinds, way)
    return Judged(Seen(path, kind, target, fault, way.link), way)


def _fault(root: str, path: str, target: str, kind: Kind, kinds: Sequence[Kind], way: Way) -> str:
    if kind not in kinds:
        words = " or ".join(_WORDS[each] for each in kinds)
        remedy = f": remove {_quoted(path)}" if path.startswith(_TEMPORARY) else ""
        return f"it is a {kind}, but only a {words} may be there{remedy}"
    if not target:
        return "it is the root directory itself: use a directory below the root"
    if not path.isprintable() or not target.isprintable():
        return "its name, or the name of its target, is not printable text: rename it"
    for name in way.names:
        if why := _unsafe_name(root, name):
            return why
    if kind in (Kind.FILE, Kind.DIRECTORY):
        return _writable("it", root, target, way.names[-1].status)
    return ""


def _unsafe_name(root: str, name: Name) -> str:
    """Say why a user could replace the file of this name in its directory, or change its link; empty if no user can."""
    directory = name.directory_status
    sticky = directory.st_mode & stat.S_ISVTX and trusted(directory)
    path, place = name.path.removeprefix(root), name.directory.removeprefix(root)
    shown = printable(path)
    if sticky and directory.st_mode & _OTHERS_WRITE:
        if not trusted(name.status):
            # The files in a user's directory stay the user's after a chown of the directory.
            remedy = f"remove {_quoted(path)}" if path.startswith(_TEMPORARY) else _chown(root, path, link=name.link)
            return f"{shown} belongs to uid {name.status.st_uid}, and every user can make such files there: {remedy}"
        if not stat.S_ISDIR(name.status.st_mode):
            return (
                f"other users than root can move files into the directory of {shown}: keep it in a directory that only root can "
                f"write to"
            )
        if name.status.st_dev != directory.st_dev:
            return f"{shown} is a mount point in a directory where every user may have made it: unmount it"
    elif why := _writable(printable(place) or "the root itself", root, place, directory):
        return why
    if name.link and not trusted(name.status):
        return f"the link {shown} belongs to uid {name.status.st_uid}: {_chown(root, path, link=True)}"
    return ""


def _writable(subject: str, root: str, path: str, status: os.stat_result) -> str:
    """Say why other users than root can write to a file or change its mode; empty if they cannot. `path` is below the root."""
    if not trusted(status):
        return f"{subject} belongs to uid {status.st_uid}, who can change it: {_chown(root, path)}"
    if status.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        return f"other users than root can write to {subject} (mode {mode:04o}): {_run(root)}: chmod go-w {_argument(root, path)}"
    return ""


def _chown(root: str, path: str, *, link: bool = False) -> str:
    argument = _argument(root, path)
    if link:
        return f"check where it leads, then {_run(root)}: chown -h root:root {argument}"
    return f"{_run(root)}: chown root:root {argument} && chmod go-w {argument}"


def _run(root: str) -> str:
    # This process may see the driver root at another path than the host does.
    return "run in the driver root" if root else "run"


def _argument(root: str, path: str) -> str:
    """Return a path below the root for a command that runs in the driver root, or in any directory if the root is /."""
    return _quoted(f".{path}" if root else path or "/")


def _quoted(path: str) -> str:
    return shlex.quote(printable(path))


def trusted(status: os.stat_result) -> bool:
    """Whether a file belongs to root or to the user of this process."""
    return status.st_uid in (0, os.geteuid())
