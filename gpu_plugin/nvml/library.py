"""Finding, loading and unloading libnvidia-ml.so.1, from under a driver root where there is one."""

import _ctypes
import ctypes
import os
import threading
from collections.abc import Sequence

from gpu_plugin.nvml.port import NvmlError, Return

SONAME = "libnvidia-ml.so.1"

DIRECTORIES = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib",
    "lib",
    "usr/lib64/nvidia",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/local/nvidia/lib64",
    "opt/nvidia/lib64",
    "lib64/nvidia",
)
"""Where drivers put the library under a root: distributions' own directories, then those of Debian's alternatives, GKE's
installer and prebuilt images."""


_MOST_LINKS = 40
"""Links on the way to one file, as the kernel counts them: more are a circle."""


def candidates(roots: Sequence[str]) -> list[tuple[str, str]]:
    """Files that may be the library, best first, each with the root that it lies under.

    Those under each root that is not the real one; then, under no root, the bare name.
    """
    other = dict.fromkeys(root.rstrip("/") for root in roots)
    found = [(root, f"{root}/{directory}/{SONAME}") for root in other if root for directory in DIRECTORIES]
    return [*found, ("", SONAME)]


def load(roots: Sequence[str]) -> ctypes.CDLL:
    """The library, from under the first root that has one, else wherever the loader finds it.

    Raises:
        NvmlError: LIBRARY_NOT_FOUND, naming every path tried and what to do.
    """
    tried = []
    for root, candidate in candidates(roots):
        path = _inside(root, candidate) if root else candidate
        if path is None:
            tried.append(candidate)
            continue
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            tried.append(f"{path} ({error})")
    raise NvmlError(
        Return.LIBRARY_NOT_FOUND,
        "dlopen",
        f"no {SONAME}: tried {', '.join(tried)}. Install the NVIDIA driver on this node, or mount its root at "
        "--driver-root-ctr-path",
    )


def unload(loaded: ctypes.CDLL) -> None:
    """Gives the library back to the loader, which takes its code away: no call into it may be under way or come."""
    _ctypes.dlclose(loaded._handle)  # noqa: SLF001 - ctypes never closes what it opened, and says its handle nowhere else


class Calls:
    """How many calls into the library are under way, on whatever thread: while one is, its code must stay where it is.

    With `lock` held no other begins.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0

    def __enter__(self) -> None:
        with self.lock:
            self.calls += 1

    def __exit__(self, *_raised: object) -> None:
        with self.lock:
            self.calls -= 1


def _inside(root: str, candidate: str) -> str | None:
    """The file behind `candidate`, every link on the way taken as meant within `root`; None where there is none.

    An absolute link in a driver root is meant for who has that root as his own: followed as it stands, it leaves it.
    """
    at, links = root, 0
    left = _steps(candidate.removeprefix(root))
    while left:
        step = left.pop()
        if step == "..":
            at = at if at == root else os.path.dirname(at)  # noqa: PTH120
            continue
        path = f"{at}/{step}"
        if not os.path.islink(path):  # noqa: PTH114
            at = path
            continue
        links += 1
        if links > _MOST_LINKS:
            return None
        target = os.readlink(path)  # noqa: PTH115
        if target.startswith("/"):
            at = root
            if target.startswith(f"{root}/"):
                target = target.removeprefix(root)  # written by someone who saw the root where it is mounted
        left += _steps(target)
    return at if os.path.exists(at) else None  # noqa: PTH110


def _steps(path: str) -> list[str]:
    """The parts of a path, the last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]
