"""SIGKILL at any moment, also with a full or slow disk, loses nothing that the state log accepted."""

import json
import mmap
import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpu_plugin.state.log import DEVICES, EVENT, GPUS, HEALTH, KEPT, RESERVED, StateLog, read_log

KILLS = int(os.environ.get("GPU_PLUGIN_KILLS", "30"))  # on each disk
KINDS = (HEALTH, GPUS, DEVICES, EVENT)
EVERY = {HEALTH: 1, GPUS: 5, DEVICES: 7, EVENT: 1}  # a record of the kind is written for each multiple of this number


class Disk:
    """A state directory in which child processes write until they are killed.

    `accepted` has the number of the newest accepted record of each kind, in the order of `KINDS`. It is shared with the children.
    """

    def __init__(self, state: Path, kind: str) -> None:
        self.state = state
        self.kind = kind
        self.accepted = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")

    def kill_once(self, moment: float) -> None:
        """Have a child write, and kill it `moment` seconds after it has read the log."""
        loaded, writer = os.pipe()
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                self._write(writer)
            os._exit(1)
        os.close(writer)
        os.read(loaded, 1)
        time.sleep(moment)
        os.close(loaded)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child failed"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    def _write(self, loaded: int) -> None:
        if self.kind == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (RESERVED, RESERVED))  # no file can grow
        if self.kind == "slow":
            slow_down()
        log = StateLog(self.state)
        log.load()
        threading.Thread(target=keep_syncing, args=(log,), daemon=True).start()
        os.write(loaded, b"1")
        begin = self.accepted[KINDS.index(EVENT)]  # each number ends with its event
        for number in range(begin + 1, begin + 10**9):
            for place, kind in enumerate(KINDS):
                if number % EVERY[kind] == 0:
                    content = record(kind, number)
                    done = log.add_event(content) if kind == EVENT else log.write(kind, content)
                    assert done
                    self.accepted[place] = number


def keep_syncing(log: StateLog) -> None:
    while log.sync():
        time.sleep(0.001)


def record(kind: str, number: int) -> dict[str, object]:
    """Return a content whose length changes from record to record."""
    return {"number": number, "text": f"{number} " * (number * 37 % (100 if kind == EVENT else 400))}


def slow_down() -> None:
    """Write in small parts, since a kill can end a write after each page, and have each `fdatasync` take longer."""
    write, sync = os.pwrite, os.fdatasync

    def in_parts(descriptor: int, content: bytes, offset: int) -> int:
        for start in range(0, len(content), 700):
            write(descriptor, content[start : start + 700], offset + start)
        return len(content)

    def slow(descriptor: int) -> None:
        time.sleep(0.02)
        sync(descriptor)

    os.pwrite, os.fdatasync = in_parts, slow  # type: ignore[assignment]


def mounted(directory: Path) -> bool:
    directory.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={3 * RESERVED},mode=700", "none", str(directory)]
    return os.geteuid() == 0 and not subprocess.run(mount, check=False, capture_output=True).returncode


@pytest.fixture(params=["empty", "slow", "full", "full tmpfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    state = tmp_path / "state"
    if request.param != "full tmpfs":
        yield Disk(state, request.param)
        return
    if not mounted(state):
        pytest.skip("no tmpfs can be mounted here")
    try:
        StateLog(state).load()
        with suppress(OSError), (state / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        yield Disk(state, request.param)
    finally:
        subprocess.run(["umount", "--lazy", str(state)], check=True)


@pytest.mark.timeout(60 + KILLS)
def test_a_kill_loses_nothing_that_was_accepted(disk: Disk) -> None:
    moments = random.Random(1)
    unreadable = 0
    for _ in range(KILLS):
        disk.kill_once(moments.choice((0.0, 0.002, 0.02)) * moments.random())
        content = read_log(disk.state)
        assert not content.errors
        assert content.unreadable <= unreadable + 1, "a kill can interrupt one write"
        unreadable = content.unreadable
        for place, kind in enumerate(KINDS):
            accepted = disk.accepted[place]
            records = content.events if kind == EVENT else filter(None, [content.latest.get(kind)])
            found = [json.loads(each.content) for each in records]
            assert found == [record(kind, each["number"]) for each in found]
            numbers = [each["number"] for each in found]
            if accepted:
                assert accepted <= numbers[-1] <= accepted + EVERY[kind], (
                    "a kill may follow the write and precede its report"
                )
            if kind == EVENT and numbers:
                kept = min(numbers[-1], 40 if "full" in disk.kind else KEPT)  # a full disk has no room for older events
                assert numbers[-kept:] == [*range(numbers[-1] - kept + 1, numbers[-1] + 1)]
            disk.accepted[place] = max(accepted, *numbers, 0)
    assert disk.accepted[0] > KILLS
