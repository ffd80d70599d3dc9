"""`gpu-plugin mps` as a process over directories that are hostile, full, read-only, or left by a killed process."""

import os
import shutil
import signal

import anyio
import pytest

from gpu_plugin.simulation import mps_control
from tests.node.daemon import GPU

SECRET = b"a file of the node\n"
NAMES = ("control", "control_lock", "control_privileged", "log")


@pytest.fixture
def pipe(mps):
    path = mps.root / GPU / "pipe"
    path.mkdir(parents=True)
    return path


async def mounted(*arguments):
    """Mount as root, or skip."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    done = await anyio.run_process(["mount", *arguments], check=False)
    if done.returncode:
        pytest.skip(f"mounts are not allowed here: {done.stderr.decode()}")


async def test_links_in_place_of_the_daemons_files_lead_nowhere(mps, pipe, short_path):
    victim, missing = short_path / "victim", short_path / "missing"
    victim.write_bytes(SECRET)
    victim.chmod(0o600)
    for name, target in zip(NAMES, (missing, victim, missing, victim), strict=True):
        (pipe / name).symlink_to(target)
    (pipe / "more").symlink_to(short_path)
    mps.run()
    await mps.until(lambda: not mps.why())
    assert (victim.read_bytes(), victim.stat().st_mode & 0o7777) == (SECRET, 0o600)
    assert not missing.exists()
    assert {file.name for file in pipe.iterdir()} == set(NAMES)
    assert (pipe / "control_lock").stat().st_mode & 0o7777 == 0o600


async def test_directories_and_fifos_in_place_of_the_daemons_files_are_removed(mps, pipe):
    (pipe / "control/full").mkdir(parents=True)
    (pipe / "control/full/file").touch()
    (pipe / "log").mkdir()
    os.mkfifo(pipe / "control_lock")
    mps.run()
    await mps.until(lambda: not mps.why())
    assert {file.name for file in pipe.iterdir()} == set(NAMES)


async def test_a_root_below_a_directory_that_others_can_write_to_is_refused_until_it_is_safe(mps, short_path):
    mps.root = short_path / "open/mps"
    mps.root.mkdir(parents=True)
    mps.root.parent.chmod(0o777)
    mps.run()
    await mps.until(
        lambda: "is not safe for MPS daemons, which run as root: other users than root can write" in mps.why()
    )
    assert mps.children() == []
    mps.root.parent.chmod(0o755)
    await mps.until(lambda: not mps.why())


async def test_a_living_daemon_of_another_program_keeps_its_directory(mps, pipe):
    log = mps.root / GPU / "log"
    log.mkdir()
    environ = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
    other = await anyio.open_process([*mps_control.COMMAND, "-f"], env=environ, stdout=None)
    try:
        with anyio.fail_after(30):
            while not (pipe / "control").is_socket():
                await anyio.sleep(0.02)
        socket = (pipe / "control").stat()
        mps.run()
        await mps.until(lambda: f"another MPS daemon (process {other.pid}) has {pipe}" in mps.why())
        assert (pipe / "control").stat() == socket
    finally:
        other.kill()
        await other.wait()
    await mps.until(lambda: not mps.why())


async def test_a_read_only_directory_is_a_reason_and_is_tried_again(mps, pipe):
    (pipe / "control").touch()
    resource = mps.root / GPU
    await mounted("--bind", str(pipe), str(pipe))
    try:
        await mounted("-o", "remount,bind,ro", str(pipe))
        mps.run()
        await mps.until(lambda: f"{pipe}/control: Read-only file system; remove {pipe}/control by hand" in mps.why())
        assert mps.children() == []
    finally:
        await anyio.run_process(["umount", str(pipe)])
    await mps.until(lambda: not mps.why())
    assert resource.is_dir()


async def test_a_full_disk_is_a_reason_and_is_tried_again(mps):
    mps.root.mkdir()
    await mounted("-t", "tmpfs", "-o", "nr_inodes=4,mode=755", "tmpfs", str(mps.root))
    try:
        mps.run()
        await mps.said("No space left on device")
        assert mps.why()
        await anyio.run_process(["mount", "-o", "remount,nr_inodes=1000", str(mps.root)])
        await mps.until(lambda: not mps.why())
        await mps.stop()
    finally:
        mps.kill()
        await anyio.run_process(["umount", "-l", str(mps.root)])


async def test_a_start_that_was_killed_at_any_point_does_not_prevent_the_next(mps):
    pipe = mps.root / GPU / "pipe"
    for point in (mps.root / ".supervisor", pipe / "control_lock", pipe / "control"):
        mps.run()
        await mps.until(point.exists)
        mps.signal(signal.SIGKILL)
        await mps.exit()
        assert mps.why()
        mps.run()
        await mps.until(lambda: not mps.why())
        await mps.stop()
        shutil.rmtree(mps.root)


async def test_the_mode_of_a_directory_that_a_link_leads_to_stays(mps, short_path):
    private = short_path / "private"
    private.mkdir(mode=0o700)
    mps.root.symlink_to(private)
    mps.run()
    await mps.until(lambda: not mps.why())
    await mps.stop()
    assert private.stat().st_mode & 0o7777 == 0o700
