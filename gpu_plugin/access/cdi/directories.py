"""Where drivers put their libraries below a root, by distribution and installer."""

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
)
"""Directories of libraries: distributions' own, Debian's alternatives, GKE's installer, prebuilt images, NixOS."""
