"""Makes device nodes for a simulated node, so that a real container runtime can add them to containers."""

import logging
import os
import re
import stat
import threading
from contextlib import suppress
from pathlib import Path

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.simulation.hardware import SimulatedNode

MODE = 0o666

# Pattern of a path, major, minor; a number in the path is added to the minor
_NUMBERS = (
    # 195 is NVIDIA's number in the kernel's list of majors, with these minors. Other majors are assigned at load time:
    # 238 and 241 are from an H200 host, the others are common values.
    (r"/dev/nvidia(\d+)", 195, 0),
    (r"/dev/nvidiactl", 195, 255),
    (r"/dev/nvidia-modeset", 195, 254),
    (r"/dev/nvidia-uvm", 238, 0),
    (r"/dev/nvidia-uvm-tools", 238, 1),
    (r"/dev/nvidia-caps/nvidia-cap(\d+)", 241, 0),
    (r"/dev/nvidia-caps-imex-channels/channel(\d+)", 242, 0),
    (r"/dev/nvidia-fs(\d+)", 243, 0),
    (r"/dev/gdrdrv", 244, 0),
    (r"/dev/infiniband/uverbs(\d+)", 231, 192),
    (r"/dev/infiniband/rdma_cm", 10, 58),
)

_log = logging.getLogger(__name__)

_making = threading.Lock()


def make(node: SimulatedNode, root: Path) -> Path | None:
    """Make all device nodes of a simulated /dev under `root`: /dev/nvidia0 as `root`/dev/nvidia0, open to all users.

    Return `root`, whose dev/ then has exactly these nodes; `remake` uses it later. A repetition changes nothing, and nodes of
    another profile are removed. Return None, and log one line, if the process may not make device nodes. The numbers are real:
    on a host with an NVIDIA driver these nodes reach its GPUs.

    Raises:
        ConfigError: `root` is the host's own root, or something there is in the way.
        OSError: `root` cannot be written to.
    """
    folder = root / "dev"
    if folder.exists() and folder.samefile("/dev"):
        raise ConfigError(f"{folder}: is the host's own /dev: simulated device nodes need a directory of their own")
    if os.geteuid() != 0:
        _log.info("simulated device nodes are not made: only root may make them")
        return None
    wanted = {
        folder / path.removeprefix("/dev/"): number for path, number in device_numbers(node.device_nodes()).items()
    }
    with _making:
        _remove_stale(folder, wanted)
        try:
            for path, number in wanted.items():
                _make_one(path, number)
        except PermissionError as error:
            _log.info(f"simulated device nodes are not made: {error.filename or folder}: {error.strerror}")
            return None
    node.device_root = root
    return root


def remake(node: SimulatedNode) -> None:
    """Update the device nodes of a running node after a change of its partition, if there are any. Log a failure."""
    if node.device_root is None:
        return
    try:
        make(node, node.device_root)
    except (OSError, ConfigError) as error:
        _log.warning(f"the device nodes of the simulated node stay as they were: {error}")


def device_numbers(paths: frozenset[str]) -> dict[str, int]:
    """Return the device number (dev_t) of each path, as from os.makedev."""
    numbers = {}
    others = 0
    for path in sorted(paths):
        for pattern, major, first in _NUMBERS:
            if match := re.fullmatch(pattern, path):
                numbers[path] = os.makedev(major, first + int(match[1] if match.lastindex else 0))
                break
        else:
            # The first major for local use in the kernel's list. Minors are assigned in the order of the paths.
            numbers[path] = os.makedev(240, others)
            others += 1
    return numbers


def _make_one(path: Path, number: int) -> None:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        there = path.lstat()
        if not stat.S_ISCHR(there.st_mode):
            raise ConfigError(f"{path}: is in the way of a simulated device node: remove it")
        if there.st_rdev == number:
            if stat.S_IMODE(there.st_mode) != MODE:
                path.chmod(MODE)
            return
        path.unlink()
    os.mknod(path, MODE | stat.S_IFCHR, number)
    path.chmod(MODE)  # mknod applies the umask


def _remove_stale(folder: Path, wanted: dict[Path, int]) -> None:
    """Remove unwanted device nodes and the folders that are then empty. No other files are removed."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            path = Path(parent, name)
            if path not in wanted and stat.S_ISCHR(path.lstat().st_mode):
                path.unlink()
        if Path(parent) != folder and not os.listdir(parent):  # noqa: PTH208 - one read, no Path for each entry
            Path(parent).rmdir()
