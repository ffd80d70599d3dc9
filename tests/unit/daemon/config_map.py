"""A ConfigMap's volume as the kubelet keeps it (pkg/volume/util/atomic_writer.go), and someone who listens to a watch."""

import asyncio
import itertools
import shutil
from pathlib import Path

import anyio

from gpu_plugin.runtime.pulse import Pulse


class ConfigMapVolume:
    """Files behind the link `..data`, which is replaced by a rename to change all contents at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._times = itertools.count()
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, **contents: str) -> None:
        """Replaces everything; `a_b="x"` is the file a.b."""
        data = self.directory / "..data"
        old = data.readlink() if data.is_symlink() else None
        new = self.directory / f"..2026_01_01_{next(self._times)}"
        new.mkdir()
        names = {name.replace("_", "."): content for name, content in contents.items()}
        for name, content in names.items():
            (new / name).write_text(content)
        temporary = self.directory / "..data_tmp"
        temporary.symlink_to(new.name)
        temporary.rename(data)
        for name in names:
            if not (self.directory / name).is_symlink():
                (self.directory / name).symlink_to(f"..data/{name}")
        for link in self.directory.iterdir():
            if not link.name.startswith("..") and link.name not in names:
                link.unlink()
        if old is not None:
            shutil.rmtree(self.directory / old)


class Listener(asyncio.Event):
    """An event that counts its calls of `set`, and can wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self._called = Pulse()

    def set(self) -> None:
        self.calls += 1
        super().set()
        self._called.ring()

    async def until(self, met, seconds: float = 10) -> None:
        """Returns once `met()` after a call."""
        with anyio.fail_after(seconds):
            while not met():
                await self._called.wait()

    async def called(self, times: int) -> None:
        """Returns once there were `times` calls in all."""
        await self.until(lambda: self.calls >= times)
        assert self.calls == times
