"""What a check is, and which there are."""

from collections.abc import Callable

from gpu_plugin.config.choices import Functions
from gpu_plugin.doctor.facts import Facts
from gpu_plugin.doctor.finding import Finding

Check = Callable[[Facts], Finding | list[Finding]]

NAMES = (
    "configuration",
    "permissions",
    "security-modules",
    "clock",
    "driver-library",
    "driver-versions",
    "gpus",
    "device-nodes",
    "persistence-mode",
    "fabric-manager",
    "imex-channels",
    "mps",
    "state-directory",
    "kubelet-directory",
    "kubelet-socket",
    "other-plugins",
    "pod-resources",
    "container-runtime",
    "cdi-directory",
    "daemon",
    "registration",
    "kubernetes-api",
    "features-directory",
)
"""The checks in the order in which one thing depends on another: of several failures the first is often the cause."""

check: Functions[Check] = Functions(
    "check", NAMES, "NAMES in gpu_plugin/doctor/check.py", "a file of gpu_plugin/doctor/checks"
)
"""A decorator: the function is the check of that name."""
