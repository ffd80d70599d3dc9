import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import anyio
import pytest

from gpu_plugin.mps import control_daemon, tether
from gpu_plugin.mps.control_daemon import ControlDaemon
from gpu_plugin.mps.control_program import PROGRAM
from gpu_plugin.mps.plan import plan_daemons

from .conftest import GPU, until


@pytest.fixture
def script(mps):
    """Makes a control program of a shell script."""

    def make(text):
        mps.root.mkdir(parents=True, exist_ok=True)
        path = mps.root / PROGRAM
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        (daemon,) = plan_daemons(str(mps.root), [mps.resource(1, 0)]).daemons
        return ControlDaemon(daemon, mps.root, (str(path), "fixed"))

    return make


async def test_a_daemon_gets_its_own_environment_and_what_it_says_last_is_kept(script, mps, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "3")
    control = script('env > "$0.env"; echo "$@" > "$0.arguments"; echo first; printf "last\\377 word"; exit 3')
    await control.start()
    assert control.pid
    assert (await control.exited()).startswith(f"{PROGRAM} exited with status 3: last")
    await control.end(5)
    environment = dict(line.split("=", 1) for line in (mps.root / f"{PROGRAM}.env").read_text().splitlines())
    assert environment["CUDA_VISIBLE_DEVICES"] == f"{mps.gpus[1].uuid},{mps.gpus[0].uuid}"
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == f"{mps.root}/{GPU}/pipe"
    assert environment["CUDA_MPS_LOG_DIRECTORY"] == f"{mps.root}/{GPU}/log"
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in environment
    assert environment["PATH"].startswith(f"{mps.root}:")  # the server is in the same directory
    assert (mps.root / f"{PROGRAM}.arguments").read_text() == "fixed -f\n"


async def test_a_daemon_that_talks_without_end_and_takes_no_notice_is_killed(script):
    control = script("trap '' TERM; while :; do echo chatter; done")
    await control.start()
    await control.end(0.2)
    assert await control.exited() == f"{PROGRAM} was killed by SIGKILL: chatter"


async def test_a_cancelled_command_leaves_no_client_that_occupies_the_daemon(script, mps):
    control = script('echo $$ > "$0.pid"; exec sleep 600')
    written = mps.root / f"{PROGRAM}.pid"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(control.ask, "a command", patience=600))
        await until(lambda: written.exists() and written.read_text())
        tasks.cancel_scope.cancel()
    client = Path("/proc", written.read_text().strip())
    await until(lambda: not client.exists(), 10)


async def test_the_daemon_dies_with_its_parent(tmp_path):
    source = (
        "import subprocess, sys, os\n"
        f"p = subprocess.Popen([sys.executable, '-I', '-S', {tether.__file__!r}, str(os.getpid()), {str(tmp_path)!r}, "
        "'sh', '-c', 'echo $$; exec sleep 600'], stdout=subprocess.PIPE)\n"
        "print(p.stdout.readline().decode(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: ASYNC220
    assert parent.stdout is not None
    child = Path("/proc", parent.stdout.readline().decode().strip())
    assert child.exists()
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    await until(lambda: not child.exists() or (child / "stat").read_text().rpartition(")")[2].split()[0] == "Z")


def test_one_whose_parent_is_gone_already_does_not_start(tmp_path):
    command = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid() + 1), str(tmp_path)]
    command += ["touch", str(tmp_path / "started")]
    assert subprocess.run(command, check=False).returncode == 1
    assert not (tmp_path / "started").exists()


def test_a_daemon_opens_neither_links_nor_device_nodes_in_its_pipe_directory(tmp_path):
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.write_text("of the node")
    pipe.mkdir()
    (pipe / "link").symlink_to(file)
    (pipe / "own").write_text("its own")
    if subprocess.run(["unshare", "--mount", "mount", "--bind", pipe, pipe], check=False).returncode:
        pytest.skip("mounts are not allowed here")
    os.mknod(pipe / "device", stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    script = 'for name in link device own; do head -c 7 "$0/$name" || echo refused; done'
    command = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), str(pipe), "sh", "-c", script, str(pipe)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "refused\nrefused\nits own"


@pytest.mark.parametrize("pidfd", [True, False])
def test_a_killed_process_counts_as_ended_only_once_it_has_closed_its_files(monkeypatch, pidfd):
    left = subprocess.Popen(["sleep", "60"])
    marked = [f"/proc/{left.pid}"]

    def slowly(*_):  # the kernel frees the environment at once, and closes files and releases locks later
        marked.clear()
        threading.Timer(0.3, left.kill).start()

    def refused(_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    if not pidfd:
        monkeypatch.setattr(os, "pidfd_open", refused)
        monkeypatch.setattr(left, "kill", partial(os.kill, left.pid, signal.SIGKILL))
    monkeypatch.setattr(control_daemon, "_carries", lambda process, _: process in marked)
    monkeypatch.setattr(*((signal, "pidfd_send_signal") if pidfd else (os, "kill")), slowly)
    assert control_daemon._end("") == [left.pid]
    state = Path(f"/proc/{left.pid}/stat")
    assert not state.exists() or state.read_text().rpartition(") ")[2].startswith("Z")
    left.wait()
