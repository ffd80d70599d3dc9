"""The gpu-plugin command on a simulated node, with a counter of driver calls that another process can read.

Usage: python -m bench.counted FILE COMMAND..., for example FILE run --simulate hgx-h100
"""

import mmap
import struct
import sys
from pathlib import Path

from gpu_plugin import cli
from gpu_plugin.simulation import driver

STANDING = "wait"
"""nvmlEventSetWait_v2. A thread makes this call all the time, so it is not counted."""

_COUNT = struct.Struct("=Q")


class Count:
    """The number of driver calls, in a file that both processes have mapped."""

    def __init__(self, file: Path) -> None:
        """An empty file means 0."""
        with file.open("r+b") as opened:
            if not file.stat().st_size:
                opened.write(_COUNT.pack(0))
                opened.flush()
            self._memory = mmap.mmap(opened.fileno(), _COUNT.size)

    def write(self, calls: int) -> None:
        """Store the number for the other process."""
        _COUNT.pack_into(self._memory, 0, calls)

    def read(self) -> int:
        """Return the last number."""
        calls: int = _COUNT.unpack_from(self._memory)[0]
        return calls

    def close(self) -> None:
        """Close the file."""
        self._memory.close()


def counted(count: Count) -> type[driver.SimulatedDriver]:
    """Return a simulated driver that counts all calls, including refused calls."""

    class CountedDriver(driver.SimulatedDriver):
        def _begin(self, call: str, gpu: int | None = None, *, opened: bool = True) -> None:
            try:
                super()._begin(call, gpu, opened=opened)
            finally:
                with self._lock:
                    count.write(self.calls.total() - self.calls[STANDING])

    return CountedDriver


if __name__ == "__main__":
    driver.SimulatedDriver = counted(Count(Path(sys.argv[1])))  # type: ignore[misc]
    sys.exit(cli.main(sys.argv[2:]))
