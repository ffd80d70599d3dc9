import json
import os
import socket as sockets

import pytest

from gpu_plugin.kubelet import checkpoint, pod_resources
from gpu_plugin.kubelet.checkpoint import NAME
from gpu_plugin.kubelet.holders import Holders
from gpu_plugin.simulation.stand_in_kubelet import Container
from tests.unit.kubelet.serving import GPU, registered, serving

A, B = (GPU, "GPU-a"), (GPU, "GPU-b")


def written(directory, *entries):
    pods = [{"PodUID": "1", "ContainerName": "c", "ResourceName": name, "DeviceIDs": ids} for name, ids in entries]
    (directory / NAME).write_text(
        json.dumps({"Data": {"PodDeviceEntries": pods, "RegisteredDevices": {}}, "Checksum": 7})
    )


@pytest.mark.parametrize("ids", [["GPU-a", "GPU-b"], {"0": ["GPU-a"], "-1": ["GPU-b"]}])
def test_a_checkpoint_is_read_in_both_its_forms(tmp_path, ids):
    written(tmp_path, (GPU, ids), ("nvidia.com/x", None))
    assert checkpoint.held(tmp_path) == frozenset({A, B})


def test_a_kubelet_that_gave_nothing_away_is_a_witness(tmp_path):
    (tmp_path / NAME).write_text('{"Data": {"PodDeviceEntries": null, "RegisteredDevices": {}}, "Checksum": 1}')
    assert checkpoint.held(tmp_path) == frozenset()


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
    assert checkpoint.held(tmp_path) is None
    (tmp_path / NAME).write_text(content)
    assert checkpoint.held(tmp_path) is None


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_no_witness_and_holds_nobody_up(tmp_path, make):
    make(tmp_path / NAME)
    assert checkpoint.held(tmp_path) is None


@pytest.fixture
def listed(monkeypatch):
    """What PodResources says: a set, or None where it does not answer."""
    said: dict[str, set[tuple[str, str]] | None] = {"now": None}

    async def held(_, __):
        if said["now"] is None:
            raise pod_resources.PodResourcesError("away")
        return frozenset(said["now"] or ())

    monkeypatch.setattr(pod_resources, "held", held)
    return said


async def test_without_a_witness_nothing_is_known(tmp_path, listed):
    assert await Holders(tmp_path).ask(tmp_path / "none") is None


async def test_each_witness_is_heard_alone(tmp_path, listed):
    holders = Holders(tmp_path)
    listed["now"] = {A}
    assert await holders.ask(tmp_path) == frozenset({A})
    listed["now"] = None
    written(tmp_path, (GPU, ["GPU-b"]))
    assert await holders.ask(tmp_path) == frozenset({B})


async def test_what_pod_resources_told_of_and_tells_no_more_is_free(tmp_path, listed):
    holders = Holders(tmp_path)
    written(tmp_path, (GPU, ["GPU-a", "GPU-b"]))
    listed["now"] = {A}
    assert await holders.ask(tmp_path) == frozenset({A, B})  # B is an init container's, say
    listed["now"] = set()
    assert await holders.ask(tmp_path) == frozenset({B})
    written(tmp_path)
    assert await holders.ask(tmp_path) == frozenset()


async def test_a_kubelet_that_has_just_started_may_know_no_pod_yet(tmp_path, listed):
    holders, socket = Holders(tmp_path), tmp_path / "kubelet.sock"
    written(tmp_path, (GPU, ["GPU-a"]))
    listed["now"] = {A}
    assert await holders.ask(tmp_path) == frozenset({A})
    with sockets.socket(sockets.AF_UNIX) as bound:
        bound.bind(str(socket))
        listed["now"] = set()
        assert await holders.ask(tmp_path) == frozenset({A})
        listed["now"] = {A}
        assert await holders.ask(tmp_path) == frozenset({A})
        listed["now"] = set()
        assert await holders.ask(tmp_path) == frozenset()


async def test_the_stand_in_s_witnesses_agree_on_a_running_pod(kubelet, directory):
    async with serving(directory):
        await kubelet.wait_for(registered(kubelet))
        admission = await kubelet.admit(
            "pod", containers=[Container("init", {GPU: 1}, "init"), Container("app", {GPU: 2})]
        )
        ids = {(GPU, i) for each in admission.allocations for i in each.ids}
        assert set(checkpoint.held(directory) or ()) == ids


async def test_pods_are_told_by_name_and_silence_is_said_once(tmp_path, monkeypatch, caplog):
    holders, said = Holders(tmp_path), {A: frozenset({"default/pod"})}
    for _ in range(3):
        assert await holders.pods(tmp_path / "none.sock") is None
    assert caplog.text.count("PodResources does not say which devices pods hold") == 1

    async def pods(_, __):
        return said

    monkeypatch.setattr(pod_resources, "pods", pods)
    assert await holders.pods(tmp_path / "some.sock") == said
