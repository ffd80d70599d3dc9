"""Finding, loading and unloading libnvidia-ml.so.1, from under a driver root where there is one."""

import _ctypes
import ctypes
import logging
import threading
from collections.abc import Sequence

from gpu_plugin.access.cdi.directories import LIBRARY_DIRECTORIES, WSL_LIBRARIES
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.host.driver_root.inside import resolve
from gpu_plugin.nvml.port import NvmlError

log = logging.getLogger(__name__)

SONAME = "libnvidia-ml.so.1"

MAX_NAMED_CANDIDATES = 3
"""Places that are named where there is no library: files that are there and cannot be loaded first. All are at debug level."""


def candidates(roots: Sequence[str]) -> list[tuple[str, str]]:
    """Files that may be the library, best first, each with the root that it lies under.

    Those under each root that is not the real one; then, under no root, the bare name, and WSL's own, which the loader
    need not know. WSL's goes first below a root: beside it, the library of a Linux driver finds no GPU.
    """
    other = dict.fromkeys(root.rstrip("/") for root in roots)
    directories = (WSL_LIBRARIES, *LIBRARY_DIRECTORIES)
    found = [(root, f"{root}/{directory}/{SONAME}") for root in other if root for directory in directories]
    return [*found, ("", SONAME), ("", f"/{WSL_LIBRARIES}/{SONAME}")]


def load(roots: Sequence[str]) -> ctypes.CDLL:
    """The library, from under the first root that has one, else wherever the loader finds it.

    Raises:
        NvmlError: LIBRARY_NOT_FOUND, with how many places were tried, and the first few.
    """
    tried: list[str] = []
    unfit: list[str] = []
    for root, candidate in candidates(roots):
        path = resolve(root, candidate) if "/" in candidate else candidate
        if path is None:
            tried.append(candidate)
            continue
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            (tried if path == SONAME else unfit).append(f"{path} ({error})")
    places = [*unfit, *tried]
    log.debug("no %s that can be loaded; tried %s", SONAME, ", ".join(places))
    more = f" and {len(places) - MAX_NAMED_CANDIDATES} more places" if len(places) > MAX_NAMED_CANDIDATES else ""
    raise NvmlError(
        Return.LIBRARY_NOT_FOUND,
        "dlopen",
        f"no {SONAME} that can be loaded in {', '.join(places[:MAX_NAMED_CANDIDATES])}{more}",
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
