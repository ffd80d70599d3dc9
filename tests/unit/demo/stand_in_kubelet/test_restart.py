"""Starting, stopping and restarting (contract 2.4)."""

import asyncio
import socket
import time
from pathlib import Path

import pytest

from demo.stand_in_kubelet import AdmissionError, EventKind, StandInKubelet

from .fake_plugin import device, healthy, plugin

GPU = "nvidia.com/gpu"


async def test_start_removes_sockets_and_nothing_else(directory):
    def bind(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))

    (directory / "sub").mkdir()
    for name in ("kubelet.sock", "nvidia-x.sock", "sub/kept.sock"):
        bind(directory / name)
    (directory / "file.sock").write_text("kept")
    (directory / "link").symlink_to("sub/kept.sock")
    (directory / "dangling").symlink_to("nowhere")
    async with StandInKubelet(directory) as kubelet:
        names = {path.name for path in directory.iterdir()}
        assert names == {"sub", "file.sock", "dangling", "kubelet.sock"}
        assert (directory / "sub/kept.sock").is_socket()
        assert kubelet.socket.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("orderly", [True, False])
async def test_restart_keeps_pods_and_waits_for_plugins(kubelet, orderly):
    async with plugin(kubelet, devices=healthy("a", "b")) as fake:
        before = await kubelet.admit("p", {GPU: 1})
        begun = time.perf_counter()
        await kubelet.restart(orderly=orderly)
        assert time.perf_counter() - begun < 0.5
        assert not (kubelet.directory / "a.sock").exists()
        assert (kubelet.resources[GPU].capacity, kubelet.resources[GPU].allocatable) == (0, 0)
        with pytest.raises(AdmissionError, match="no healthy devices present"):
            await kubelet.admit("q", {GPU: 1})
        await asyncio.wait_for(fake.was_dropped.wait(), 1)
        await fake.close()
        await fake.serve()
        await fake.register()
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 2, 1)
        allocated = len(fake.called("allocate"))
        again = await kubelet.admit("p", {GPU: 1})
        assert again.ids == before.ids
        assert again.only.response == before.only.response
        assert len(fake.called("allocate")) == allocated  # the checkpointed answer serves
        other = await kubelet.admit("q", {GPU: 1})
        assert not set(other.ids) & set(before.ids)
    kubelet.check()


async def test_a_pod_whose_containers_ended_is_judged_anew(kubelet):
    async with plugin(kubelet, devices=healthy("a", "b")) as fake:
        (held,) = (await kubelet.admit("p", {GPU: 1})).ids
        kubelet.exit_containers("p")
        with pytest.raises(
            AdmissionError, match=r'container "main" changed request for resource "nvidia.com/gpu" from 1 to 2'
        ):
            await kubelet.admit("p", {GPU: 2})
        (held,) = (await kubelet.admit("p", {GPU: 1})).ids
        kubelet.exit_containers("p")
        fake.send([device(i, "Unhealthy" if i == held else "Healthy") for i in "ab"])
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 1, 1)
        with pytest.raises(AdmissionError, match="previously allocated devices are no longer healthy"):
            await kubelet.admit("p", {GPU: 1})
        assert "p" not in kubelet.pods


async def test_stopping_leaves_a_dead_socket_and_nothing_running(directory):
    kubelet = StandInKubelet(directory)
    await kubelet.start()
    kubelet.fail_next_register("hang")
    async with plugin(kubelet, devices=healthy("a"), registered=False) as fake:
        tasks = asyncio.all_tasks()
        register = asyncio.create_task(fake.register())
        await kubelet.wait_for(lambda: kubelet.registrations, 1)
        begun = time.perf_counter()
        await kubelet.stop()
        assert time.perf_counter() - begun < 0.2
        with pytest.raises(Exception):  # noqa: B017 - whichever way grpclib says that the connection is gone
            await register
        assert asyncio.all_tasks() <= tasks
        assert kubelet.socket.is_socket()
        with pytest.raises(ConnectionRefusedError):
            await fake.register()
        with pytest.raises(RuntimeError, match="does not run"):
            await kubelet.admit("p", {GPU: 1})
        await kubelet.stop()
    assert [event.kind for event in kubelet.events].count(EventKind.STOPPED) == 1


async def test_refuses_connections_between_bind_and_listen(directory):
    kubelet = StandInKubelet(directory)
    starting = asyncio.create_task(kubelet.start(bind_to_listen=0.05, runtime_ready=0))
    async with plugin(kubelet, devices=healthy("a"), registered=False) as fake:
        while not kubelet.socket.is_socket():
            await asyncio.sleep(0)
        with pytest.raises(ConnectionRefusedError):
            await fake.register()
        await starting
        await fake.serve()
        await fake.register()
        await kubelet.stop()


async def test_starting_twice_is_refused(kubelet):
    with pytest.raises(RuntimeError, match="runs already"):
        await kubelet.start()
