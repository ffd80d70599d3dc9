"""How a simulated driver is opened, numbers GPUs and finds them by their handles: what every call of it goes through."""

import collections
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar, cast

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.port import NVML_FUNCTIONS, Driver, Handle, NvmlError
from gpu_plugin.simulation.condition import Condition
from gpu_plugin.simulation.hardware import SimulatedMigDevice, SimulatedNode
from gpu_plugin.simulation.profile import GpuProfile

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_FIRST_HANDLE = 0x7F0000001000
_HANDLE_STRIDE = 0x1000
"""Handles look like the pointers they are in NVML, by the number that a GPU got when the driver was opened."""

_FIRST_MIG_HANDLE = 0x7F8000000000
_MIG_GPU_STRIDE = 0x100000000
_MIG_STRIDE = 0x100
"""Those of MIG devices, by GPU and then by the number of the MIG device."""


class Session(Driver):
    """A node's driver as one process has it open, safe from any thread.

    - Before `open` and after as many `close` as there were `open`: UNINITIALIZED.
    - GPUs are numbered as it is opened; one that comes later is not there until it was closed for good and opened again.
    - A lost GPU: GPU_IS_LOST from every call about it, getting its handle included. Handles stay valid over heal.
    - One that has vanished since it was opened: likewise, but NOT_FOUND by its uuid or bus id, even when it is back.
    - A hung GPU: every call about it blocks in the calling thread until the hang ends; `close` does not end it. A slow one:
      likewise, each for so long.
    - A GPU that nothing keeps initialised (persistence mode off): the first `open` of the node's driver, after the last `close`
      or the end of the process that had it open, initialises it again: its counters and its energy begin at 0.
    - The handle of a MIG device that is no more: INVALID_ARGUMENT from every call.

    `latency` makes a call, by its name here, take that many seconds longer. `calls` counts calls by name, refused ones
    included.
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
        """Counted, as nvmlInit is: each needs a `close`."""
        self._begin("open", opened=False)
        with self._lock:
            if not self._opened:
                self._node.opened()
                self._departures = self._node.on_the_bus()
                self._gpus = tuple(self._departures)
            self._opened += 1

    def close(self) -> None:
        """The last one forgets every event set; a `wait` still going on then ends with UNINITIALIZED."""
        self._begin("close")
        with self._lock:
            last = self._opened == 1
            self._opened = max(self._opened - 1, 0)
        if last:
            self._node.closed()
            self._node.events.free_all()

    def _begin(self, call: str, gpu: int | None = None, *, opened: bool = True) -> None:
        """What every call goes through first."""
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
        """What every call about a GPU goes through first; gives its index. Blocks while the GPU hangs."""
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
        """The MIG device that a handle is about, after what every call goes through; None where the handle is none's."""
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
    """The error of a call that fails with this nvmlReturn_t."""
    return NvmlError(code, NVML_FUNCTIONS[call])


def supported(call: str, value: T | None) -> T:
    """The value; None is raised as NOT_SUPPORTED."""
    if value is None:
        raise refused(call, Return.NOT_SUPPORTED)
    return value


class _Call(Protocol[T_co]):
    def __call__(self, handle: Handle) -> T_co: ...


def answered(call: str, answer: Callable[[GpuProfile, Condition], T_co | None]) -> _Call[T_co]:
    """A call about one GPU, answered from its profile and its condition now; None is raised as NOT_SUPPORTED."""

    def method(session: Session, handle: Handle) -> T_co:
        index = session._reach(call, handle)  # noqa: SLF001 - a method of the class
        return supported(call, answer(session._profile.gpus[index], session._node.condition(index)))  # noqa: SLF001

    return cast("_Call[T_co]", method)


def mig_handle(gpu: int, number: int) -> Handle:
    """The handle of a MIG device of a GPU, by the MIG device's number."""
    return Handle(_FIRST_MIG_HANDLE + gpu * _MIG_GPU_STRIDE + number * _MIG_STRIDE)


def gpu_of_mig(handle: Handle) -> int:
    """The GPU by its index on the node that a MIG device's handle belongs to."""
    return (handle - _FIRST_MIG_HANDLE) // _MIG_GPU_STRIDE
