"""How the calls of a simulated driver refuse."""

from typing import TypeVar

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.port import NVML_FUNCTIONS, NvmlError

_Value = TypeVar("_Value")


def refused(call: str, code: int) -> NvmlError:
    """The error of a call that fails with this nvmlReturn_t."""
    return NvmlError(code, NVML_FUNCTIONS[call])


def supported(call: str, value: _Value | None) -> _Value:
    """The value; None is raised as NOT_SUPPORTED."""
    if value is None:
        raise refused(call, Return.NOT_SUPPORTED)
    return value
