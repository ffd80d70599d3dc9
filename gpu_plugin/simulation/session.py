"""The opened simulated driver: numbers GPUs, finds GPUs by handle, and makes the checks of all calls."""

import collections
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.port import NVML_FUNCTIONS, Driver, Handle, NvmlError
from gpu_plugin.simulation.condition import Condition
from gpu_plugin.simulation.hardware import SimulatedMigDevice, SimulatedNode
from gpu_plugin.simulation.profile import GpuProfile

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_FIRST_HANDLE = 0x7F0000001000
_HANDLE_STRIDE = 0x1000
"""Handles look like NVML's pointers. They depend on the number that a GPU got when the driver was opened."""

_FIRST_MIG_HANDLE = 0x7F8000000000
_MIG_GPU_STRIDE = 0x100000000
_MIG_STRIDE = 0x100
"""Handles of MIG devices, by GPU and then by the number of the MIG device."""


class Session(Driver):
    """A node's driver as opened by one process, safe from any thread.

    - Before `open`, and after as many calls of `close` as of `open`: UNINITIALIZED.
    - GPUs are numbered when it is opened. A GPU that appears later is only found after the last close and a new open.
    - A lost GPU: GPU_IS_LOST from all calls about it, including calls for its handle. Handles stay valid after heal.
    - A GPU that has vanished since the open: as a lost GPU, but NOT_FOUND by its uuid or bus id, even after its return.
    - A hung GPU: all calls about it block in the calling thread until the hang ends; `close` does not end it. A slow GPU: each
      call blocks for some time.
    - A GPU with persistence mode off: it is initialised again by the first `open` of the node's driver after the last `close`,
      or after the end of the last process that had it open. Its counters and its energy then begin at 0.
    - The handle of a former MIG device: INVALID_ARGUMENT from all calls.

    `latency` makes calls, by their names here, longer by this many seconds. `calls` counts calls by name, including refused
    calls.
    """

    def __init__(
        self,
        node: SimulatedNode,
        *,
        latency: Mapping[str, float] | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if unknown := set(latency or ()) - set(NVML_FUNCTIONS):
            raise ValueError(f"latency of {', '.join(sorted(unknown))}: no such driver call")
        self.calls: collections.Counter[str] = collections.Counter()
        self._node = node
        self._profile = node.profile
        self._latency = dict(latency or {})
        self._sleep = sleep
        self._lock = threading.Lock()
        self._opened = 0
        self._gpus: tuple[int, ...] = ()
        self._departures: dict[int, int] = {}

    def open(self) -> None:
        """Open the driver. Openings are counted, as with nvmlInit: each needs a `close`."""
        self._begin("open", opened=False)
        with self._lock:
            if not self._opened:
                self._node.opened()
                self._departures = self._node.on_the_bus()
                self._gpus = tuple(self._departures)
            self._opened += 1

    def close(self) -> None:
        """Close the driver. The last `close` frees all event sets; a `wait` under way ends with UNINITIALIZED."""
        self._begin("close")
        with self._lock:
            last = self._opened == 1
            self._opened = max(self._opened - 1, 0)
        if last:
            self._node.closed()
            self._node.events.free_all()

    def _begin(self, call: str, gpu: int | None = None, *, opened: bool = True) -> None:
        """Do the first step of all calls: count, delay, and refuse."""
        with self._lock:
            self.calls[call] += 1
            ready = self._opened or not opened
        if seconds := self._latency.get(call):
            self._sleep(seconds)
        if not ready:
            raise refused(call, Return.UNINITIALIZED)
        if self._node.refusals and (code := self._node.refusal(call, gpu)) is not None:
            raise refused(call, code)

    def _reach(self, call: str, handle: Handle) -> int:
        """Do the first steps of all calls about a GPU and return its index. Blocks while the GPU hangs."""
        self._begin(call, self._find(handle))
        return self._answering(call, handle)

    def _answering(self, call: str, handle: Handle) -> int:
        index = self._find(handle)
        if index is None:
            raise refused(call, Return.INVALID_ARGUMENT)
        self._check_answers(call, index)
        return index

    def _gpu(self, call: str, handle: Handle) -> GpuProfile:
        return self._profile.gpus[self._reach(call, handle)]

    def _mig_device(self, call: str, handle: Handle) -> SimulatedMigDevice | None:
        """Do the first steps of a call and return the MIG device of a handle; None if it is not a MIG device's handle."""
        if handle < _FIRST_MIG_HANDLE:
            return None
        gpu, number = gpu_of_mig(handle), (handle - _FIRST_MIG_HANDLE) % _MIG_GPU_STRIDE
        known = gpu < len(self._profile.gpus)
        self._begin(call, gpu if known else None)
        if known:
            self._check_answers(call, gpu)
            for each in self._node.mig_devices(gpu) or ():
                if each.number * _MIG_STRIDE == number:
                    return each
        raise refused(call, Return.INVALID_ARGUMENT)

    def _mig(self, call: str, handle: Handle) -> SimulatedMigDevice:
        found = self._mig_device(call, handle)
        if found is None:
            self._reach(call, handle)
        return supported(call, found)

    def _look_up(self, call: str, index: int | None) -> Handle:
        self._begin(call, index)
        if index not in self._departures or self._node.has_gone(index, self._departures[index]):
            raise refused(call, Return.NOT_FOUND)
        return self._handle(call, index)

    def _handle(self, call: str, index: int) -> Handle:
        self._check_answers(call, index)
        return Handle(_FIRST_HANDLE + self._gpus.index(index) * _HANDLE_STRIDE)

    def _check_answers(self, call: str, index: int) -> None:
        if (code := self._node.failing(index, self._departures.get(index, -1))) is not None:
            raise refused(call, code)

    def _find(self, handle: Handle) -> int | None:
        number, rest = divmod(handle - _FIRST_HANDLE, _HANDLE_STRIDE)
        return self._gpus[number] if not rest and 0 <= number < len(self._gpus) else None


def refused(call: str, code: int) -> NvmlError:
    """Return the error of a call that fails with this nvmlReturn_t."""
    return NvmlError(code, NVML_FUNCTIONS[call])


def supported(call: str, value: T | None) -> T:
    """Return the value. None is raised as NOT_SUPPORTED."""
    if value is None:
        raise refused(call, Return.NOT_SUPPORTED)
    return value


class _Call(Protocol[T_co]):
    def __call__(self, handle: Handle) -> T_co: ...


def answered(call: str, answer: Callable[[GpuProfile, Condition], T_co | None]) -> _Call[T_co]:
    """Make a call about one GPU that returns a value of its profile and present state. None is raised as NOT_SUPPORTED."""

    def method(session: Session, handle: Handle) -> T_co:
        index = session._reach(call, handle)  # noqa: SLF001 - a method of the class
        return supported(call, answer(session._profile.gpus[index], session._node.condition(index)))  # noqa: SLF001

    return cast("_Call[T_co]", method)


def of_profile(call: str, field: str) -> _Call[Any]:
    """Make a call about one GPU that returns this field of its profile. None is raised as NOT_SUPPORTED."""

    def answer(built: GpuProfile, _: Condition) -> object:
        return getattr(built, field)

    return answered(call, answer)


def present(call: str, field: str, only_if: str = "") -> _Call[Any]:
    """Make a call about one GPU that returns this field of its present state.

    NOT_SUPPORTED is raised for None, and for a GPU whose profile has no value for the field `only_if`.
    """

    def answer(built: GpuProfile, now: Condition) -> object:
        return getattr(now, field) if not only_if or getattr(built, only_if) else None

    return answered(call, answer)


def mig_handle(gpu: int, number: int) -> Handle:
    """Return the handle of a GPU's MIG device, by the number of the MIG device."""
    return Handle(_FIRST_MIG_HANDLE + gpu * _MIG_GPU_STRIDE + number * _MIG_STRIDE)


def gpu_of_mig(handle: Handle) -> int:
    """Return the index on the node of the GPU with this MIG device's handle."""
    return (handle - _FIRST_MIG_HANDLE) // _MIG_GPU_STRIDE
