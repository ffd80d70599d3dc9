"""Opens and closes the driver for this process, with one attempt at a time even if an attempt hangs."""

import logging
import math
import time
from typing import NamedTuple, TypeVar

import anyio

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.driver_calls import DriverCalls
from gpu_plugin.nvml.port import Driver, NvmlError
from gpu_plugin.runtime.threads import Job, SlowCall

T = TypeVar("T")

log = logging.getLogger(__name__)

# Seconds before each repetition of a refused nvmlInit, one second in all, before the failure counts against GPUs
RETRY_PAUSES = (0.1, 0.2, 0.3, 0.4)

# Wait this many times the timeout for an attempt to open the driver before the delay counts against GPUs
PATIENCE = 3.0


class Opened(NamedTuple):
    """The version of an open driver, the number of its GPUs, and the newest CUDA version it supports if it reports that."""

    version: str = ""
    gpus: int = 0
    cuda: tuple[int, int] | None = None


NOT_CLOSING = "it does not close"

AS_BEFORE = Opened()  # no new values: the driver was not opened again, or has not been asked


class DriverSession:
    """Opens and closes the driver and numbers the openings.

    Attributes:
        is_open: whether the driver can be called: it was opened, and no close has begun.
        opening: the number of this opening, or of the last. It is unique in a boot, also among processes. 0 before the first.
        trouble: why the last attempt to open the driver failed; empty if it succeeded.
    """

    def __init__(self, driver: Driver, calls: DriverCalls) -> None:
        self._driver = driver
        self._calls = calls
        self._opening: SlowCall[None] = SlowCall(calls)
        self._describing: SlowCall[Opened] = SlowCall(calls)
        self._closing: SlowCall[None] = SlowCall(calls)
        self.is_open = False
        self.opening = 0
        self.trouble = ""

    @property
    def holds(self) -> bool:
        """True if the driver may have GPUs open for this process."""
        return self.is_open or self._opening.begun or self._closing.begun

    @property
    def answered_late(self) -> bool:
        """True if a call to open the driver returned after its timeout: the next `open` uses its result at once."""
        return self._opening.back

    @property
    def hanging(self) -> str:
        """A text for people that says whether opening or closing hangs; empty if neither does."""
        if self._closing.under_way:
            return NOT_CLOSING
        return "it does not open" if self._opening.under_way else ""

    async def open(self, timeout: float, pauses: tuple[float, ...] = ()) -> Opened:
        """Open the driver, unless it is open, and return its version and its number of GPUs.

        Args:
            timeout: seconds for all attempts to open it together, and the same again to query it.
            pauses: seconds before each further attempt if the driver refuses to be opened.

        Raises:
            NvmlError: the driver does not work. It is closed again.
            TimeoutError: the driver does not answer in time. The call continues, and the next attempt waits for the same call.
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
        """True while an attempt to open the driver may still succeed: until then no failure counts against GPUs."""
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
        """Make or continue one attempt to open the driver, with `left` seconds of `timeout` remaining."""
        if self._closing.begun and not await self.close(timeout):
            raise TimeoutError("the call that closes it has not returned")
        if not self._opening.begun:
            self.opening = max(self.opening + 1, time.time_ns())
            self._opening.begin(self._driver.open)
        if not await self._opening.wait(left):
            raise TimeoutError(f"no answer for {timeout:g} s")
        _result(self._opening.take(), "nvmlInit_v2")
        self.is_open = True

    async def _describe(self, timeout: float) -> Opened:
        """Query the driver, with at most one query under way."""
        self._describing.begin(lambda: _described(self._driver))
        if not await self._describing.wait(timeout):
            raise TimeoutError(f"no answer for {timeout:g} s")
        return _result(self._describing.take(), "nvmlDeviceGetCount_v2")

    async def close_at_last(self, timeout: float) -> bool:
        """Close the driver after all calls have returned; each step may take `timeout` seconds. Return whether it is closed."""
        return await self._calls.back(timeout) and await self.close(timeout)

    async def close(self, timeout: float) -> bool:
        """Close the driver, unless a call to it is under way. Return whether it is closed.

        If closing takes longer than `timeout` seconds, it continues, and the next `close` or `open` waits for it. NVML counts
        the GPUs when it is opened, so a later `open` finds GPUs that were added since.
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
            # NvmlError means that the driver was closed before, or is unloaded.
            if error is not None and not isinstance(error, NvmlError):
                log.warning("closing the driver failed, it counts as closed: %r", error)
        return True


def _described(driver: Driver) -> Opened:
    """Return the driver's version and its number of GPUs. Raises NvmlError if it reports either of them not."""
    version, gpus = driver.driver_version(), driver.device_count()
    try:
        cuda = driver.cuda_version()
    except NvmlError as error:
        log.debug("the CUDA version that the driver supports is not known: %s", error)
        return Opened(version, gpus)
    return Opened(version, gpus, cuda)


def _result(job: Job[T], call: str) -> T:
    """Return a call's result. All exceptions become NvmlError: the library may be incomplete or not NVIDIA's."""
    try:
        return job.done.result()
    except NvmlError:
        raise
    except Exception as error:
        raise NvmlError(Return.UNKNOWN, call, repr(error)) from error
