"""The keeper over time: the devices that it publishes, and its waits."""

import errno
import logging
import threading
import time
from contextlib import asynccontextmanager

import anyio
import pytest

from gpu_plugin.config.settings import DEFAULTS
from gpu_plugin.containers.cdi.build import Built
from gpu_plugin.containers.cdi.readiness import NOT_YET, CdiReadiness
from gpu_plugin.containers.cdi.spec import to_json
from gpu_plugin.containers.cdi_files import keeper as keeper_module
from gpu_plugin.containers.cdi_files.directory import Outcome
from gpu_plugin.containers.cdi_files.keeper import SpecKeeper, readiness
from gpu_plugin.containers.cdi_files.source import UnsafeSpecError, Wanted
from gpu_plugin.containers.edits import Access
from gpu_plugin.devices.node import Node
from gpu_plugin.runtime.pulse import Pulse
from tests.revision import revision
from tests.unit.containers.cdi_files.specs import GPU_FILE, IMEX_FILE, MOFED_FILE, spec

ONE = {GPU_FILE: spec(GPU_a=("/dev/nvidia0",))}
TWO = {GPU_FILE: spec(GPU_a=("/dev/nvidia0",), GPU_b=("/dev/nvidia1",))}
WANTED = Wanted(Node(), DEFAULTS, Access())


class Source:
    """Returns the values that a test sets. Each call waits while `free` is not set, and counts the calls under way."""

    def __init__(self):
        self.built = Built(ONE)
        self.error: Exception | None = None
        self.there = True
        self.free = threading.Event()
        self.free.set()
        self.builds = 0
        self.under_way = 0
        self.most = 0

    def build(self, request):
        self.builds += 1
        return self._call(self.built)

    def holds(self, spec):
        return self._call(self.there)

    def _call(self, answer):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        assert self.free.wait(20)
        self.under_way -= 1
        if self.error is not None:
            raise self.error
        return answer


class Kept:
    """A keeper, and the states that it published."""

    def __init__(self, directory):
        self.source = Source()
        self.told: list[CdiReadiness] = []
        self.news = Pulse()
        self.directory = directory
        self.keeper = SpecKeeper(self.source, directory, self._tell)  # type: ignore[arg-type]
        self.ask()

    def ask(self, wanted: Wanted | None = WANTED):
        self.keeper.follow(wanted)

    def _tell(self, state):
        self.told.append(state)
        self.news.ring()

    @asynccontextmanager
    async def running(self):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.keeper.run)
            yield
            tasks.cancel_scope.cancel()

    async def until(self, met):
        with anyio.fail_after(10):
            while not self.told or not met(self.told[-1]):
                await self.news.wait()
        return self.told[-1]

    async def ready(self, *names):
        return await self.until(lambda state: not state.trouble and set(state.nodes) == set(names))

    async def trouble(self):
        return (await self.until(lambda state: state.trouble not in ("", NOT_YET))).trouble

    async def looked(self, times=1):
        """Request this number of rounds, and return when the last round is over."""
        for _ in range(times):
            before = self.source.builds
            self.ask()
            with anyio.fail_after(10):
                while self.source.builds == before or self.keeper._call.under_way:
                    await anyio.sleep(0.001)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(keeper_module, "LOOK_EVERY", 0.02)
    made = Kept(tmp_path / "cdi")
    yield made
    made.source.free.set()


async def test_quiet_looks_tell_nothing_and_write_nothing(kept, caplog):
    async with kept.running():
        await kept.ready("GPU-a")
        before = revision(kept.directory / GPU_FILE)
        caplog.clear()
        await kept.looked(5)
    assert revision(kept.directory / GPU_FILE) == before
    assert len(kept.told) == 1
    assert caplog.records == []


@pytest.mark.parametrize(
    ("error", "sentence", "trace"),
    [
        (PermissionError(13, "Permission denied", "/driver-root/usr"), "/driver-root/usr: Permission denied", False),
        (UnsafeSpecError("/tmp/nvidia-mps must not be given"), "/tmp/nvidia-mps must not be given", False),
        (KeyError("x"), "KeyError('x')", True),
    ],
)
async def test_a_look_that_fails_is_a_sentence_said_once_and_the_next_one_may_succeed(
    kept, caplog, error, sentence, trace
):
    kept.source.error = error
    async with kept.running():
        assert await kept.trouble() == f"its CDI specification cannot be made: {sentence}"
        await kept.looked(3)
        assert any(record.exc_info for record in caplog.records) is trace
        assert len([r for r in caplog.records if sentence in r.getMessage()]) == 1
        kept.source.error = None
        await kept.ready("GPU-a")


async def test_a_look_that_hangs_takes_devices_out_after_its_patience_alone_and_they_come_back(kept, monkeypatch):
    monkeypatch.setattr(keeper_module, "PATIENCE", 0.05)
    async with kept.running():
        await kept.ready("GPU-a")
        kept.source.free.clear()
        assert "does a disk hang?" in await kept.trouble()
        for _ in range(5):
            kept.ask()
            await anyio.sleep(0.02)  # as many looks as would have been
        assert kept.source.under_way == 1
        kept.source.free.set()
        await kept.ready("GPU-a")
    assert kept.source.most == 1


async def test_changes_during_a_look_are_looked_at_after_it(kept, monkeypatch):
    monkeypatch.setattr(keeper_module, "LOOK_EVERY", 1000)
    kept.source.free.clear()
    async with kept.running():
        with anyio.fail_after(10):
            while not kept.source.under_way:
                await anyio.sleep(0.001)
        kept.source.built = Built(TWO)
        kept.ask()
        kept.source.free.set()
        await kept.ready("GPU-a", "GPU-b")
    assert kept.source.builds == 2


async def test_nothing_is_looked_at_while_nobody_wants_it_and_nothing_old_counts_afterwards(kept):
    async with kept.running():
        await kept.ready("GPU-a")
        kept.ask(None)
        await kept.until(lambda state: state == CdiReadiness())
        builds = kept.source.builds
        (kept.directory / GPU_FILE).unlink()
        await anyio.sleep(0.1)  # five looks
        assert kept.source.builds == builds
        assert not (kept.directory / GPU_FILE).exists()
        kept.ask()
        await kept.ready("GPU-a")
        assert (kept.directory / GPU_FILE).exists()


# Invalid specifications

NEW = {GPU_FILE: spec(mount="/", GPU_a=("/dev/nvidia0",), GPU_b=("/dev/nvidia1",))}  # invalid: it mounts everything


@pytest.mark.parametrize("old", [None, "valid", "invalid", "a path of it is gone"])
async def test_an_invalid_specification_takes_all_devices_out_and_leaves_the_old_file(kept, caplog, old):
    caplog.set_level(logging.INFO)
    content = None
    if old is not None:
        kept.directory.mkdir()
        content = to_json(NEW[GPU_FILE] if old == "invalid" else ONE[GPU_FILE])
        (kept.directory / GPU_FILE).write_bytes(content)
        kept.source.there = old != "a path of it is gone"
    kept.source.built = Built(NEW)
    async with kept.running():
        trouble = await kept.trouble()
        assert "is invalid and was not written" in trouble
        assert "hostPath" in trouble
        for name, node in (("GPU-a", "/dev/nvidia0"), ("GPU-b", "/dev/nvidia1")):
            assert kept.told[-1].reason(name, (node,)) == trouble
        await kept.looked(3)
        assert [r.levelname for r in caplog.records if "hostPath" in r.getMessage()] == ["ERROR"]
        assert [path.read_bytes() for path in kept.directory.glob("*")] == ([] if content is None else [content])
        kept.source.built = Built(TWO)
        await kept.ready("GPU-a", "GPU-b")
    assert "devices can be given to containers by CDI name" in caplog.text


async def test_an_invalid_file_of_another_class_is_said_once_and_keeps_back_what_asks_for_it(kept, caplog):
    name = "k8s.device-plugin.nvidia.com/imex-channel=0"
    kept.source.built = Built(ONE | {IMEX_FILE: spec("imex-channel", mount="/", _0=("/dev/x",))})
    async with kept.running():
        state = await kept.ready("GPU-a")
        assert name in state.lacking([name])
        await kept.looked(3)
        assert len([r for r in caplog.records if IMEX_FILE in r.getMessage()]) == 1
        kept.source.built = Built(ONE | {IMEX_FILE: spec("imex-channel", _0=("/dev/x",))})
        await kept.until(lambda state: not state.lacking([name]))


async def test_what_is_left_out_stands_in_the_state_beside_what_is_given(kept):
    kept.source.built = Built(ONE, complaints=("/tmp/nvidia-mps is left out: it is a link",))
    async with kept.running():
        state = await kept.ready("GPU-a")
        assert state.complaints == kept.source.built.complaints


async def test_a_directory_that_others_may_write_to_is_said_once_and_stands_in_the_state(kept, caplog):
    kept.directory.mkdir()
    kept.directory.chmod(0o777)
    async with kept.running():
        state = await kept.ready("GPU-a")
        assert any("chmod go-w" in each for each in state.complaints)
        await kept.looked(2)
        assert len([record for record in caplog.records if "chmod go-w" in record.getMessage()]) == 1
        kept.directory.chmod(0o755)
        await kept.until(lambda state: state.complaints == ())


# The files of an earlier process


async def recalled(kept):
    await kept.keeper.recall()
    return kept.told


@pytest.fixture
def left(kept):
    """The directory as an earlier process leaves it."""
    kept.keeper._directory.write(ONE | {IMEX_FILE: spec("imex-channel", _0=("/dev/x",))})
    return kept.directory


async def test_what_an_earlier_process_left_counts_where_it_holds(kept, left):
    [state] = await recalled(kept)
    assert state.reason("GPU-a", ("/dev/nvidia0",)) == ""
    assert state.reason("GPU-b") == NOT_YET
    assert state.lacking(["k8s.device-plugin.nvidia.com/imex-channel=0"]) == ""
    assert "gds=all" in state.lacking(["k8s.device-plugin.nvidia.com/gds=all"])


async def test_it_does_not_where_something_that_it_names_is_gone(kept, left):
    kept.source.there = False
    assert await recalled(kept) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"k8s.device-plugin.nvidia.com/gpu", b"nvidia.com/gpu"),
        (b'"cdiVersion": "', b'"cdiVersion": "9'),
        (b'"GPU-a"', b'"GPU=a"'),
        (b"{", b""),
        (b'"ro"', b'"rw"'),
        (b'"hostPath": "/', b'"hostPath": "/../'),
    ],
)
async def test_nor_where_runtimes_know_these_devices_by_other_names_or_this_plugin_would_not_write_it(
    kept, left, old, new
):
    file = left / GPU_FILE
    assert old in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(old, new))
    assert await recalled(kept) == []


async def test_nor_where_that_cannot_be_found_out(kept, left, caplog):
    for error in (RuntimeError("odd"), TimeoutError(errno.ETIMEDOUT, "Connection timed out", "/run/cdi")):
        kept.source.error = error
        assert await recalled(kept) == []
        assert f"cannot be read: {error!r}" in caplog.text


async def test_a_recall_that_hangs_holds_the_start_for_its_patience_and_no_second_thread_is_begun(
    kept, left, monkeypatch
):
    assert keeper_module.RECALL_PATIENCE <= 1
    monkeypatch.setattr(keeper_module, "RECALL_PATIENCE", 0.05)
    monkeypatch.setattr(keeper_module, "PATIENCE", 0.05)
    kept.source.free.clear()
    assert await recalled(kept) == []
    async with kept.running():
        assert "does a disk hang?" in await kept.trouble()
        assert (kept.source.under_way, kept.source.builds) == (1, 0)
        kept.source.free.set()
        await kept.ready("GPU-a")
    assert kept.source.most == 1


async def test_what_is_recalled_counts_until_the_first_look_says_more_even_if_nothing_is_wanted_yet(kept, left):
    kept.ask(None)
    async with kept.running():
        await recalled(kept)
        kept.ask(None)
        await anyio.sleep(0.05)
        assert [bool(state.trouble) for state in kept.told] == [False]
        kept.source.built = Built(TWO)
        kept.ask()
        await kept.ready("GPU-a", "GPU-b")
    assert len(kept.told) == 2


# The end


async def test_a_file_that_an_operator_edited_is_named_at_the_end_and_stays(kept, caplog):
    async with kept.running():
        await kept.ready("GPU-a")
    file = kept.directory / GPU_FILE
    file.write_bytes(to_json(TWO[GPU_FILE]))
    await kept.keeper.remove()
    assert file.read_bytes() == to_json(TWO[GPU_FILE])
    assert [record.levelname for record in caplog.records if str(file) in record.getMessage()] == ["WARNING"]


async def test_a_look_that_comes_back_after_the_removal_writes_nothing(kept):
    kept.source.free.clear()
    async with kept.running():
        with anyio.fail_after(10):
            while not kept.source.under_way:
                await anyio.sleep(0.001)
    await kept.keeper.remove()
    kept.source.free.set()
    with anyio.fail_after(10):
        while kept.keeper._call.under_way:
            await anyio.sleep(0.001)
    assert not (kept.directory / GPU_FILE).exists()


async def test_a_removal_that_hangs_holds_the_end_for_its_patience(kept, caplog):
    assert keeper_module.REMOVAL_PATIENCE <= 0.5
    began = time.monotonic()
    with kept.keeper._directory._turn:  # as a write that does not come back
        await kept.keeper.remove()
    assert time.monotonic() - began < 1
    assert "may stay" in caplog.text


# What is served


@pytest.mark.parametrize(
    ("built", "refused", "trouble"),
    [
        (Built(ONE), {}, ""),
        (Built(ONE), {GPU_FILE: "/x: Is a directory"}, "its CDI specification cannot be written: /x: Is a directory"),
        (Built(ONE), {MOFED_FILE: "/x: Is a directory"}, ""),
        (Built({}, "no libcuda"), {GPU_FILE: "/x"}, "no libcuda"),
        (Built({}), {}, "its CDI specification has no device"),
        (Built(ONE, "half of it"), {}, "half of it"),
    ],
)
def test_why_no_device_can_be_used(built, refused, trouble):
    assert readiness(built, Outcome(refused=refused)).trouble == trouble


def test_devices_of_other_classes_count_where_their_file_could_be_written():
    name = "k8s.device-plugin.nvidia.com/imex-channel=0"
    built = Built(ONE | {IMEX_FILE: spec("imex-channel", _0=("/dev/x",))})
    assert readiness(built, Outcome()).lacking([name]) == ""
    assert name in readiness(built, Outcome(refused={IMEX_FILE: "full"})).lacking([name])


async def test_a_file_of_a_class_that_nobody_asks_for_is_complained_of_once_and_harms_no_device(kept, caplog):
    (kept.directory / MOFED_FILE).mkdir(parents=True)
    async with kept.running():
        await kept.ready("GPU-a")
        await kept.looked(3)
    assert len([record for record in caplog.records if MOFED_FILE in record.getMessage()]) == 1


async def test_devices_that_another_file_has_too_are_not_served_until_it_is_gone(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(keeper_module, "LOOK_EVERY", 0.02)
    kept = Kept(tmp_path)
    kept.source.built = Built(TWO)
    other = tmp_path / "of-another-program.json"
    other.write_bytes(to_json(spec(GPU_b=("/dev/nvidia1",))))
    async with kept.running():
        state = await kept.ready("GPU-a")
        assert str(other) in state.reason("GPU-b")
        assert state.reason("GPU-a") == ""
        assert any(str(other) in sentence for sentence in state.complaints)
        assert str(other) in caplog.text
        other.unlink()
        state = await kept.ready("GPU-a", "GPU-b")
        assert state.complaints == ()
