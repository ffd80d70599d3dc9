"""A driver's user space for a simulated node, so that a container can be given one: the layout of the .run installer."""

from pathlib import Path

from gpu_plugin.runtime.atomic import replace_file
from gpu_plugin.simulation.shared_library import shared_library

DIRECTORY = "driver-root"
"""Where it is made, below a simulated node's state directory."""

_LIBRARIES = {
    "libcuda": "1",
    "libcudadebugger": "1",
    "libnvcuvid": "1",
    "libnvidia-allocator": "1",
    "libnvidia-cfg": "1",
    "libnvidia-encode": "1",
    "libnvidia-ml": "1",
    "libnvidia-nvvm": "4",
    "libnvidia-opencl": "1",
    "libnvidia-opticalflow": "1",
    "libnvidia-ptxjitcompiler": "1",
}
"""Libraries of every driver, with the number that ends their SONAMEs."""


def make(root: Path, version: str) -> Path:
    """Makes the files of this driver version below `root`, takes those of any other away, and gives `root`.

    The nvidia-smi there is a script that says so. Raises OSError where they cannot be made.
    """
    libraries, programs = root / "usr/lib64", root / "usr/bin"
    for directory in (libraries, programs):
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    wanted = {f"{name}.so.{version}": f"{name}.so.{number}" for name, number in _LIBRARIES.items()}
    for path in libraries.iterdir():
        if path.name not in wanted and path.name not in wanted.values():
            path.unlink()
    for name, soname in wanted.items():
        content = shared_library(soname)
        if not _has(libraries / name, content):
            replace_file(libraries / name, content, 0o644)
        link = libraries / soname
        if not link.is_symlink() or link.readlink() != Path(name):
            link.unlink(missing_ok=True)
            link.symlink_to(name)
    script = f"#!/bin/sh\necho 'a simulated node with driver {version} has no nvidia-smi'\nexit 1\n".encode()
    if not _has(programs / "nvidia-smi", script):
        replace_file(programs / "nvidia-smi", script, 0o755)
    return root


def _has(file: Path, content: bytes) -> bool:
    try:
        return file.read_bytes() == content
    except FileNotFoundError:
        return False
