"""NVIDIA's hooks in a CDI specification: changes to each container by the host's nvidia-ctk or nvidia-cdi-hook.

Names and arguments are the same as in nvidia-container-toolkit (internal/discover/hooks.go).
"""

from collections.abc import Iterable
from posixpath import dirname

from gpu_plugin.containers.cdi.host_files import DriverFiles, Library
from gpu_plugin.containers.cdi.spec import Hook

ALL = "all"  # means all hooks in --cdi-disable-hooks

CREATE_SYMLINKS = "create-symlinks"
ENABLE_CUDA_COMPAT = "enable-cuda-compat"
UPDATE_LDCACHE = "update-ldcache"
DISABLE_DEVICE_NODE_MODIFICATION = "disable-device-node-modification"


# Limits EGL and Vulkan to the GPUs of the container: it writes EGLVisibleDGPUDevices to the container's directory
# /etc/nvidia/nvidia-application-profiles-rc.d, from the container's device nodes /dev/nvidiaN. nvidia-container-toolkit has it
# from 1.20 on. Earlier versions log a warning about an unknown hook, and the container starts.
UPDATE_APPLICATION_PROFILE = "update-application-profile"

NAMES = (
    CREATE_SYMLINKS,
    ENABLE_CUDA_COMPAT,
    UPDATE_LDCACHE,
    DISABLE_DEVICE_NODE_MODIFICATION,
    UPDATE_APPLICATION_PROFILE,
)

OTHERS = ("chmod",)  # NVIDIA's other hooks, which this plugin's specifications do not use

_TOOLKIT = "nvidia-ctk"


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
        CREATE_SYMLINKS: _flagged("--link", links),
        ENABLE_CUDA_COMPAT: [f"--host-driver-version={version}"] if version else [],
        UPDATE_LDCACHE: _flagged("--folder", dict.fromkeys(map(dirname, libraries))),
    }
    wanted = {name: more for name, more in arguments.items() if more}
    if version:
        wanted[DISABLE_DEVICE_NODE_MODIFICATION] = []
        wanted[UPDATE_APPLICATION_PROFILE] = []
    program = path.rpartition("/")[2]
    begin = [program, "hook"] if program == _TOOLKIT else [program]
    return tuple(
        Hook(hook_name="createContainer", path=path, args=(*begin, name, *more))
        for name, more in wanted.items()
        if name not in off
    )


def libcuda_directory(files: DriverFiles) -> str:
    """Return the directory of libcuda in containers, which NVIDIA's hooks need."""
    return next((dirname(each.target) for each in files.libraries if "libcuda.so.1" in each.names), "/usr/lib64")


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
