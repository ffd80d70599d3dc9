"""The driver as this process has it open: the way there and back, one attempt at a time, however long it hangs."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import anyio

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.port import Driver, NvmlError
from gpu_plugin.runtime.slow_call import SlowCall
from gpu_plugin.runtime.threads import Job, Workers, settled

T = TypeVar("T")


class DriverCalls:
    """Makes calls at once where they take their time, and keeps count of those that have not come back."""

    def __init__(self) -> None:
        self._workers = Workers("nvml-calls")
        self._out: set[Job[Any]] = set()

    @property
    def under_way(self) -> bool:
        """Whether a call was handed over that has not come back, whoever still waits for it."""
        return any(not job.done.done() for job in self._out)

    def begin(self, call: Callable[[], T]) -> Job[T]:
        """Hands a call over."""
        job = self._workers.begin(call)
        self._out.add(job)
        job.done.add_done_callback(lambda _: self._out.discard(job))
        return job

    async def back(self, seconds: float) -> bool:
        """Waits until every call has come back, at most so many seconds. Returns whether every call has."""
        until = anyio.current_time() + seconds
        for job in tuple(self._out):
            await settled(job, max(0.0, until - anyio.current_time()))
        return not self.under_way

    def begin_unrelated(self, call: Callable[[], T]) -> Job[T]:
        """Begins a call as `begin` does, one that is none of the driver's: whether it comes back is nothing to NVML."""
        return self._workers.begin(call)

    def close(self) -> None:
        """Lets idle threads end; a hung one is a daemon and ends with the process."""
        self._workers.close()


log = logging.getLogger(__name__)

RETRY_PAUSES = (0.1, 0.2, 0.3, 0.4)
"""Seconds before each further attempt at nvmlInit where one was refused, before any GPU is blamed for it: a second in all."""

PATIENCE = 3.0
"""How many times longer than it may take an attempt to open the driver is waited for before any GPU is blamed for it."""


class Opened(NamedTuple):
    """What an open driver says of itself: its version, how many GPUs it counts, and which CUDA it is good for, if it tells."""

    version: str = ""
    gpus: int = 0
    cuda: tuple[int, int] | None = None


NOT_CLOSING = "it does not close"

AS_BEFORE = Opened()  # the driver that was opened before still, or one that nobody has asked yet


class DriverSession:
    """Whether the driver is open, and under which number.

    Attributes:
        is_open: whether calls make sense: it was opened, and nobody has begun to close it.
        opening: the number of this opening, or of the last one: no two of a boot are equal, of other processes included. 0
            before the first.
        trouble: why it could not be opened the last time; empty if it could.
    """

    def __init__(self, driver: Driver, calls: DriverCalls) -> None:
        self._driver = driver
        self._calls = calls
        self._opening: SlowCall[None] = SlowCall(calls.begin)
        self._describing: SlowCall[Opened] = SlowCall(calls.begin)
        self._closing: SlowCall[None] = SlowCall(calls.begin)
        self.is_open = False
        self.opening = 0
        self.trouble = ""

    @property
    def holds(self) -> bool:
        """Whether the driver may be holding on to GPUs on our behalf."""
        return self.is_open or self._opening.begun or self._closing.begun

    @property
    def answered_late(self) -> bool:
        """Whether a call that opens it came back after it was given up on: the next `open` has its outcome at once."""
        return self._opening.back

    @property
    def hanging(self) -> str:
        """Which way it hangs, for people; empty where it does not."""
        if self._closing.under_way:
            return NOT_CLOSING
        return "it does not open" if self._opening.under_way else ""

    async def open(self, timeout: float, pauses: tuple[float, ...] = ()) -> Opened:
        """Opens the driver, unless it is open, and asks what it says of itself.

        Args:
            timeout: seconds to open it, all attempts together, and as many to ask it.
            pauses: seconds before each further attempt, where it refuses to be opened.

        Raises:
            NvmlError: it does not work; it is closed again then.
            TimeoutError: it does not answer in time. The call goes on, and the next attempt waits for the same one.
        """
        try:
            if not self.is_open:
                await self._open_again(timeout, pauses)
            opened = await self._describe(timeout)
        except (NvmlError, TimeoutError) as error:
            self.trouble = str(error)
            if isinstance(error, NvmlError):
                await self.close(timeout)
            raise
        self.trouble = ""
        return opened

    def opens(self, timeout: float) -> bool:
        """Whether it is being opened, and may still come to that: nobody is to blame for anything meanwhile."""
        began = self._opening.started
        return not self.is_open and began is not None and anyio.current_time() - began < PATIENCE * timeout

    async def _open_again(self, timeout: float, pauses: tuple[float, ...]) -> None:
        until = anyio.current_time() + timeout
        for pause in (*pauses, math.inf):
            try:
                await self._open(max(0.0, until - anyio.current_time()), timeout)
            except NvmlError as error:
                if until - anyio.current_time() <= pause:
                    raise
                log.debug("the driver cannot be opened, trying again in %g s: %s", pause, error)
                await anyio.sleep(pause)
            else:
                return

    async def _open(self, left: float, timeout: float) -> None:
        """One attempt, for as long as is `left` of the `timeout`."""
        if self._closing.begun and not await self.close(timeout):
            raise TimeoutError("the call that closes it has not come back")
        if not self._opening.begun:
            self.opening = max(self.opening + 1, time.time_ns())
            self._opening.begin(self._driver.open)
        if not await self._opening.wait(left):
            raise TimeoutError(f"no answer for {timeout:g} s")
        _result(self._opening.take(), "nvmlInit_v2")
        self.is_open = True

    async def _describe(self, timeout: float) -> Opened:
        """Asked once, until that is answered."""
        self._describing.begin(lambda: _described(self._driver))
        if not await self._describing.wait(timeout):
            raise TimeoutError(f"no answer for {timeout:g} s")
        return _result(self._describing.take(), "nvmlDeviceGetCount_v2")

    async def close_at_last(self, timeout: float) -> bool:
        """Closes the driver once no call to it is under way; each of the two may take `timeout`. Returns whether it is closed."""
        return await self._calls.back(timeout) and await self.close(timeout)

    async def close(self, timeout: float) -> bool:
        """Closes the driver, unless a call to it is under way. Returns whether it is closed.

        One that takes longer goes on, and is asked about the next time. A later `open` then finds the GPUs that have come
        since: NVML counts them when it is opened.
        """
        if self._opening.begun:
            if not await self._opening.wait(timeout):
                return False
            self.is_open = self._opening.take().done.exception() is None
        if not self._closing.begun and self.is_open:
            if self._calls.under_way:
                return False
            self.is_open = False
            self._describing.forget()
            self._closing.begin(self._driver.close)
        if self._closing.begun:
            if not await self._closing.wait(timeout):
                return False
            error = self._closing.take().done.exception()
            if error is not None and not isinstance(error, NvmlError):  # those: it was closed already, or is no more
                log.warning("closing the driver failed, it is taken to be closed: %r", error)
        return True


def _described(driver: Driver) -> Opened:
    """What the driver says of itself. Raises NvmlError where it does not tell its version or its GPUs."""
    version, gpus = driver.driver_version(), driver.device_count()
    try:
        cuda = driver.cuda_version()
    except NvmlError as error:
        log.debug("the CUDA version that the driver supports is not known: %s", error)
        return Opened(version, gpus)
    return Opened(version, gpus, cuda)


def _result(job: Job[T], call: str) -> T:
    """What a call brought. Whatever it raised is a refusal of the driver: a library may be half there, or not ours."""
    try:
        return job.done.result()
    except NvmlError:
        raise
    except Exception as error:
        raise NvmlError(Return.UNKNOWN, call, repr(error)) from error
