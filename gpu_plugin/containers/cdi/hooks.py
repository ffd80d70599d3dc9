"""NVIDIA's hooks in a CDI specification: changes to each container by the host's nvidia-ctk or nvidia-cdi-hook.

Names and arguments are the same as in nvidia-container-toolkit (internal/discover/hooks.go).
"""

from collections.abc import Iterable
from posixpath import dirname

from gpu_plugin.containers.cdi.host_files import Library
from gpu_plugin.containers.cdi.spec import Hook

ALL = "all"  # means all hooks in --cdi-disable-hooks

# update-application-profile limits EGL and Vulkan to the GPUs of the container: it writes EGLVisibleDGPUDevices to the directory
# /etc/nvidia/nvidia-application-profiles-rc.d of the container, from the container's device nodes /dev/nvidiaN.
# nvidia-container-toolkit has it from 1.20 on. Earlier versions log a warning about an unknown hook, and the container starts.
NAMES = (
    "create-symlinks",
    "enable-cuda-compat",
    "update-ldcache",
    "disable-device-node-modification",
    "update-application-profile",
)

OTHERS = ("chmod",)  # NVIDIA's other hooks, which this plugin's specifications do not use


def hooks(
    path: str, disabled: Iterable[str], links: Iterable[str], libraries: Iterable[str], version: str = ""
) -> tuple[Hook, ...]:
    """Return the hooks that make mounted libraries usable, without `disabled` hooks and without hooks that have no arguments.

    Args:
        path: the program on the host: nvidia-ctk, or nvidia-cdi-hook, which has no subcommand hook.
        disabled: the names of hooks to leave out; ALL for all.
        links: the links to make in a container, as `target::path`.
        libraries: the libraries whose directories are added to the dynamic loader's cache.
        version: the driver's version; empty if the driver has neither libraries for CUDA's compatibility nor nodes /dev/nvidiaN.
    """
    off = set(disabled)
    if ALL in off:
        return ()
    arguments = {
        "create-symlinks": _flagged("--link", links),
        "enable-cuda-compat": [f"--host-driver-version={version}"] if version else [],
        "update-ldcache": _flagged("--folder", dict.fromkeys(map(dirname, libraries))),
    }
    wanted = {name: more for name, more in arguments.items() if more}
    if version:
        wanted |= {"disable-device-node-modification": [], "update-application-profile": []}
    program = path.rpartition("/")[2]
    begin = [program, "hook"] if program == "nvidia-ctk" else [program]
    return tuple(
        Hook(hook_name="createContainer", path=path, args=(*begin, name, *more))
        for name, more in wanted.items()
        if name not in off
    )


def soname_links(libraries: Iterable[Library]) -> list[str]:
    """Return a link, as `target::path`, for each name of a library that is not its file's name."""
    links = []
    for library in libraries:
        # A library in gbm/ is found only by its path, which is a link if the file has another name.
        if any(name.startswith("gbm/") for name in library.names):
            if library.path != library.target:
                links.append(f"{library.target}::{library.path}")
            continue
        directory, file = dirname(library.target), library.target.rpartition("/")[2]
        before = file
        for name in (each.rpartition("/")[2] for each in library.names):
            if name != file:
                links.append(f"{before}::{directory}/{name}")
                before = name
    return links


def _flagged(flag: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]
