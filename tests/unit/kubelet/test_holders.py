import json
import os
import socket as sockets
import threading
from contextlib import ExitStack
from typing import Any

import anyio.lowlevel
import pytest

from demo.stand_in_kubelet import Container
from gpu_plugin.kubelet import checkpoint, pod_resources
from gpu_plugin.kubelet import holders as holders_module
from gpu_plugin.kubelet.bounded_channel import CallError
from gpu_plugin.kubelet.checkpoint import NAME
from gpu_plugin.kubelet.holders import Holders
from tests.unit.kubelet.serving import GPU, registered, serving

A, B = (GPU, "GPU-a"), (GPU, "GPU-b")


def written(directory, *entries, pod="1"):
    pods = [
        {"PodUID": uid, "ContainerName": "c", "ResourceName": name, "DeviceIDs": ids}
        for uid in pod.split()
        for name, ids in entries
    ]
    (directory / NAME).write_text(
        json.dumps({"Data": {"PodDeviceEntries": pods, "RegisteredDevices": {}}, "Checksum": 7})
    )


@pytest.mark.parametrize("ids", [["GPU-a", "GPU-b"], {"0": ["GPU-a"], "-1": ["GPU-b"]}])
def test_a_checkpoint_is_read_in_both_its_forms(tmp_path, ids):
    written(tmp_path, (GPU, ids), ("nvidia.com/x", None))
    assert checkpoint.read(tmp_path)[0] == {A: frozenset({"1"}), B: frozenset({"1"})}


def test_a_kubelet_that_gave_nothing_away_is_a_witness(tmp_path):
    (tmp_path / NAME).write_text('{"Data": {"PodDeviceEntries": null, "RegisteredDevices": {}}, "Checksum": 1}')
    assert checkpoint.read(tmp_path)[0] == {}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "7",
        '{"Data": 1}',
        '{"Data": {"PodDeviceEntries": [1]}}',
        "[" * 100_000,
        '{"Data": {"PodDeviceEntries": [{}]}}',
    ],
)
def test_what_is_no_checkpoint_is_no_witness(tmp_path, content):
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.read(tmp_path)
    (tmp_path / NAME).write_text(content)
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_no_witness_and_holds_nobody_up(tmp_path, make):
    make(tmp_path / NAME)
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.read(tmp_path)


def test_a_link_to_a_checkpoint_is_no_witness(tmp_path):
    """A kubelet makes a regular file. A link is from another program and may lead anywhere."""
    (tmp_path / "elsewhere").mkdir()
    written(tmp_path / "elsewhere", (GPU, ["GPU-a"]))
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere" / NAME)
    with pytest.raises(checkpoint.CheckpointError, match="it is a symbolic link"):
        checkpoint.read(tmp_path)


@pytest.fixture
def listed(monkeypatch):
    """The answer of PodResources (None: no answer), and a function that runs during the question."""
    said: dict[str, Any] = {"now": None, "meanwhile": lambda: None}

    async def allocated(_, __):
        if said["now"] is None:
            raise CallError("away")
        answer = frozenset(said["now"])
        said["meanwhile"]()
        return answer

    monkeypatch.setattr(pod_resources, "allocated", allocated)
    return said


@pytest.fixture
def bound(tmp_path):
    """Make the socket of PodResources again, as a kubelet does when it starts."""
    path = tmp_path / "pod-resources.sock"
    with ExitStack() as open_sockets:

        def bind():
            path.unlink(missing_ok=True)
            made = open_sockets.enter_context(sockets.socket(sockets.AF_UNIX))
            made.bind(str(path))
            return path

        yield bind


async def test_a_kubelet_is_known_by_the_socket_that_answered(tmp_path, listed, bound):
    holders, socket = Holders(tmp_path), bound()
    written(tmp_path, (GPU, ["GPU-a"]))
    listed["now"] = {A}
    assert (await holders.ask(socket)).allocated == frozenset({A})
    listed["now"] = set()
    listed["meanwhile"] = bound  # another kubelet began between the question and the answer
    assert (await holders.ask(socket)).allocated == frozenset({A})
    listed["meanwhile"] = lambda: None
    listed["now"] = {A}
    assert (await holders.ask(socket)).allocated == frozenset({A})
    listed["now"] = set()
    assert (await holders.ask(socket)).allocated == frozenset()
    bound()  # it knows no pods yet
    assert (await holders.ask(socket)).allocated == frozenset({A})


async def test_a_pod_that_took_over_while_the_question_was_under_way_is_not_taken_for_the_one_that_was_listed(
    tmp_path, listed, bound
):
    holders, socket = Holders(tmp_path), bound()
    written(tmp_path, (GPU, ["GPU-a"]), pod="old")
    listed["now"] = {A}
    listed["meanwhile"] = lambda: written(tmp_path, (GPU, ["GPU-a"]), pod="new")
    assert (await holders.ask(socket)).allocated == frozenset({A})
    listed["now"], listed["meanwhile"] = set(), lambda: None
    assert (await holders.ask(socket)).allocated == frozenset({A})  # a plain init container of the new pod has it


def reading_threads():
    return [thread for thread in threading.enumerate() if thread.name == "checkpoint"]


async def test_a_disk_that_hangs_costs_one_thread_however_often_is_asked(tmp_path, listed, bound, monkeypatch):
    holders, socket, before = Holders(tmp_path), bound(), set(reading_threads())
    hangs, reads, read = threading.Event(), [], checkpoint.read

    def hanging(directory):
        reads.append(directory)
        hangs.wait(10)
        return read(directory)

    monkeypatch.setattr(checkpoint, "read", hanging)
    monkeypatch.setattr(holders_module, "PATIENCE", 0.01)
    written(tmp_path, (GPU, ["GPU-a"]))
    listed["now"] = set()
    try:
        for _ in range(5):
            assert (await holders.ask(socket, {A: 1.0})).allocated == frozenset({A})
        assert len(reads) == 1
        assert len(set(reading_threads()) - before) == 1
        assert "does its disk answer?" in holders.unread
    finally:
        hangs.set()
    monkeypatch.setattr(holders_module, "PATIENCE", 10)
    while holders.unread:
        await anyio.lowlevel.checkpoint()
        holding = await holders.ask(socket)
    assert holding.written == frozenset({A})


@pytest.fixture
def disk(monkeypatch):
    """Readings of the checkpoint that end when `hangs` is set. Each is in `reads` from its start."""

    class Disk:
        def __init__(self):
            self.reads, self.hangs, self.read = [], threading.Event(), checkpoint.read

        def __call__(self, directory):
            self.reads.append(directory)
            said = self.read(directory)
            assert self.hangs.wait(10)
            return said

    made = Disk()
    monkeypatch.setattr(checkpoint, "read", made)
    yield made
    made.hangs.set()


async def test_what_a_reading_that_hung_brings_is_out_of_date(tmp_path, listed, bound, disk, monkeypatch):
    holders, socket = Holders(tmp_path), bound()
    written(tmp_path, (GPU, ["GPU-a"]))
    with monkeypatch.context() as patch:
        patch.setattr(holders_module, "PATIENCE", 0.01)
        assert (await holders.ask(socket)).allocated is None
    written(tmp_path, (GPU, ["GPU-a"]), pod="1 2")
    listed["now"] = {A}  # the present checkpoint has two pods with it
    disk.hangs.set()
    assert holders._reading is not None
    assert await holders._reading.wait(10)
    assert (await holders.ask(socket)).allocated == frozenset({A})
    written(tmp_path, (GPU, ["GPU-a"]))
    listed["now"] = set()
    assert (await holders.ask(socket)).allocated == frozenset({A})  # a plain init container of the first has it


async def test_a_reading_whose_asker_left_has_as_long_as_any_other(tmp_path, listed, disk):
    holders = Holders(tmp_path)
    written(tmp_path, (GPU, ["GPU-a"]))
    with anyio.move_on_after(0.01):
        await holders.ask(tmp_path / "none")
    async with anyio.create_task_group() as tasks:

        async def ask():
            assert (await holders.ask(tmp_path / "none")).allocated == frozenset({A})

        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert len(disk.reads) == 1
        disk.hangs.set()
    assert holders.unread == ""


@pytest.mark.parametrize("error", [OSError("what"), MemoryError("what"), ValueError("what")])
async def test_a_checkpoint_that_cannot_be_read_for_any_reason_is_no_witness(tmp_path, listed, monkeypatch, error):
    def failing(_directory):
        raise error

    holders = Holders(tmp_path)
    monkeypatch.setattr(checkpoint, "read", failing)
    assert (await holders.ask(tmp_path / "none")).allocated is None
    assert holders.unread == "what"


async def test_where_no_more_threads_can_be_begun_the_checkpoint_is_no_witness(tmp_path, listed, monkeypatch):
    def refused(_thread):
        raise RuntimeError("can't start new thread")

    holders = Holders(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert (await holders.ask(tmp_path / "none")).allocated is None
    assert holders.unread == "can't start new thread"
    written(tmp_path, (GPU, ["GPU-a"]))
    assert (await holders.ask(tmp_path / "none")).allocated == frozenset({A})
    assert holders.unread == ""


def test_a_checkpoint_of_tens_of_thousands_of_ids_makes_hardly_any_objects_that_the_interpreter_searches(tmp_path):
    """For cycles, which holds all threads up."""
    written(tmp_path, (GPU, [f"GPU-{at}" for at in range(20_000)]))
    found, _ = checkpoint.read(tmp_path)
    assert len(found) == 20_000
    assert len({id(uids) for uids in found.values()}) == 1


async def test_the_stand_in_s_witnesses_agree_on_a_running_pod(kubelet, directory):
    async with serving(directory):
        await kubelet.wait_for(registered(kubelet))
        admission = await kubelet.admit(
            "pod", containers=[Container("init", {GPU: 1}, "init"), Container("app", {GPU: 2})]
        )
        ids = {(GPU, i) for each in admission.allocations for i in each.ids}
        assert set(checkpoint.read(directory)[0]) == ids
