import errno
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import anyio
import anyio.lowlevel
import pytest
from msgspec.structs import replace

from gpu_plugin.config.sharing import MpsLimits
from gpu_plugin.devices.nvml_h import ComputeMode, Return
from gpu_plugin.mps import supervisor as supervisor_module
from gpu_plugin.mps import tether
from gpu_plugin.mps.compute_modes import FILE
from gpu_plugin.mps.control_daemon import MARK, ControlDaemon, mark
from gpu_plugin.mps.errors import MpsError
from gpu_plugin.mps.pipe import prepare
from gpu_plugin.mps.readiness import StateFile
from gpu_plugin.simulation import mps_control
from gpu_plugin.state.directory import StateDirectory

from .conftest import GPU, OTHER, PATIENCE, QUICK, marked, ready, until

DEFAULT, EXCLUSIVE = ComputeMode.DEFAULT, ComputeMode.EXCLUSIVE_PROCESS


def pid(mps, name=GPU):
    """The process id of a resource's daemon, which is up."""
    return mps.state_of(name).pid


def orphan(value):
    """A process that carries the mark of a daemon."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(600)"],
        env={MARK: value},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


async def test_a_daemon_is_ready_once_it_was_told_its_limits_and_everything_is_undone_at_the_end(mps):
    async with mps.supervised(mps.resource(2, 5)):
        await until(mps.is_ready)
        uuids = [mps.gpus[2].uuid, mps.gpus[5].uuid]
        memory = mps.gpus[2].memory_bytes // 4 // 2**20
        assert mps.told() == [
            f"Start, devices {','.join(uuids)}",
            f"Cmd:set_default_device_pinned_mem_limit 0 {memory}M",
            f"Cmd:set_default_device_pinned_mem_limit 1 {memory}M",
            "Cmd:set_default_active_thread_percentage 25",
        ]
        assert ready(mps.root, GPU, gpus=uuids, replicas=4) == ""
        assert [mps.mode(index) for index in range(8)] == [0, 0, 3, 0, 0, 3, 0, 0]
        assert os.getpgid(pid(mps)) == pid(mps) != os.getpgid(0)
    assert mps.told()[-1] == "Cmd:quit"
    assert [mps.mode(index) for index in range(8)] == [0] * 8
    assert "does not run" in mps.why()


async def test_a_daemon_that_crashes_is_down_and_started_again(mps, caplog):
    async with mps.supervised(mps.resource(0)):
        await until(mps.is_ready)
        first = pid(mps)
        mps.fault("crash")
        await until(lambda: "exited with status 1: simulated crash" in mps.why())
        assert mps.mode(0) == EXCLUSIVE
        mps.heal()
        await until(mps.is_ready)
        assert pid(mps) != first
        assert mps.told().count("Cmd:set_default_active_thread_percentage 25") == 2
    lines = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert "simulated crash" in lines[0]
    assert re.search(r"starting it again in 0\.0(09\d*|1) s$", lines[0])


async def test_a_daemon_that_is_killed_is_noticed_at_once(mps):
    async with mps.supervised(mps.resource(0), tempo=replace(QUICK, probe=3600, first_pause=3600)):
        await until(mps.is_ready)
        os.kill(pid(mps), signal.SIGKILL)
        await until(lambda: "was killed by SIGKILL" in mps.why())


@pytest.mark.parametrize(
    ("stable", "expected"), [(60.0, [0.01, 0.02, 0.04, 0.04, 0.04]), (0.0, [0.01, 0.01, 0.01, 0.01, 0.01])]
)
async def test_the_pauses_grow_unless_the_daemon_ran_for_long_and_are_as_long_as_is_said(
    mps, caplog, monkeypatch, stable, expected
):
    slept, sleep = [], anyio.sleep

    async def noted(seconds):
        slept.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(anyio, "sleep", noted)
    mps.fault("crash")
    tempo = replace(QUICK, first_pause=0.01, longest_pause=0.04, stable=stable)
    async with mps.supervised(mps.resource(0), tempo=tempo):
        await until(lambda: sum("starting it again" in record.message for record in caplog.records) >= 5)
    pauses = [record.args[2] for record in caplog.records if "starting it again" in record.msg]
    for pause, most in zip(pauses, expected, strict=False):
        assert 0.9 * most <= pause <= most
    assert set(pauses[:4]) <= set(slept)


async def test_a_client_that_sends_nothing_costs_no_daemon_and_no_device_once_it_is_gone(mps, caplog):
    async with mps.supervised(mps.resource(0), tempo=replace(QUICK, answer=0.5)):
        await until(mps.is_ready)
        kept = pid(mps)
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(str(mps.root / GPU / "pipe/control"))
            await until(lambda: "has not answered" in mps.why())
            assert "its process is alive and is not ended" in mps.why()
            assert marked(mps.root) == [kept]
            failed = mps.state_of().counts.probes_failed
            assert failed >= QUICK.misses
            await until(lambda: mps.state_of().counts.probes_failed > failed + QUICK.misses)
            assert marked(mps.root) == [kept]
        await until(mps.is_ready)
        assert pid(mps) == kept
    assert any("probing again" in record.message for record in caplog.records)
    assert sum("its MPS daemon is down" in record.message for record in caplog.records) == 1


async def test_limits_that_a_client_changed_are_restored_logged_and_counted(mps, caplog):
    async with mps.supervised(mps.resource(0, 1)):
        await until(mps.is_ready)
        kept, restored = pid(mps), 0
        for changes in (
            ("set_default_active_thread_percentage 100",),
            ("set_default_device_pinned_mem_limit 1 500000M",),
            ("set_default_device_pinned_mem_limit 0 100M", "set_default_active_thread_percentage 1"),
        ):
            for change in changes:
                mps.client(change)
            await until(lambda: mps.limits(2) == ["25.0", "19G", "19G"])
            before = restored
            while restored == before:
                await anyio.sleep(0.01)
                restored = mps.state_of().counts.limits_restored
        assert pid(mps) == kept
        assert mps.is_ready()
    lines = [record for record in caplog.records if "a client has changed the limits" in record.message]
    assert {record.levelno for record in lines} <= {logging.WARNING, logging.DEBUG}
    assert lines[0].levelno == logging.WARNING
    assert "gives each client 100.0 % of the threads, not 25 %" in lines[0].message


async def test_misses_that_are_not_in_a_row_do_not_end_a_daemon(mps, monkeypatch):
    answers, asked = ControlDaemon.ask, []

    async def every_other(self, *commands, patience):
        asked.append(commands)
        if len(asked) % 2:
            raise MpsError("busy")
        return await answers(self, *commands, patience=patience)

    async with mps.supervised(mps.resource(0)):
        await until(mps.is_ready)
        kept = pid(mps)
        monkeypatch.setattr(ControlDaemon, "ask", every_other)
        await until(lambda: len(asked) > 4 * QUICK.misses)
        assert marked(mps.root) == [kept]
        monkeypatch.undo()


async def test_a_daemon_that_hangs_is_down_and_lives_until_the_end(mps):
    mps.fault("hang")
    async with mps.supervised(mps.resource(0), tempo=replace(QUICK, start=0.5, answer=0.2, quit=0.2)):
        await until(lambda: "its process is alive and is not ended" in mps.why())
        assert len(marked(mps.root)) == 1


async def test_a_daemon_that_listens_nowhere_is_ended_and_started_again(mps, short_path, caplog):
    program = short_path / "deaf"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    mps.control = lambda: (str(program),)
    async with mps.supervised(mps.resource(0), tempo=replace(QUICK, start=0.3, answer=0.2, quit=0.2)):
        await until(lambda: sum("starting it again" in record.message for record in caplog.records) >= 2)


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (
            "set_default_device_pinned_mem_limit",
            "it has not set or kept all of 1 memory limits: it answers 'nothing'",
        ),
        ("set_default_active_thread_percentage", "it gives each client 100.0 % of the threads, not 25 %"),
    ],
)
async def test_a_daemon_that_refuses_a_limit_without_a_word_is_not_ready_before_it_takes_it(mps, refused, why):
    mps.fault(f"refuse {refused}")
    async with mps.supervised(mps.resource(0)):
        await until(lambda: why in mps.why())
        (kept,) = marked(mps.root)
        mps.heal()
        await until(mps.is_ready)
        assert pid(mps) == kept


async def test_a_daemon_that_knows_no_memory_limits_is_ready_without_and_that_is_told_once(mps, caplog):
    mps.fault("unknown default_device_pinned_mem_limit")
    async with mps.supervised(mps.resource(0)):
        await until(mps.is_ready)
        asked = mps.asked()
        await until(lambda: mps.asked() > asked + 2)
        assert mps.is_ready()
    assert caplog.text.count("its MPS daemon does not support a limit: Unknown command") == 1
    assert "restoring" not in caplog.text


async def test_servers_that_outlive_their_daemon_are_killed(mps):
    mps.fault("server")
    async with mps.supervised(mps.resource(0)):
        await until(mps.is_ready)
        assert len(marked(mps.root)) == 2
        server = int((mps.root / GPU / "log" / mps_control.SERVER).read_text())
        mps.fault("crash")
        await until(lambda: not mps.is_ready())
        await until(lambda: server not in marked(mps.root))


async def test_one_resources_trouble_is_its_own(mps):
    other = mps.resource(4, 5, name=OTHER, replicas=2)
    mps.fault("crash")
    mps.node.hang(1, 3600)
    async with mps.supervised(mps.resource(0), other, mps.resource(1, name="a/hung"), tempo=QUICK):
        await until(lambda: mps.is_ready(OTHER))
        await until(lambda: "simulated crash" in mps.why())
        kept = pid(mps, OTHER)
        mps.heal()
        await until(mps.is_ready)
        assert mps.is_ready(OTHER)
        assert pid(mps, OTHER) == kept
        assert mps.told(OTHER).count("Cmd:set_default_active_thread_percentage 50") == 1
        assert mps.why("a/hung")
    mps.node.heal(1)


async def test_only_what_changed_is_started_again(mps):
    one, two = mps.resource(0), mps.resource(1, name=OTHER)
    async with mps.supervised(one, two) as supervisor:
        await until(lambda: mps.is_ready() and mps.is_ready(OTHER))
        kept, changed = pid(mps), pid(mps, OTHER)
        supervisor.apply([one, mps.resource(1, name=OTHER, limits=MpsLimits(pinned_memory=512))])
        await until(lambda: "Cmd:set_default_device_pinned_mem_limit 0 512M" in mps.told(OTHER))
        await until(lambda: mps.is_ready(OTHER))
        assert pid(mps) == kept
        assert pid(mps, OTHER) != changed
        assert (mps.mode(0), mps.mode(1)) == (EXCLUSIVE, EXCLUSIVE)
        assert mps.is_ready()
        supervisor.apply([mps.resource(1)])  # the GPU goes from one resource's daemon to the other's
        await until(lambda: ready(mps.root, GPU, gpus=(mps.gpus[1].uuid,)) == "")
        assert "runs no daemon for it" in mps.why(OTHER)
        assert (mps.mode(0), mps.mode(1)) == (DEFAULT, EXCLUSIVE)
        supervisor.apply([])
        await until(lambda: marked(mps.root) == [])
        await until(lambda: mps.mode(1) == DEFAULT)


async def test_changes_in_quick_succession_settle_on_the_last(mps):
    async with mps.supervised() as supervisor:
        for replicas in (2, 3, 5, 8):
            supervisor.apply([mps.resource(0, replicas=replicas)])
            await anyio.lowlevel.checkpoint()
        await until(lambda: ready(mps.root, GPU, replicas=8) == "")


async def test_what_cannot_be_shared_is_told_to_the_device_plugin(mps, caplog):
    async with mps.supervised(mps.resource(0, replicas=49), mps.resource(1, name=OTHER, replicas=48)) as supervisor:
        await until(lambda: mps.is_ready(OTHER))
        assert "49 replicas are more than the 48 MPS clients" in mps.why()
        supervisor.apply([mps.resource(0)])
        await until(mps.is_ready)
    assert "no MPS daemon can serve it" in caplog.text


async def test_a_mode_that_the_operator_set_stays_and_another_comes_back(mps):
    mps.node.compute_modes.set(0, EXCLUSIVE)
    mps.node.compute_modes.set(1, 2)
    async with mps.supervised(mps.resource(0, 1)):
        await until(mps.is_ready)
        assert (mps.mode(0), mps.mode(1)) == (EXCLUSIVE, EXCLUSIVE)
    assert (mps.mode(0), mps.mode(1)) == (EXCLUSIVE, 2)


async def test_a_gpu_without_compute_modes_is_shared_all_the_same(mps, caplog):
    mps.node.refuse("compute_mode", Return.NOT_SUPPORTED, gpu=0)
    async with mps.supervised(mps.resource(0)):
        await until(mps.is_ready)
    assert "has no compute modes" in caplog.text


async def test_a_compute_mode_that_may_not_be_set_keeps_the_daemon_down(mps):
    mps.node.refuse("set_compute_mode", Return.NO_PERMISSION, gpu=0)
    async with mps.supervised(mps.resource(0)):
        await until(lambda: "cannot be put into compute mode EXCLUSIVE_PROCESS" in mps.why())
        assert "nvmlDeviceSetComputeMode" in mps.why()
        assert mps.gpus[0].uuid in (mps.root / FILE).read_text()  # written down before it is tried
        assert marked(mps.root) == []


async def test_a_mode_that_cannot_be_restored_is_left_to_the_next_supervisor(mps, caplog):
    async with mps.supervised(mps.resource(0)):
        await until(mps.is_ready)
        mps.node.refuse("set_compute_mode", Return.UNKNOWN, gpu=0, times=1)
    assert mps.mode(0) == EXCLUSIVE
    assert "it cannot be restored now" in caplog.text
    async with mps.supervised():
        await until(lambda: mps.mode(0) == DEFAULT)


async def test_what_another_boot_wrote_down_is_void(mps):
    mps.root.mkdir(parents=True)
    StateDirectory(mps.root).write(".compute-modes.json", {"boot_id": "another", "modes": {mps.gpus[0].uuid: 2}})
    mps.node.compute_modes.set(0, EXCLUSIVE)
    async with mps.supervised(mps.resource(0)):
        await until(mps.is_ready)
    assert mps.mode(0) == EXCLUSIVE


async def test_what_a_killed_supervisor_left_is_killed_wanted_or_not(mps):
    mps.root.mkdir(parents=True)
    orphans = [orphan(mark(mps.root, name)) for name in (GPU, "nvidia.com/gone")]
    bystander = orphan(f"0:0:{GPU}")
    try:
        async with mps.supervised(mps.resource(0)):
            await until(mps.is_ready)
            assert not {process.pid for process in orphans} & set(marked(mps.root))
        assert bystander.poll() is None
    finally:
        for process in (*orphans, bystander):
            process.kill()
            process.communicate()


async def test_a_second_supervisor_waits_for_the_first_to_end(mps, caplog):
    mps.root.mkdir(parents=True)
    other = StateFile(mps.root)
    assert other.lock()
    async with mps.supervised(mps.resource(0)):
        await until(lambda: "held by another gpu-plugin mps" in caplog.text)
        assert marked(mps.root) == []
        other.unlock()
        await until(mps.is_ready)


async def test_without_a_control_program_the_resource_is_down_until_there_is_one(mps):
    def nowhere():
        raise MpsError("no nvidia-cuda-mps-control anywhere")

    control, mps.control = mps.control, nowhere
    async with mps.supervised(mps.resource(0)):
        await until(lambda: mps.why() == "its MPS daemon is down: no nvidia-cuda-mps-control anywhere")
        mps.control = lambda: ("/nowhere/nvidia-cuda-mps-control",)
        await until(lambda: "/nowhere/nvidia-cuda-mps-control cannot be started: No such file" in mps.why())
        mps.control = control
        await until(mps.is_ready)


async def test_an_unforeseen_failure_of_one_resource_is_not_the_end_of_the_others(mps, caplog):
    def odd():
        if not mps.is_ready(OTHER):
            return control()
        raise ZeroDivisionError("odd")

    control, mps.control = mps.control, odd
    async with mps.supervised(mps.resource(1, name=OTHER)) as supervisor:
        await until(lambda: mps.is_ready(OTHER))
        supervisor.apply([mps.resource(1, name=OTHER), mps.resource(0)])
        await until(lambda: "ZeroDivisionError" in mps.why())
        assert mps.is_ready(OTHER)
    assert "failed unexpectedly" in caplog.text


async def test_the_end_comes_soon_even_if_a_daemon_and_a_gpu_hang(mps):
    async with mps.supervised(
        mps.resource(0), mps.resource(1, name=OTHER), tempo=replace(QUICK, probe=3600, quit=0.3, restore=1)
    ):
        await until(lambda: mps.is_ready() and mps.is_ready(OTHER))
        mps.fault("hang")
        mps.node.hang(1, 3600)
        began = anyio.current_time()
    assert anyio.current_time() - began < PATIENCE
    assert mps.node.compute_modes.get(1) == EXCLUSIVE
    assert mps.mode(0) == DEFAULT
    mps.node.heal(1)


async def test_servers_without_the_shared_memory_of_pods_are_warned_of_once(mps, caplog):
    shm = mps.root.parent / "own-shm"
    shm.mkdir()
    one, other = mps.resource(0), mps.resource(1, name=OTHER)
    async with mps.supervised(one, other, shm=shm):
        await until(lambda: mps.is_ready() and mps.is_ready(OTHER))
    assert caplog.text.count(f"{shm} of this process is not {mps.root}/shm") == 1
    caplog.clear()
    async with mps.supervised(one, shm=mps.root / "shm"):
        await until(mps.is_ready)
    assert "of this process" not in caplog.text


async def test_a_full_disk_does_not_end_the_work_of_a_daemons_clients(mps, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with mps.supervised(mps.resource(0)):
        await until(mps.is_ready)
        kept, asked = pid(mps), mps.asked()
        monkeypatch.setattr(os, "pwrite", full)
        await until(lambda: mps.asked() > asked + 2 * QUICK.misses)
        assert marked(mps.root) == [kept]
        monkeypatch.undo()
    assert caplog.text.count("No space left on device; its clients are still served") == 1


async def test_a_pipe_directory_that_takes_long_to_empty_holds_up_no_other_daemon(mps, monkeypatch):
    emptying, released = threading.Event(), threading.Event()

    def slow(pipe):
        if pipe == mps.root / OTHER / "pipe":
            emptying.set()
            released.wait(PATIENCE)
        prepare(pipe)

    monkeypatch.setattr(supervisor_module, "prepare", slow)
    async with mps.supervised(mps.resource(0), mps.resource(1, name=OTHER)) as supervisor:
        await until(emptying.is_set)
        await until(mps.is_ready)
        supervisor.apply([mps.resource(0), mps.resource(1, name=OTHER, replicas=2)])
        asked = mps.asked()
        await until(lambda: mps.asked() > asked + 1)
        assert not (mps.root / OTHER / "log" / mps_control.LOG).exists()
        released.set()
        await until(lambda: mps.is_ready(OTHER))
        assert mps.told(OTHER).count("Cmd:set_default_active_thread_percentage 50") == 1


async def test_daemons_that_would_follow_links_are_named_once(mps, monkeypatch, tmp_path, caplog):
    bare = tmp_path / "bare.py"  # as the tether without the right to mount
    bare.write_text("import os, sys\nos.execvp(sys.argv[3], sys.argv[3:])\n")
    monkeypatch.setattr(tether, "__file__", str(bare))
    async with mps.supervised(mps.resource(0)):
        await until(mps.is_ready)
        os.kill(pid(mps), signal.SIGKILL)
        await until(lambda: not mps.is_ready())
        await until(mps.is_ready)
    assert sum("MPS daemons follow links" in record.message for record in caplog.records) == 1


async def test_no_line_tells_of_links_where_they_lead_nowhere(mps, caplog):
    directory = str(mps.root.parent)
    if subprocess.run(["unshare", "--mount", "mount", "--bind", directory, directory], check=False).returncode:  # noqa: ASYNC221
        pytest.skip("mounts are not allowed here")
    async with mps.supervised(mps.resource(0)):
        await until(mps.is_ready)
    assert "MPS daemons follow links" not in caplog.text
