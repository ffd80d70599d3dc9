"""NVIDIA's own hooks in a CDI specification: what nvidia-ctk or nvidia-cdi-hook of the host does to each container.

Names and arguments are those of nvidia-container-toolkit (internal/discover/hooks.go).
"""

from collections.abc import Iterable
from posixpath import dirname

from gpu_plugin.containers.cdi.host_files import DriverFiles, Library
from gpu_plugin.containers.cdi.spec import Hook

ALL = "all"  # stands for all hooks in --cdi-disable-hooks

CREATE_SYMLINKS = "create-symlinks"
ENABLE_CUDA_COMPAT = "enable-cuda-compat"
UPDATE_LDCACHE = "update-ldcache"
DISABLE_DEVICE_NODE_MODIFICATION = "disable-device-node-modification"


# Makes EGL and Vulkan see only the GPUs of the container: it writes EGLVisibleDGPUDevices to the container's directory
# /etc/nvidia/nvidia-application-profiles-rc.d, from the nodes /dev/nvidiaN there. nvidia-container-toolkit has it from 1.20 on;
# earlier programs log a warning of a hook that they do not know, and let the container start.
UPDATE_APPLICATION_PROFILE = "update-application-profile"

NAMES = (
    CREATE_SYMLINKS,
    ENABLE_CUDA_COMPAT,
    UPDATE_LDCACHE,
    DISABLE_DEVICE_NODE_MODIFICATION,
    UPDATE_APPLICATION_PROFILE,
)

OTHERS = ("chmod",)  # NVIDIA's other hooks, of which no specification here makes use

_TOOLKIT = "nvidia-ctk"


def hooks(
    path: str, disabled: Iterable[str], links: Iterable[str], libraries: Iterable[str], version: str = ""
) -> tuple[Hook, ...]:
    """The hooks that make libraries usable where they are mounted, less those `disabled` and those that have nothing to do.

    `path` is the program on the host: nvidia-ctk, or nvidia-cdi-hook, which is called without the word hook in front. `links` are
    to be made in a container, as `target::path`; the dynamic loader is told of the directories of `libraries`. `version` is the
    driver's, empty where it has neither libraries for CUDA's compatibility nor device nodes /dev/nvidiaN.
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
    """Where libcuda lies in containers, which NVIDIA's hooks ask for."""
    return next((dirname(each.target) for each in files.libraries if "libcuda.so.1" in each.names), "/usr/lib64")


def soname_links(libraries: Iterable[Library]) -> list[str]:
    """A link, as `target::path`, for each name under which a library is opened and that is not its file's own."""
    links = []
    for library in libraries:
        # Such a one is found by its place alone, and is another library under another name.
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
