"""The operator's options for CDI specifications."""

import msgspec

from gpu_plugin.config.settings import Settings
from gpu_plugin.containers.edits import Access

ALL_HOOKS = "all"  # means all hooks in --cdi-disable-hooks

# The names of NVIDIA's hooks that specifications use (nvidia-container-toolkit, internal/discover/hooks.go).
#
# update-application-profile limits EGL and Vulkan to the GPUs of the container: it writes EGLVisibleDGPUDevices to the directory
# /etc/nvidia/nvidia-application-profiles-rc.d of the container, from the container's device nodes /dev/nvidiaN.
# nvidia-container-toolkit has it from 1.20 on. Earlier versions log a warning about an unknown hook, and the container starts.
HOOKS = (
    "create-symlinks",
    "enable-cuda-compat",
    "update-ldcache",
    "disable-device-node-modification",
    "update-application-profile",
)

UNUSED_HOOKS = ("chmod",)  # NVIDIA's other hooks, which this plugin's specifications do not use

# Feature flags of NVIDIA's nvcdi (pkg/nvcdi/api.go) that have an effect in this plugin.
NO_GIDS = "no-additional-gids-for-device-nodes"
NO_SOCKETS = "disable-ipc-discoverer"

# Feature flags of nvcdi that are accepted and have no effect in this plugin.
IDLE_FEATURE_FLAGS = (
    "disable-nvsandboxutils",
    "disable-multiple-csv-devices",
    "enable-coherent-annotations",
    "enable-explicit-driver-libraries",
)


class CdiOptions(msgspec.Struct, frozen=True):
    """The operator's options. Host paths have no slash at the end, and are empty for /."""

    driver_root: str = ""  # the host path of the driver root
    # The directory whose dev/ has all device nodes; None if each device node has its own root.
    dev_root: str | None = None
    classes: tuple[str, ...] = ()  # further classes of which containers get all devices (gdrcopy, gds, mofed)
    imex_channels: tuple[int, ...] = ()  # the IMEX channels that containers get
    hook: str = ""  # the path of NVIDIA's hook program on the host; empty for specifications without hooks
    disabled_hooks: frozenset[str] = frozenset()  # the names of hooks to leave out
    feature_flags: frozenset[str] = frozenset()


def cdi_options(settings: Settings, access: Access) -> CdiOptions:
    """Return the options from the settings. `access` has the classes and IMEX channels that exist on the node."""
    return CdiOptions(
        driver_root=settings.driver_root.rstrip("/"),
        dev_root=None if access.dev_root is None else access.dev_root.rstrip("/"),
        classes=access.cdi_classes,
        imex_channels=access.imex_channels,
        hook="" if ALL_HOOKS in settings.cdi_disable_hooks else settings.nvidia_cdi_hook_path,
        disabled_hooks=frozenset(settings.cdi_disable_hooks),
        feature_flags=frozenset(settings.cdi_feature_flags),
    )


def ignored_options(settings: Settings) -> list[str]:
    """Return a sentence for each CDI option whose value has no effect or may prevent programs from finding libraries."""
    sentences = []
    known = (NO_GIDS, NO_SOCKETS, *IDLE_FEATURE_FLAGS)
    idle = [flag for flag in settings.cdi_feature_flags if flag in IDLE_FEATURE_FLAGS]
    unknown = [flag for flag in settings.cdi_feature_flags if flag not in known]
    if idle:
        sentences.append(f"--cdi-feature-flags: {', '.join(idle)} is not supported and changes nothing")
    if unknown:
        sentences.append(f"--cdi-feature-flags: {', '.join(unknown)} is not known; there are {', '.join(known)}")
    if settings.cdi_disable_hooks and not settings.nvidia_cdi_hook_path:
        sentences.append("--cdi-disable-hooks changes nothing: no hook is used without --nvidia-cdi-hook-path")
    strange = [name for name in settings.cdi_disable_hooks if name not in (ALL_HOOKS, *HOOKS, *UNUSED_HOOKS)]
    if strange:
        sentences.append(
            f"--cdi-disable-hooks: {', '.join(strange)} is not a hook; there are {', '.join(HOOKS)}, {ALL_HOOKS}"
        )
    needed = [name for name in settings.cdi_disable_hooks if name in ("create-symlinks", "update-ldcache")]
    if needed and settings.nvidia_cdi_hook_path and ALL_HOOKS not in settings.cdi_disable_hooks:
        sentences.append(
            f"--cdi-disable-hooks: without {', '.join(needed)} programs in containers may not find libcuda.so.1; to have no "
            "hooks, leave out --nvidia-cdi-hook-path; then libraries are mounted where programs find them"
        )
    return sentences
