"""Calls to the driver on daemon threads, which of them have not come back, and whether the driver is open."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from gpu_plugin.nvml.port import Driver, NvmlError
from gpu_plugin.threads import DaemonThreads, Job, begin, settled

T = TypeVar("T")


class DriverCalls:
    """Makes calls one after the other, and keeps count of those given up on: NVML must not be closed under one of them."""

    def __init__(self) -> None:
        self._threads = DaemonThreads()
        self._out: set[Job[Any]] = set()

    @property
    def under_way(self) -> bool:
        """Whether a call that was given up on has not come back."""
        return bool(self._out)

    async def submit(self, call: Callable[[], T], patience: float) -> Job[T]:
        """Starts a call and gives it `patience` seconds; it may still be under way when this returns."""
        return self._counted(await self._threads.submit(call, patience))

    async def run(self, call: Callable[[], T], timeout: float) -> T:
        """The call's result. Raises what the call raises, and TimeoutError after `timeout` seconds."""
        job = await self.submit(call, timeout)
        if not job.done.done():
            raise TimeoutError(f"no answer for {timeout:g} s")
        return job.done.result()

    async def alone(self, call: Callable[[], T], patience: float) -> Job[T]:
        """As `submit`, on a thread of its own: several such calls go on at once."""
        job = begin(call, "nvml-calls")
        await settled(job, patience)
        return self._counted(job)

    async def aside(self, call: Callable[[], T], patience: float) -> Job[T]:
        """As `submit`, for a call that is none of the driver's: whether it comes back is nothing to NVML."""
        return await self._threads.submit(call, patience)

    def close(self) -> None:
        """Lets the idle thread end; a hung one is a daemon and ends with the process."""
        self._threads.close()

    def _counted(self, job: "Job[T]") -> "Job[T]":
        if not job.done.done():
            self._out.add(job)
            job.done.add_done_callback(lambda _: self._out.discard(job))
        return job


class DriverSession:
    """Whether the driver is open, and the way there and back: one attempt at a time, however long it hangs."""

    def __init__(self, driver: Driver, calls: DriverCalls) -> None:
        self._driver = driver
        self._calls = calls
        self._opening: Job[None] | None = None
        self._closing: Job[None] | None = None
        self.is_open = False
        """Whether calls make sense: it was opened, and nobody has begun to close it."""
        self.trouble = ""
        """Why it could not be opened the last time; empty if it could."""

    @property
    def holds(self) -> bool:
        """Whether the driver may be holding on to GPUs on our behalf."""
        return self.is_open or self._opening is not None or self._closing is not None

    @property
    def answered_late(self) -> bool:
        """Whether a call that opens it came back after it was given up on: the next `open` has its outcome at once."""
        return self._opening is not None and self._opening.done.done()

    @property
    def held(self) -> str:
        """Which way it hangs, in words; empty where it does not."""
        if self._closing is not None and not self._closing.done.done():
            return "it does not close"
        return "it does not open" if self._opening is not None and not self._opening.done.done() else ""

    async def open(self, timeout: float) -> tuple[str, int]:
        """Opens the driver, unless it is open: its version, and how many GPUs it counts.

        Raises:
            NvmlError: it does not work; it is closed again then.
            TimeoutError: it does not answer within `timeout` seconds.
        """
        try:
            if not self.is_open:
                await self._open(timeout)
            version = await self._calls.run(self._driver.driver_version, timeout)
            count = await self._calls.run(self._driver.device_count, timeout)
        except (NvmlError, TimeoutError) as error:
            self.trouble = str(error)
            if isinstance(error, NvmlError):
                await self.close(timeout)
            raise
        self.trouble = ""
        return version, count

    async def _open(self, timeout: float) -> None:
        if self._closing is not None and not await self.close(timeout):
            raise TimeoutError("the call that closes it has not come back")
        if self._opening is None:
            self._opening = await self._calls.submit(self._driver.open, timeout)
        else:
            await settled(self._opening, timeout)
        if not self._opening.done.done():
            raise TimeoutError(f"no answer for {timeout:g} s")
        opened, self._opening = self._opening, None
        opened.done.result()
        self.is_open = True

    async def close(self, timeout: float) -> bool:
        """Closes the driver. Returns whether it is closed; one that takes longer goes on, and is asked about the next time.

        A later `open` then finds the GPUs that have come since: NVML counts them when it is opened.
        """
        if self._opening is not None:
            if not await settled(self._opening, timeout):
                return False
            self.is_open = self._opening.done.exception() is None
            self._opening = None
        if self._closing is not None:
            await settled(self._closing, timeout)
        elif self.is_open:
            self.is_open = False
            self._closing = await self._calls.submit(self._driver.close, timeout)
        if self._closing is not None:
            if not self._closing.done.done():
                return False
            with suppress(NvmlError):  # one that was closed already, or that is no more
                self._closing.done.result()
            self._closing = None
        return True
