"""Sets the GPUs that MPS shares to compute mode EXCLUSIVE_PROCESS, and restores their former modes afterwards.

Former modes are written to a file before they are changed, so that they can be restored even after this process was killed.
The driver resets all modes when it is loaded, so a file of an earlier boot is ignored.
"""

import logging
import threading
from collections.abc import Iterable

import anyio
import msgspec

from gpu_plugin.devices.nvml_h import ComputeMode, Return
from gpu_plugin.mps.errors import MpsError
from gpu_plugin.nvml.driver_calls import DriverCalls
from gpu_plugin.nvml.port import Driver, NvmlError
from gpu_plugin.runtime.threads import begin
from gpu_plugin.state.directory import StateDirectory

log = logging.getLogger(__name__)

FILE = ".compute-modes.json"

_DISK_PATIENCE = 2.0  # seconds for a write


class _Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `FILE`: modes as NVML numbers them, by uuid."""

    boot_id: str
    modes: dict[str, int]


class ComputeModes:
    """Sets and restores compute modes. If one driver call hangs, other calls continue."""

    def __init__(
        self, driver: Driver, calls: DriverCalls, memory: StateDirectory, boot_id: str, timeout: float
    ) -> None:
        """Read nothing before `recall`.

        `calls` makes the driver calls, so that the code that closes the driver can wait for them. `timeout` is in seconds, for
        each call.
        """
        self._driver = driver
        self._calls = calls
        self._memory = memory
        self._boot_id = boot_id
        self._timeout = timeout
        self._before: dict[str, int] = {}
        self._writing = threading.Lock()

    @property
    def changed(self) -> frozenset[str]:
        """The uuids of the GPUs whose modes have to be restored later."""
        return frozenset(self._before)

    def recall(self) -> None:
        """Read the file of an earlier process of this boot. Blocks for as long as the disk does."""
        saved = self._memory.read(FILE, _Saved)
        if saved is not None and saved.boot_id == self._boot_id:
            self._before = dict(saved.modes)

    async def make_exclusive(self, uuid: str) -> None:
        """Set a GPU to EXCLUSIVE_PROCESS, so that only one process, the MPS server, can use it.

        A GPU without compute modes stays as it is. Raises MpsError if the driver refuses, or does not answer in time.
        """
        try:
            reading = self._calls.begin(lambda: self._driver.compute_mode(self._driver.handle_by_uuid(uuid)))
            mode = await reading.result(self._timeout)
            if mode == ComputeMode.EXCLUSIVE_PROCESS:
                return  # an earlier process set and recorded it, or the operator set it
            self._before[uuid] = mode
            await self._save()
            await self._set(uuid, ComputeMode.EXCLUSIVE_PROCESS, self._timeout)
        except (NvmlError, TimeoutError) as error:
            if isinstance(error, NvmlError) and error.code == Return.NOT_SUPPORTED:
                log.warning("GPU %s has no compute modes: nothing keeps processes from using it without MPS", uuid)
                if self._before.pop(uuid, None) is not None:
                    await self._save()
                return
            advice = "; run as root" if isinstance(error, NvmlError) else ""
            raise MpsError(f"GPU {uuid} cannot be put into compute mode EXCLUSIVE_PROCESS: {error}{advice}") from None

    async def restore(self, uuids: Iterable[str], timeout: float) -> None:
        """Restore the modes of these GPUs, all at once. A mode that cannot be restored now is logged and stays in the file."""
        changed = [uuid for uuid in uuids if uuid in self._before]
        async with anyio.create_task_group() as group:
            for uuid in changed:
                group.start_soon(self._restore, uuid, timeout)
        if changed:
            await self._save()

    async def _restore(self, uuid: str, timeout: float) -> None:
        mode = self._before[uuid]
        try:
            await self._set(uuid, mode, timeout)
        except (NvmlError, TimeoutError) as error:
            log.warning("GPU %s keeps compute mode EXCLUSIVE_PROCESS, it cannot be restored now: %s", uuid, error)
        else:
            del self._before[uuid]

    async def _set(self, uuid: str, mode: int, timeout: float) -> None:
        setting = self._calls.begin(lambda: self._driver.set_compute_mode(self._driver.handle_by_uuid(uuid), mode))
        await setting.result(timeout)

    async def _save(self) -> None:
        """Write the file, even if the process is ending. Wait only a short time for a slow disk."""
        with anyio.CancelScope(shield=True):
            written = await begin(self._write, "mps-files").wait(_DISK_PATIENCE)
        if not written:
            log.warning("%s has not been written for %g s", FILE, _DISK_PATIENCE)

    def _write(self) -> None:
        with self._writing:  # each write has the present modes, so a late write does not restore older content
            self._memory.write(FILE, _Saved(boot_id=self._boot_id, modes=dict(self._before)))
