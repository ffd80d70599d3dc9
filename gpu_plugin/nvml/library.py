"""Finding and loading libnvidia-ml.so.1, from under a driver root where there is one."""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

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


def candidates(roots: Sequence[str]) -> list[str]:
    """Files that may be the library, best first: under each root that is not the real one, then by its bare name."""
    found = [str(Path(root, directory, SONAME)) for root in roots if root not in ("", "/") for directory in DIRECTORIES]
    return [*dict.fromkeys(found), SONAME]


def load(roots: Sequence[str]) -> ctypes.CDLL:
    """The library, from under the first root that has one, else wherever the loader finds it.

    Raises:
        NvmlError: LIBRARY_NOT_FOUND, naming every path tried and what to do.
    """
    tried = []
    for candidate in candidates(roots):
        # A link under a driver root may be absolute, and would then lead out of the root: follow it inside.
        path = candidate if candidate == SONAME else _inside(candidate, roots)
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


def _inside(candidate: str, roots: Sequence[str]) -> str | None:
    """The file behind `candidate`, absolute links taken as meant within the root; None where there is none."""
    path = candidate
    for _ in range(16):
        if not os.path.islink(path):  # noqa: PTH114
            return path if os.path.exists(path) else None  # noqa: PTH110
        target = os.readlink(path)  # noqa: PTH115
        if target.startswith("/"):
            root = next((r for r in roots if path.startswith(r.rstrip("/") + "/")), "")
            path = target if root and target.startswith(root.rstrip("/") + "/") else root.rstrip("/") + target
        else:
            path = os.path.normpath(os.path.join(os.path.dirname(path), target))  # noqa: PTH118, PTH120
    return None
