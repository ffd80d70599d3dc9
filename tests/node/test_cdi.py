"""CDI specifications of the real daemon: written before a device is given out, kept true, and removed as asked."""

import itertools
import json
import signal
import stat
import sys
import time
from pathlib import Path

import anyio
import pytest

from demo.stand_in_kubelet.admission import AdmissionError
from gpu_plugin.cli import main
from gpu_plugin.containers.cdi_files.directory import RECORD
from gpu_plugin.runtime import control
from gpu_plugin.simulation import driver_files
from gpu_plugin.simulation.profile import load
from tests.node.daemon import GPU, healthy, ids
from tests.revision import revision

GPU_FILE = "k8s.device-plugin.nvidia.com-gpu.json"
BY_CDI = ("--device-list-strategy", "cdi-cri")
SMALL = "nvidia.com/mig-1g.10gb"


def spec(daemon):
    return json.loads((daemon.specs / GPU_FILE).read_text())


def named(daemon):
    """The device nodes in the specification, by device name."""
    return {d["name"]: {n["path"] for n in d["containerEdits"]["deviceNodes"]} for d in spec(daemon)["devices"]}


async def given(kubelet, pod, resource=GPU, count=1):
    """Names of the devices that a container is given, without the kind."""
    response = (await kubelet.admit(pod, {resource: count})).allocations[0].response
    return {name.partition("=")[2] for name in response.cdi_devices}


def written(daemon):
    """The names of all files but the record of the specifications."""
    return sorted(path.name for path in daemon.specs.iterdir() if path.name != RECORD)


@pytest.mark.parametrize("strategy", ["uuid", "index"])
async def test_what_pods_are_given_is_in_the_specification(kubelet, daemon, strategy):
    daemon.start(*BY_CDI, "--device-id-strategy", strategy)
    await kubelet.wait_for(healthy(kubelet, 8))
    assert await given(kubelet, "pod", count=8) <= named(daemon).keys()
    assert stat.S_IMODE((daemon.specs / GPU_FILE).stat().st_mode) == 0o644
    assert stat.S_IMODE(daemon.specs.stat().st_mode) == 0o755
    assert written(daemon) == [GPU_FILE]
    assert (await daemon.stop())[0] == 0
    assert written(daemon) == [GPU_FILE]  # containers that restart need it


async def test_specifications_go_at_the_end_if_that_is_asked_for_and_nothing_else_does(kubelet, daemon):
    daemon.start(*BY_CDI, "--cdi-remove-on-exit")
    await kubelet.wait_for(healthy(kubelet, 8))
    (daemon.specs / "theirs.json").write_text("{}")
    status, seconds = await daemon.stop()
    assert (status, seconds < 1) == (0, True)
    assert written(daemon) == ["theirs.json"]


async def test_a_kill_leaves_what_the_next_daemon_serves_from_its_first_list_on(kubelet, daemon):
    daemon.start(*BY_CDI, "--cdi-remove-on-exit")
    await kubelet.wait_for(healthy(kubelet, 8))
    daemon.signal(signal.SIGKILL)
    await daemon.exit()
    before = revision(daemon.specs / GPU_FILE)
    (daemon.specs / f".{GPU_FILE}.abcdefgh").write_text("{")  # as a kill in the middle of a write leaves it
    daemon.start(*BY_CDI)
    await kubelet.wait_for(lambda: kubelet.registrations[GPU].accepted == 2)
    await kubelet.wait_for(healthy(kubelet, 8))
    with anyio.fail_after(10):
        while len(written(daemon)) > 1:
            await anyio.sleep(0.02)
    assert (await daemon.stop())[0] == 0
    assert "8 devices: 0 Healthy" not in daemon.log.read_text().rpartition("starting")[2]
    assert revision(daemon.specs / GPU_FILE) == before
    assert written(daemon) == [GPU_FILE]


async def test_a_directory_that_cannot_be_is_a_reason_and_heals(kubelet, daemon):
    daemon.specs.write_text("in the way")
    daemon.start(*BY_CDI)
    await daemon.said(f"cannot be written: {daemon.specs}: Not a directory")
    gpu = control.request(daemon.state, "status")["gpus"][3]
    assert (gpu["healthy"], gpu["state"], gpu["signals"]) == (True, "withheld", [])
    assert gpu["withheld"] == [f"its CDI specification cannot be written: {daemon.specs}: Not a directory"]
    assert control.request(daemon.state, "status")["cdi"]["trouble"] == gpu["withheld"][0]
    await kubelet.wait_for(healthy(kubelet, 0))
    daemon.specs.unlink()
    await kubelet.wait_for(healthy(kubelet, 8), timeout=20)
    assert await given(kubelet, "pod") <= named(daemon).keys()


async def test_an_invalid_specification_keeps_the_old_file_and_takes_all_devices_away(
    kubelet, daemon, directory, capsys
):
    """A driver root with `..` makes the specification invalid, because a link on the path could lead elsewhere."""
    root = driver_files.make(directory.parent / "root", load(daemon.profile).driver_version)
    daemon.start(*BY_CDI, "--nvidia-driver-root", str(root), "--include-gpus", "0,1,2")
    await kubelet.wait_for(healthy(kubelet, 3))
    assert (await daemon.stop())[0] == 0
    before = (daemon.specs / GPU_FILE).read_bytes()

    daemon.start(*BY_CDI, "--nvidia-driver-root", f"{root}/../root")
    await daemon.said("no device can be given to containers by CDI name: its CDI specification is invalid")
    await kubelet.wait_for(lambda: len(ids(kubelet)) == 8)
    await kubelet.wait_for(healthy(kubelet, 0))
    assert (daemon.specs / GPU_FILE).read_bytes() == before
    why = control.request(daemon.state, "status")["cdi"]["trouble"]
    assert "hostPath" in why
    for index in (2, 3):
        assert control.request(daemon.state, "status")["gpus"][index]["withheld"] == [why]
    main(["status", "--metrics", "--state-dir", str(daemon.state)])
    assert "gpu_plugin_cdi_ready 0" in capsys.readouterr().out
    assert (await daemon.stop())[0] == 0
    daemon.start(*BY_CDI, "--nvidia-driver-root", str(root))
    await kubelet.wait_for(healthy(kubelet, 8))


async def test_new_slices_are_served_once_they_are_in_the_specification_and_old_ones_stay(kubelet, daemon):
    daemon.profile = "h100-mig-single"
    daemon.start(*BY_CDI, "--mig-strategy", "mixed", "--device-id-strategy", "index")
    await kubelet.wait_for(lambda: SMALL in kubelet.resources and kubelet.resources[SMALL].allocatable > 0)
    count = kubelet.resources[SMALL].allocatable
    first, before = ids(kubelet, SMALL), named(daemon)
    assert await given(kubelet, "running", SMALL) <= before.keys()
    daemon.fault(7, mig="3g.40gb,3g.40gb")
    await kubelet.wait_for(healthy(kubelet, 2, "nvidia.com/mig-3g.40gb"), timeout=20)
    after = named(daemon)
    assert after["7:0"] != before.get("7:0")
    assert await given(kubelet, "new", "nvidia.com/mig-3g.40gb", 2) == {"7:0", "7:1"}
    gone = [each for each in first if each not in after]
    assert len(gone) < count
    assert all(
        after[name] == nodes
        for name, nodes in before.items()
        if not name.startswith("7") and name in after and name != "all"
    )


async def test_the_strategy_changes_live_to_cdi_and_back_and_to_cdi(kubelet, daemon, directory):
    file = directory / "config.yaml"

    async def asked(strategy, times):
        file.write_text(f"version: v1\nflags: {{plugin: {{deviceListStrategy: {strategy}}}}}\n")
        daemon.signal(signal.SIGHUP)
        with anyio.fail_after(10):
            while daemon.log.read_text().count("configuration: applied") < times:
                await anyio.sleep(0.02)
            # No pod is refused: the former strategy stays in force until the specification is written.
            for attempt in itertools.count():
                pod = f"pod{times}-{attempt}"
                given = (await kubelet.admit(pod, {GPU: 1})).allocations[0].response
                kubelet.release(pod)
                if ("envvar" if given.envs else "cdi-cri" if given.cdi_devices else "cdi-annotations") == strategy:
                    return given
                await anyio.sleep(0.02)
            raise AssertionError("unreachable")

    file.write_text("version: v1\n")
    daemon.start("--config-file", str(file))
    await kubelet.wait_for(healthy(kubelet, 8))
    assert not daemon.specs.exists()
    by_cdi = await asked("cdi-cri", 1)
    assert by_cdi.cdi_devices[0].partition("=")[2] in named(daemon)
    assert not (await asked("envvar", 2)).cdi_devices
    (daemon.specs / GPU_FILE).unlink()
    assert (await asked("cdi-annotations", 3)).annotations
    assert GPU_FILE in written(daemon)
    assert kubelet.registrations[GPU].total == 1


async def test_a_disk_that_hangs_holds_neither_the_start_nor_the_loop_nor_the_end(kubelet, directory):
    program = """
import sys, threading
from gpu_plugin.containers.cdi_files.directory import SpecDirectory
SpecDirectory.read = lambda *_: threading.Event().wait()
from gpu_plugin.cli import main
sys.exit(main(sys.argv[1:]))
"""
    command = [
        sys.executable, "-c", program, "run", "--simulate", "t4-4", "--device-plugin-dir", str(directory), *BY_CDI,
        "--cdi-dir", str(directory / "cdi"), "--state-dir", str(directory / "state"), "--cdi-remove-on-exit",
    ]  # fmt: skip
    async with await anyio.open_process(command, stdout=None, stderr=None, cwd=Path.cwd()) as daemon:
        await kubelet.wait_for(healthy(kubelet, 0))
        with pytest.raises(AdmissionError):
            await kubelet.admit("pod", {GPU: 1})
        began = time.monotonic()
        daemon.terminate()
        with anyio.fail_after(5):
            assert await daemon.wait() == 0
        assert time.monotonic() - began < 1
