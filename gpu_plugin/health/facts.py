"""Limits and traits of a GPU that its signals need besides observations."""

import re

import msgspec

from gpu_plugin.devices.node import Gpu, Thresholds
from gpu_plugin.devices.nvml_h import FI_GET_GPU_RECOVERY_ACTION, Architecture

_CONTAINING = re.compile(r"\b(A30X?|A100X?|A800|B[123]00|GB[123]00)\b")
"""Models of Ampere and Blackwell with high-bandwidth memory, as NVML names them.

NVIDIA's GPU memory error management (supported GPUs) lists error containment for GA100 and GH100, and not for the other
Ampere and the Ada parts, although they remap rows too. It names Blackwell as a whole; its parts without such memory are
taken not to.
"""

_UNKNOWN = Thresholds()


class Facts(msgspec.Struct, frozen=True):
    """One GPU's own limits and traits. None or False: the part does not say, and the signal that needs it is silent.

    `thresholds` are in °C; `margins` are the T.Limit counterparts (fields 193 to 196), °C relative to T.Limit, negative
    beyond it. `contains_errors` is whether an uncorrected memory error costs only the process that met it; `nvswitch`
    whether its NVLinks lead to switches; `says_action` whether the driver tells its recovery action (field 230);
    `mig` whether it is in MIG mode.
    """

    thresholds: Thresholds = _UNKNOWN
    margins: Thresholds = _UNKNOWN
    contains_errors: bool = False
    nvswitch: bool = False
    says_action: bool = False
    mig: bool = False


def facts(gpu: Gpu) -> Facts:
    """The facts of a GPU as it was probed."""
    return Facts(
        gpu.thresholds,
        gpu.margins,
        gpu.architecture == Architecture.HOPPER or _CONTAINING.search(gpu.model) is not None,
        gpu.nvswitch,
        FI_GET_GPU_RECOVERY_ACTION in gpu.fields,
        gpu.mig_enabled,
    )
