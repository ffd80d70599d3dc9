"""Looks for the files that tell platforms apart, under each root in turn. Blocks."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpu_plugin.access.cdi.directories import DXCORE, DXCORE_DIRECTORIES
from gpu_plugin.nvml.platforms.choice import Traces

_DXCORE = tuple(f"{directory}/{DXCORE}" for directory in DXCORE_DIRECTORIES)
_DXG = ("dev/dxg",)
_TEGRA_RELEASE = "etc/nv_tegra_release"
_TEGRA_FAMILY = "sys/devices/soc0/family"


def look(roots: Sequence[str]) -> Traces:
    """What is found under these directories, which are seen as the root of a file system each; the first find counts."""
    return Traces(_first(roots, _DXCORE), _first(roots, _DXG), _first(roots, (_TEGRA_RELEASE,)) or _family(roots))


def _first(roots: Iterable[str], paths: Iterable[str]) -> str:
    """The first of these files that exists; a link counts wherever it leads, as it may be meant within its root."""
    files = (os.path.join(root, path) for root in roots for path in paths)  # noqa: PTH118
    return next((f for f in files if os.path.lexists(f) and not os.path.isdir(f)), "")  # noqa: PTH112


def _family(roots: Iterable[str]) -> str:
    """The file in which the kernel names the family of the chip, if it is one of the Tegras."""
    for root in roots:
        file = Path(root, _TEGRA_FAMILY)
        try:
            family = file.read_bytes()
        except OSError:
            continue
        if family.lower().startswith(b"tegra"):
            return str(file)
    return ""
