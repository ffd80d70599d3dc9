"""Start, stop, restart and misuse of the real process."""

import signal
from pathlib import Path

import anyio
import pytest

from demo.stand_in_kubelet import StandInKubelet
from demo.stand_in_kubelet.journal import EventKind
from tests.node.daemon import GPU, DaemonProcess, healthy
from tests.node.forked import run


@pytest.mark.parametrize(
    ("profile", "count", "numa"),
    [
        ("hgx-h100", 8, {(0,), (1,)}),
        ("dgx2-16", 16, {(0,), (1,)}),
        ("h200", 1, {()}),
    ],
)
async def test_every_profile_is_served_with_its_numa_nodes(kubelet, directory, profile, count, numa):
    daemon = DaemonProcess(directory, profile=profile)
    try:
        daemon.start()
        await kubelet.wait_for(healthy(kubelet, count))
        assert set(kubelet.resources[GPU].numa.values()) == numa
        status, _ = await daemon.stop()
        assert status == 0
    finally:
        daemon.kill()


async def test_sigterm_ends_the_stream_in_order_and_leaves_no_socket(kubelet, directory, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    status, seconds = await daemon.stop()
    assert status == 0
    assert seconds < 1
    await kubelet.wait_for(lambda: any(e.kind is EventKind.STREAM_ENDED for e in kubelet.events))
    ended = next(e for e in kubelet.events if e.kind is EventKind.STREAM_ENDED)
    assert ended.text == "OK"
    assert list(directory.glob("gpu-plugin-*")) == []
    assert not (daemon.state / "control.sock").exists()


async def test_a_pod_whose_arguments_name_no_verb_serves(kubelet, daemon):
    daemon.start("-fail-on-init-error=false", "--mig-strategy", "none", "--pass-device-specs", verb=())
    await kubelet.wait_for(healthy(kubelet, 8))
    pod = await kubelet.admit("pod", {GPU: 1})
    assert pod.allocations[0].response.devices
    assert (await daemon.stop())[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
async def test_other_ends_are_clean_too(kubelet, daemon, number):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    daemon.signal(number)
    assert await daemon.exit() == 0


async def test_pods_keep_their_gpus_over_restarts_of_everything(kubelet, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    held = (await kubelet.admit("long", {GPU: 3})).allocations[0]
    await kubelet.restart()
    await kubelet.wait_for(healthy(kubelet, 8))
    daemon.signal(signal.SIGKILL)
    await daemon.exit()
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    fresh = (await kubelet.admit("fresh", {GPU: 5})).allocations[0]
    assert not set(held.ids) & set(fresh.ids)
    assert held.ids == tuple(kubelet.pods["long"].allocated["main"][GPU].ids)
    assert len(list(daemon.directory.glob("gpu-plugin-*"))) == 1  # the socket of the killed daemon is gone


async def test_our_sockets_lie_beside_the_kubelets_wherever_that_is(directory):
    daemon = DaemonProcess(directory)
    elsewhere = directory / "elsewhere"
    try:
        async with StandInKubelet(elsewhere) as kubelet:
            daemon.start(f"--kubelet-socket={elsewhere}/kubelet.sock", in_directory=False)
            await kubelet.wait_for(healthy(kubelet, 8))
            assert len(list(elsewhere.glob("gpu-plugin-*.sock"))) == 1
            await daemon.stop()
            kubelet.check()
    finally:
        daemon.kill()


async def test_sighup_takes_a_new_configuration_and_keeps_the_old_one_if_it_is_bad(kubelet, directory, daemon):
    config = directory / "config.yaml"
    config.write_text("version: v1\nflags: {plugin: {deviceIDStrategy: uuid}}\n")
    daemon.start("--config-file", str(config))
    await kubelet.wait_for(healthy(kubelet, 8))

    async def visible(pod):
        response = (await kubelet.admit(pod, {GPU: 8})).allocations[0].response
        kubelet.release(pod)
        return response.envs["NVIDIA_VISIBLE_DEVICES"]

    assert (await visible("a")).startswith("GPU-")
    config.write_text("version: v1\nflags: {plugin: {deviceIDStrategy: index}}\n")
    daemon.signal(signal.SIGHUP)
    await daemon.said("configuration: applied")
    assert await visible("b") == "0,1,2,3,4,5,6,7"
    config.write_text("version: v1\nflags: {plugin: {deviceIdStrategi: uuid}}\n")
    daemon.signal(signal.SIGHUP)
    await daemon.said("did you mean flags.plugin.deviceIDStrategy?")
    assert await visible("c") == "0,1,2,3,4,5,6,7"
    assert kubelet.registrations[GPU].accepted == 1  # the device list is the same


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("imex: {channelIDs: [0], required: true}", "IMEX channel 0 is required"),
        ("flags: {nvidiaDevRoot: /elsewhere}", "config.yaml: --dev-root cannot change while the process runs"),
    ],
)
async def test_a_reload_that_cannot_be_done_leaves_everything_as_it_was(kubelet, directory, daemon, written, said):
    daemon.profile = "h200"
    config = directory / "config.yaml"
    config.write_text("version: v1\n")
    daemon.start("--config-file", str(config))
    await kubelet.wait_for(healthy(kubelet, 1))
    config.write_text(f"version: v1\n{written}\n")
    daemon.signal(signal.SIGHUP)
    await daemon.said(said)
    await kubelet.admit("pod", {GPU: 1})
    assert kubelet.registrations[GPU].total == 1
    assert "Traceback" not in daemon.log.read_text()


async def test_a_state_directory_that_cannot_be_written_costs_only_memory(kubelet, daemon):
    daemon.state = Path("/proc/gpu-plugin/state")  # not even root can make a directory there
    daemon.profile = "t4-4"
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 4))
    await daemon.said("cannot be written")
    assert (await daemon.stop())[0] == 0


@pytest.mark.parametrize("strategy", ["envvar", "cdi-cri"])
def test_without_a_driver_it_exits_with_the_remedy(directory, strategy):
    done = run(
        "run", "--device-plugin-dir", str(directory), "--state-dir", str(directory / "s"), "--device-list-strategy", strategy,
        "--driver-root-ctr-path", str(directory / "no-driver"), environ={"LD_LIBRARY_PATH": ""},
    )  # fmt: skip
    assert done.returncode == 1
    assert "--fail-on-init-error=false" in done.stderr
    assert f"below {directory}/no-driver: " in done.stderr
    assert "mount the driver's root at --driver-root-ctr-path" in done.stderr
    assert "Traceback" not in done.stderr


async def test_it_lives_as_well_on_uvloop(kubelet, daemon):
    daemon.start("--event-loop", "uvloop")
    await kubelet.wait_for(healthy(kubelet, 8))
    daemon.fault(1, xid=79)
    await kubelet.wait_for(healthy(kubelet, 7))
    await kubelet.restart()
    await kubelet.wait_for(healthy(kubelet, 7))
    status, seconds = await daemon.stop()
    assert (status, seconds < 1) == (0, True)
    assert list(daemon.directory.glob("gpu-plugin-*")) == []


async def test_sigusr2_ends_nothing_from_the_start_to_the_last_line(kubelet, daemon):
    daemon.start(cold=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.asked_where_it_stands)
        await kubelet.wait_for(healthy(kubelet, 8))
        status, _ = await daemon.stop()
    assert status == 0, daemon.log.read_text()[-2000:]
    assert "SIGUSR2: stacks of all tasks and threads" in daemon.log.read_text()
