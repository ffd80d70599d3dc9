"""`gpu-plugin mps` as a process on a simulated node."""

import os
import signal
from pathlib import Path

import anyio
import pytest

from gpu_plugin.cli import main
from gpu_plugin.simulation import mps_control
from tests.node.daemon import GPU, healthy
from tests.node.mps_process import PATIENCE, SHARED

ALONE = "version: v1\n"


async def test_a_shared_resource_has_a_daemon_until_sigterm_which_leaves_nothing(mps):
    mps.run()
    await mps.until(lambda: not mps.why(replicas=4))
    assert mps.modes() == dict.fromkeys(range(8), 3)
    (daemon,) = mps.children()
    status, seconds = await mps.stop()
    assert (status, seconds < 5) == (0, True)
    assert mps.children() == []
    assert not Path(f"/proc/{daemon}").exists()
    assert mps.modes() == {}
    assert "gpu-plugin mps does not run" in mps.why()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
async def test_other_ends_are_clean_too(mps, number):
    mps.run()
    await mps.until(lambda: not mps.why())
    mps.signal(number)
    assert await mps.exit(10) == 0
    assert mps.children() == []


async def test_a_second_signal_while_a_daemon_takes_its_time_to_quit_leaves_no_gpu_behind(mps):
    mps.run()
    await mps.until(lambda: not mps.why())
    (mps.root / GPU / "log" / mps_control.FAULT).write_text("hang")
    mps.signal(signal.SIGTERM)
    await mps.until(lambda: "it is being stopped" in mps.why())
    mps.signal(signal.SIGINT)
    mps.signal(signal.SIGTERM)
    assert await mps.exit(10) == 0
    assert mps.children() == []
    assert mps.modes() == {}


async def test_sigusr2_tells_where_it_stands_and_ends_nothing(mps):
    mps.run()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(mps.asked_where_it_stands)
        await mps.until(lambda: not mps.why(replicas=4))
        await mps.said("in _serve")
        (child,) = mps.children()
        taken = dict(line.split(":\t", 1) for line in Path(f"/proc/{child}/status").read_text().splitlines())
        assert not int(taken["SigIgn"], 16) >> (signal.SIGUSR2 - 1) & 1  # its children have the usual signals
        status, _ = await mps.stop()
    assert status == 0, mps.log.read_text()[-2000:]
    assert mps.children() == []


async def test_the_kernel_tells_of_a_killed_supervisor_and_the_next_cleans_up(mps):
    log = mps.root / GPU / "log"
    log.mkdir(parents=True)
    (log / mps_control.FAULT).write_text("server")
    mps.run()
    await mps.until(lambda: not mps.why())
    daemon, server = sorted(mps.children())
    mps.signal(signal.SIGKILL)
    await mps.exit()
    assert "gpu-plugin mps does not run" in mps.why()
    assert mps.modes() == dict.fromkeys(range(8), 3)
    mps.process = None
    (log / mps_control.FAULT).unlink()
    mps.run()
    await mps.until(lambda: not mps.why())
    assert not {daemon, server} & set(mps.children())
    status, _ = await mps.stop()
    assert status == 0
    assert mps.modes() == {}


async def test_sighup_takes_a_new_configuration_and_keeps_the_old_one_if_it_is_bad(mps):
    mps.run()
    await mps.until(lambda: not mps.why(replicas=4))
    (daemon,) = mps.children()
    mps.config.write_text("version: v7\n")
    mps.signal(signal.SIGHUP)
    await mps.said("nothing is changed")
    mps.signal(signal.SIGHUP)
    assert mps.children() == [daemon]
    mps.config.write_text(SHARED % 6)
    mps.signal(signal.SIGHUP)
    await mps.until(lambda: not mps.why(replicas=6))
    assert daemon not in mps.children()
    mps.config.write_text(ALONE)
    mps.signal(signal.SIGHUP)
    await mps.until(lambda: not mps.modes())
    assert mps.children() == []
    assert "runs no daemon for it" in mps.why()
    await mps.said("no resource of this node is shared by MPS")
    status, _ = await mps.stop()
    assert status == 0


async def test_a_control_program_of_the_operators_is_run(mps, directory):
    program = directory / "nvidia-cuda-mps-control"
    mps.run(environ={"MPS_CONTROL_BINARY": str(program)})
    await mps.until(lambda: f"{program} cannot be started: No such file" in mps.why())
    program.write_text(f'#!/bin/sh\nexec {" ".join(mps_control.COMMAND)} "$@"\n')
    program.chmod(0o755)
    await mps.until(lambda: not mps.why())


async def test_without_a_driver_it_ends_at_once_or_waits_for_one(mps, directory):
    mps.profile = ""
    nowhere = ("--driver-root-ctr-path", str(directory / "nowhere"))
    mps.run(*nowhere)
    assert await mps.exit(30) == 1
    await mps.said("the NVIDIA driver cannot be used")
    mps.run(*nowhere, "--fail-on-init-error=false")
    await mps.said("looking again in")
    status, seconds = await mps.stop()
    assert (status, seconds < 5) == (0, True)


async def test_what_the_command_line_gets_wrong_is_one_line(mps):
    mps.config.write_text(ALONE)
    mps.run("--mount-shm", mps_root=False, environ={"MPS_ROOT": ""})
    assert await mps.exit(30) == 2
    assert mps.log.read_text().strip() == "gpu-plugin mps: --mount-shm: needs --mps-root"


async def test_shared_memory_is_mounted_once_and_by_itself(mps):
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    shm = mps.root / "shm"
    try:
        mps.run("--mount-shm")
        if await mps.exit(30):
            assert "cannot be mounted there" in mps.log.read_text()
            pytest.skip("mounts are not allowed here")
        assert "MiB mounted" in mps.log.read_text()
        assert shm.is_mount()
        mps.run("--mount-shm")
        assert await mps.exit(30) == 0
        assert "mounted already" in mps.log.read_text()
    finally:
        if shm.is_mount():
            await anyio.run_process(["umount", str(shm)])


MIXED = (
    "version: v1\nsharing: {mps: {resources: "
    "[{name: nvidia.com/gpu, rename: nvidia.com/gpu.mps, devices: [0, 1], replicas: 4}]}}\n"
)


async def test_devices_are_healthy_while_their_daemon_is_up_and_no_other_resource_hears_of_it(kubelet, mps, daemon):
    mps.config.write_text(MIXED)
    shared, mps.log = "nvidia.com/gpu.mps", mps.root.with_name("mps.log")
    daemon.start("--config-file", str(mps.config), "--mps-root", str(mps.root))
    await kubelet.wait_for(healthy(kubelet, 6))
    await kubelet.wait_for(healthy(kubelet, 0, shared))
    lists = kubelet.resources[GPU].lists
    mps.run()
    await kubelet.wait_for(healthy(kubelet, 8, shared), timeout=PATIENCE)
    response = (await kubelet.admit("pod", {shared: 1})).allocations[0].response
    assert response.envs["CUDA_MPS_PIPE_DIRECTORY"] == f"/mps/{shared}/pipe"
    assert {(mount.host_path, mount.read_only) for mount in response.mounts} == {
        (f"{mps.root}/{shared}/pipe", True),
        (f"{mps.root}/shm", False),
    }
    mps.kill()
    await kubelet.wait_for(healthy(kubelet, 0, shared), timeout=PATIENCE)
    await daemon.said(f"{shared}: its MPS daemon is down")
    assert kubelet.resources[GPU].lists == lists
    assert kubelet.registrations[shared].total == 1
    mps.run()
    await kubelet.wait_for(healthy(kubelet, 8, shared), timeout=PATIENCE)
    await mps.stop()


async def test_metrics_have_what_gpu_plugin_mps_counts(kubelet, mps, daemon, capsys):
    mps.log = mps.root.with_name("mps.log")
    daemon.start("--config-file", str(mps.config), "--mps-root", str(mps.root))
    mps.run()
    await kubelet.wait_for(healthy(kubelet, 32), timeout=PATIENCE)
    pipe = str(mps.root / GPU / "pipe")
    await anyio.run_process(
        mps_control.COMMAND,
        input=b"set_default_active_thread_percentage 100\n",
        env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": pipe},
    )
    await mps.said("a client has changed the limits of its MPS daemon")
    wanted = f'gpu_plugin_mps_limits_restored_total{{resource="{GPU}"}} 1'
    with anyio.fail_after(PATIENCE):
        while wanted not in await anyio.to_thread.run_sync(shown_metrics, daemon.state, capsys):
            await anyio.sleep(0.1)


def shown_metrics(state, capsys):
    main(["status", "--metrics", "--state-dir", str(state)])
    return capsys.readouterr().out
