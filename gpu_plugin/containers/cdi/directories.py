"""The directories of driver libraries below a root, by distribution and installer."""

LIBRARY_DIRECTORIES = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib64/nvidia",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib",
    "lib",
    "usr/local/nvidia/lib64",
    "opt/nvidia/lib64",
    "lib64/nvidia",
    "run/opengl-driver/lib",
    "usr/local/lib",
    "usr/local/glibc/usr/lib64",
    "usr/local/glibc/usr/lib",
    "usr/lib/nvidia/tesla",
    "var/lib/nvidia/lib64",
    "opt/nvidia/current/usr/lib64",
    "opt/nvidia/current/lib64",
)
"""Directories of libraries that are always searched, in addition to the directories of the root's dynamic loader.

They are the directories of distributions, Debian's alternatives, GKE's installer, prebuilt images, NixOS, Talos, Bottlerocket,
Container-Optimized OS, and Flatcar, in this order.
"""

WSL_LIBRARIES = "usr/lib/wsl/lib"
"""WSL's directory of the Windows host's driver libraries, or of their loaders (see ld.so.conf.d/ld.wsl.conf there)."""

DXCORE = "libdxcore.so"  # the library through which Linux reaches a Windows host's GPUs

DXCORE_DIRECTORIES = (WSL_LIBRARIES, *LIBRARY_DIRECTORIES)
"""The directories that may have DXCORE: WSL's own, or the directory that Docker Desktop or NVIDIA's runtime uses in its nodes."""
