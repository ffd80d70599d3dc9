"""What compute modes were before is on the disk in the end, however long the disk takes."""

import threading
from functools import partial

import anyio
import msgspec
import pytest

from gpu_plugin.devices.nvml_h import ComputeMode
from gpu_plugin.mps import compute_modes
from gpu_plugin.mps.compute_modes import FILE, ComputeModes
from gpu_plugin.state.directory import StateDirectory

from .conftest import until


class SlowDirectory(StateDirectory):
    """One whose first write takes until `go`; `under_way` from when it has begun."""

    def __init__(self, path):
        super().__init__(path)
        self.under_way, self.go = threading.Event(), threading.Event()

    def write(self, name, content):
        if not self.under_way.is_set():
            self.under_way.set()
            assert self.go.wait(30)
        return super().write(name, content)


def exclusive(mps, count):
    return sum(mps.mode(index) == ComputeMode.EXCLUSIVE_PROCESS for index in range(count)) == count


@pytest.mark.parametrize("together", [True, False])
async def test_a_disk_that_takes_long_gets_every_mode_in_the_end(mps, monkeypatch, caplog, together):
    monkeypatch.setattr(compute_modes, "_DISK_PATIENCE", 0.05)
    directory = SlowDirectory(mps.root)
    modes = ComputeModes(mps.driver, mps.calls, directory, mps.node.boot_id, 5)
    uuids = [gpu.uuid for gpu in mps.node.profile.gpus][:4]
    async with anyio.create_task_group() as group:
        for count, uuid in enumerate(uuids, 1):
            group.start_soon(modes.make_exclusive, uuid)
            if not together:
                await until(partial(exclusive, mps, count))
    assert "has not been written" in caplog.text
    directory.go.set()

    def written():
        file = mps.root / FILE
        return msgspec.json.decode(file.read_bytes())["modes"] if file.exists() else {}

    await until(lambda: written() == dict.fromkeys(uuids, 0), 5)
