"""How calls of a simulated driver fail: by themselves, or because a test asked for it."""

import threading
from typing import TypeVar

import msgspec

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.port import NVML_FUNCTIONS, NvmlError

_Value = TypeVar("_Value")


class _Refusal(msgspec.Struct):
    call: str
    code: int
    gpu: int | None
    left: int | None


class Refusals:
    """Calls that are to fail, safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refusals: list[_Refusal] = []

    def add(self, call: str, code: int, gpu: int | None = None, times: int | None = None) -> None:
        """Makes a driver call, by its name in the port, fail with `code`.

        Of one GPU or, for None, of any and of calls that are no GPU's; `times` times or, for None, for ever. It comes before
        whatever else would happen to the call.
        """
        if call not in NVML_FUNCTIONS:
            raise ValueError(f"{call}: no such driver call")
        with self._lock:
            self._refusals.append(_Refusal(call, code, gpu, times))

    def clear(self) -> None:
        """No call is to fail any more."""
        with self._lock:
            self._refusals.clear()

    def take(self, call: str, gpu: int | None) -> int | None:
        """The code with which this call is to fail, using up one of its times; None lets it pass."""
        if not self._refusals:
            return None
        with self._lock:
            for refusal in self._refusals:
                if refusal.call == call and refusal.gpu in (None, gpu):
                    if refusal.left is not None:
                        refusal.left -= 1
                        if not refusal.left:
                            self._refusals.remove(refusal)
                    return refusal.code
        return None


def refused(call: str, code: int) -> NvmlError:
    """The error of a call that fails with this nvmlReturn_t."""
    return NvmlError(code, NVML_FUNCTIONS[call])


def supported(call: str, value: _Value | None) -> _Value:
    """The value; None is raised as NOT_SUPPORTED."""
    if value is None:
        raise refused(call, Return.NOT_SUPPORTED)
    return value
