"""Where drivers put their files below a root, by distribution and installer."""

LIBRARIES = (
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
"""Directories of libraries: distributions' own, then those of Debian's alternatives, GKE's installer and prebuilt images."""
