"""Hostile containers and NVIDIA's real MPS daemon: users 0 and 1000, each with the mounts of Allocate's answer."""

import os
import shutil
import signal
from functools import partial
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from gpu_plugin.config.sharing import MPS, SharedResource
from gpu_plugin.containers.edits import Access, Mount, MpsDirectories, container_edits
from gpu_plugin.devices.device import whole_gpu
from gpu_plugin.mps.control_program import PROGRAM
from gpu_plugin.mps.readiness import Counts
from tests.needed import cannot
from tests.node.daemon import GPU, DaemonProcess, healthy
from tests.node.mps_process import PATIENCE, SHARED, MpsProcess
from tests.real.hostile import NAMES, Bind, Container, Specification
from tests.unit.mps.conftest import QUICK, Mps, marked, until

pytestmark = pytest.mark.anyio

REPLICAS = 4
DEVICES = 8 * REPLICAS
USERS = pytest.mark.parametrize("uid", [0, 1000])
QUESTIONS = (
    "get_default_active_thread_percentage",
    "get_default_device_pinned_mem_limit 0",
    "get_default_device_pinned_mem_limit 1",
)
SECRET = b"a file of the node\n"


@pytest.fixture
def program(nvidia, short_path):
    """NVIDIA's program, at a path that users other than root can read."""
    if os.geteuid() != 0:
        cannot("a mount namespace and another user need root")
    return Path(shutil.copy(nvidia / "usr/bin" / PROGRAM, short_path / PROGRAM))


@pytest.fixture
def victim(short_path):
    file = short_path / "shadow"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    yield file
    assert (file.read_bytes(), file.stat().st_mode & 0o7777) == (SECRET, 0o600)


@pytest.fixture
def mps(directory, program):
    made = MpsProcess(directory)
    made.config.write_text(SHARED % REPLICAS)
    made.log = directory / "mps.log"
    yield made
    made.kill()
    for pid in made.children() if made.root.exists() else []:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def daemon(directory):
    made = DaemonProcess(directory)
    yield made
    made.kill()


@pytest.fixture
def containers(program):
    started = []

    def start(uid, mounts, pipe) -> Container:
        binds = tuple(Bind(each.host_path, each.container_path, each.read_only) for each in mounts)
        started.append(Container(Specification(uid, str(program), pipe, binds)))
        return started[-1]

    yield start
    for each in started:
        each.close()


async def serve(mps, program, kubelet, plugin: DaemonProcess):
    """Start the daemons and the plugin. Return the answer of Allocate for one device."""
    plugin.start("--config-file", str(mps.config), "--mps-root", str(mps.root))
    mps.run("--mps-control-binary", str(program))
    await kubelet.wait_for(healthy(kubelet, DEVICES), timeout=PATIENCE)
    return (await kubelet.admit("pod", {GPU: 1})).allocations[0].response


async def restart(mps) -> None:
    """Kill the daemon and wait for the next."""
    (daemon,) = mps.children()
    os.kill(daemon, signal.SIGKILL)
    await mps.until(mps.why)
    await mps.until(lambda: not mps.why())


def names(pipe: Path) -> list[str]:
    return sorted(file.name for file in pipe.iterdir())


@USERS
async def test_a_container_can_use_mps_and_cannot_change_a_name_of_the_daemon(
    mps, program, kubelet, daemon, containers, victim, uid
):
    response = await serve(mps, program, kubelet, daemon)
    container = containers(uid, response.mounts, response.envs["CUDA_MPS_PIPE_DIRECTORY"])
    assert await threads_of(container) == "25.0"
    assert container.do("write_fifo") == "written"
    assert container.do("links", str(victim)) == "nothing"
    assert names(mps.root / GPU / "pipe") == sorted(NAMES)
    await restart(mps)
    assert await threads_of(container) == "25.0"  # by the same mount


@USERS
async def test_a_lock_of_a_container_does_not_prevent_a_start(mps, program, kubelet, daemon, containers, uid):
    response = await serve(mps, program, kubelet, daemon)
    lock = mps.root / GPU / "pipe/control_lock"
    assert lock.stat().st_mode & 0o7777 == 0o600
    container = containers(uid, response.mounts, response.envs["CUDA_MPS_PIPE_DIRECTORY"])
    waiting = container.start("read_lock")
    if uid:
        assert waiting.stdout.readline().strip() == "Permission denied"
    await restart(mps)
    if not uid:
        assert waiting.stdout.readline().strip() == "locked"
        await restart(mps)


async def test_a_container_with_a_writable_mount_of_an_earlier_version_cannot_lead_the_daemon_elsewhere(
    mps, program, kubelet, daemon, containers, victim
):
    response = await serve(mps, program, kubelet, daemon)
    writable = [replace(mount, read_only=False) for mount in response.mounts]
    container = containers(0, writable, response.envs["CUDA_MPS_PIPE_DIRECTORY"])
    missing = victim.with_name("missing")
    for target in (victim, missing):
        linking = container.start("keep_linking", str(target))
        assert linking.stdout.readline().strip() == "linking"
        with anyio.move_on_after(5):  # several starts
            while True:
                for pid in mps.children():
                    os.kill(pid, signal.SIGKILL)
                await anyio.sleep(0.5)
        linking.kill()
        linking.communicate()
        for pid in mps.children():
            os.kill(pid, signal.SIGKILL)
        await mps.until(lambda: not mps.why())
    assert not missing.exists()


async def test_files_left_in_the_pipe_directory_are_removed_and_not_followed(mps, program, victim):
    pipe = mps.root / GPU / "pipe"
    missing = victim.with_name("missing")
    for leave in (victim, missing):
        shutil.rmtree(pipe, ignore_errors=True)
        pipe.mkdir(parents=True)
        for name in NAMES:
            (pipe / name).symlink_to(leave)
        (pipe / "more/and/more").mkdir(parents=True)
        (pipe / "more/link").symlink_to(victim.parent)
        mps.run("--mps-control-binary", str(program))
        await mps.until(lambda: not mps.why())
        assert names(pipe) == sorted(NAMES)
        await mps.stop()
    assert not missing.exists()
    assert victim.parent.is_dir()


@pytest.fixture
def node(program, short_path):
    """A simulated node whose supervisor runs NVIDIA's daemon, with short intervals."""
    made = Mps(short_path)
    made.control = lambda: (str(program),)
    yield made
    made.calls.close()


def mounts(node) -> list[Mount]:
    device = replace(whole_gpu(node.gpus[0]), sharing=SharedResource(GPU, GPU, REPLICAS, MPS))
    access = Access(mps=MpsDirectories.of(str(node.root), GPU))
    return list(container_edits([device], access).mounts)


def _counted_since(node: Mps, before: Counts) -> bool:
    return node.state_of().counts != before


async def threads_of(container: Container) -> str:
    """Return the share of threads that the daemon gives a client, as read in the container.

    NVIDIA's daemon has only one control connection. While a probe uses it, the daemon refuses a client's command or sends an
    empty answer, so the client retries.
    """
    with anyio.fail_after(PATIENCE):
        while not (answer := await anyio.to_thread.run_sync(container.do, "ask", QUESTIONS[0])):
            await anyio.sleep(0.05)
    return answer


@USERS
async def test_a_silent_client_takes_no_work_from_others(node, containers, uid):
    async with node.supervised(node.resource(0, 1), tempo=replace(QUICK, answer=0.5)):
        await until(node.is_ready)
        (daemon,) = marked(node.root)
        container = containers(uid, mounts(node), f"/mps/{GPU}/pipe")
        silent = container.start("silent", "control" if uid else "control_privileged")
        assert silent.stdout.readline().strip() == "connected"
        await until(lambda: "its process is alive and is not ended" in node.why())
        failed = node.state_of().counts.probes_failed
        await until(lambda: node.state_of().counts.probes_failed > failed + QUICK.misses)
        assert marked(node.root) == [daemon]
        silent.communicate()
        await until(node.is_ready)
        assert marked(node.root) == [daemon]
        assert await threads_of(container) == "25.0"


@USERS
async def test_limits_that_a_container_lifts_are_restored(node, containers, caplog, uid):
    async with node.supervised(node.resource(0, 1)):
        await until(node.is_ready)
        container = containers(uid, mounts(node), f"/mps/{GPU}/pipe")
        for change in ("set_default_active_thread_percentage 100", "set_default_device_pinned_mem_limit 1 0M"):
            before = node.state_of().counts
            with anyio.fail_after(PATIENCE):  # the daemon refuses a change during a probe, so the client sends it again
                while not _counted_since(node, before):
                    await anyio.to_thread.run_sync(container.do, "ask", change)
                    with anyio.move_on_after(2):
                        while not _counted_since(node, before):
                            await anyio.sleep(0.01)
        assert node.is_ready()
        with anyio.fail_after(PATIENCE):  # a probe at the same time is refused or gets an empty answer
            while await anyio.to_thread.run_sync(container.do, "ask", *QUESTIONS) != "25.0 19G 19G":
                await anyio.sleep(0.05)
    assert "a client has changed the limits of its MPS daemon" in caplog.text


@USERS
async def test_a_client_that_fills_the_log_stops_no_daemon(node, containers, uid):
    async with node.supervised(node.resource(0, 1), tempo=replace(QUICK, answer=0.5)):
        await until(node.is_ready)
        (daemon,) = marked(node.root)
        container = containers(uid, mounts(node), f"/mps/{GPU}/pipe")
        for _ in range(2):
            before = node.state_of().counts
            assert await anyio.to_thread.run_sync(container.do, "fill_fifo") == "full"
            await until(partial(_counted_since, node, before))
        await until(node.is_ready)
        assert marked(node.root) == [daemon]
