"""The names of all checks, and the decorator that makes a function the check of a name."""

from collections.abc import Callable

from gpu_plugin.config.choices import Functions
from gpu_plugin.doctor.finding import Finding
from gpu_plugin.doctor.node import Node

Check = Callable[[Node], Finding | list[Finding]]

# The checks in order of dependency: the first of several failures is often the cause of the others
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

check: Functions[Check] = Functions(
    "check", NAMES, "NAMES in gpu_plugin/doctor/check.py", "a file of gpu_plugin/doctor/checks"
)
