"""Start, stop, restart and misuse of the real process."""

import json
import signal
from pathlib import Path

import anyio
import pytest

from demo.stand_in_kubelet import StandInKubelet
from demo.stand_in_kubelet.journal import EventKind
from tests.node.daemon import GPU, DaemonProcess, healthy, ids
from tests.node.forked import run


@pytest.mark.parametrize(
    ("profile", "count", "numa"),
    [
        ("hgx-h100", 8, {(0,), (1,)}),
        ("dgx1-v100", 8, {(0,), (1,)}),
        ("dgx2-16", 16, {(0,), (1,)}),
        ("l40s-pcie-8", 8, {(0,), (1,)}),
        ("t4-4", 4, {(0,), (1,)}),
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
    assert len(list(daemon.directory.glob("gpu-plugin-*"))) == 1  # what the killed one left is gone


async def test_starts_before_the_kubelet_and_meets_it(directory, daemon):
    daemon.start(cold=True)
    await daemon.said("waiting for the kubelet")
    async with StandInKubelet(directory) as kubelet:
        await kubelet.wait_for(healthy(kubelet, 8))
        kubelet.check()


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


async def test_a_daemon_with_another_state_directory_starts_when_the_first_ends(kubelet, directory, daemon):
    second = DaemonProcess(directory, state="other")
    try:
        daemon.start()
        await kubelet.wait_for(healthy(kubelet, 8))
        second.start()
        await second.said("waiting: another daemon")
        assert kubelet.registrations[GPU].accepted == 1
        await daemon.stop()
        await kubelet.wait_for(lambda: kubelet.registrations[GPU].accepted == 2)
        await kubelet.wait_for(healthy(kubelet, 8))
        assert (await kubelet.admit("pod", {GPU: 8})).allocations[0].ids
    finally:
        second.kill()


async def test_allocate_answers_the_same_before_and_after_a_restart(kubelet, daemon):
    answers = []
    for pod in ("a", "b"):
        daemon.start(
            "--device-list-strategy=envvar,cdi-annotations,cdi-cri", "--pass-device-specs", "--gdrcopy-enabled"
        )
        await kubelet.wait_for(healthy(kubelet, 8))
        answers.append((await kubelet.admit(pod, {GPU: 8})).allocations[0].response)
        kubelet.release(pod)
        await daemon.stop()
    assert answers[0] == answers[1]
    assert len(answers[0].devices) >= 8 + 3
    assert len(answers[0].cdi_devices) == 9


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
    assert kubelet.registrations[GPU].accepted == 1  # what does not concern the list is not the kubelet's business


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("imex: {channelIDs: [0], required: true}", "IMEX channel 0 is required"),
        ("flags: {httpAddress: 2024-13-45}", "nothing is changed"),
        ("flags: {nvidiaDevRoot: /elsewhere}", "config.yaml: --dev-root cannot change while the process runs"),
        ("flags: {migStrategy: none, migStrategy: mixed}", "appears twice"),
        ("[" * 3000, "nothing is changed"),
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
    daemon.state = Path("/proc/gpu-plugin/state")  # where nobody can make a directory, root neither
    daemon.profile = "t4-4"
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 4))
    await daemon.said("cannot be written")
    assert (await daemon.stop())[0] == 0


async def test_json_log_lines_are_json(kubelet, daemon):
    daemon.start("--log-format", "json")
    await kubelet.wait_for(healthy(kubelet, 8))
    await daemon.stop()
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert lines[-1]["message"] == "stopped"


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["run", "--mig-strategy", "some"], {}, "--mig-strategy: 'some' is not one of none, single, mixed"),
        (["run", "--no-such-flag"], {}, "--no-such-flag"),
        (["run"], {"PASS_DEVICE_SPECS": "perhaps"}, "environment variable PASS_DEVICE_SPECS: 'perhaps' is neither"),
        (["run", "--health-poll-interval", "soon"], {}, "--health-poll-interval: 'soon' is not a duration"),
        (["run", "--config-file", "/no/such/file"], {}, "--config-file /no/such/file: No such file or directory"),
        (["run", "--simulate", "hgx-h10"], {}, "hgx-h100"),
        (["run", "--imex-channel-ids", "3"], {}, "channel IDs must be [] or [0], not [3]"),
        (["run", "--device-list-strategy", "envvar,cdi"], {}, "'cdi' is not one of envvar"),
        (["run", "--mig-strategy="], {"MIG_STRATEGY": "single"}, "--mig-strategy: '' is not one of"),
        (["run", "--kubelet-socket", "relative.sock"], {}, "'relative.sock' is not an absolute path"),
        (["fault", "--gpu", "1"], {}, "--xid"),
        (["fault", "--gpu", "1", "--xid", "79", "--lost"], {}, "one"),
        (["fault", "--gpu", "one", "--xid", "many"], {}, "many"),
    ],
)
def test_a_bad_flag_or_value_exits_2_with_one_line_that_says_which_and_why(arguments, environ, words):
    done = run(*arguments, environ=environ)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert words in line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("flags: {stateDir: 2024-13-45}", "config.yaml:1: flags.stateDir: '2024-13-45' is not an absolute path"),
        ("[" * 3000, "config.yaml"),
        ("flags: {migStrategy: none, migStrategy: mixed}", "flags.migStrategy: appears twice, first on line 1"),
        ("- a list", "holds a list, not a mapping"),
        ("flags: {migStrategi: none}", "did you mean flags.migStrategy?"),
        ("a: b: c", "mapping values are not allowed here"),
    ],
)
def test_a_file_that_cannot_be_taken_is_one_line(tmp_path, content, words):
    file = tmp_path / "config.yaml"
    file.write_text(content)
    done = run("run", "--config-file", str(file))
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert words in line


def test_help_and_version_say_what_there_is():
    assert "gpu-plugin 0." in run("--version").stdout
    assert "--device-plugin-dir" in run("run", "--help").stdout
    assert "fault" in run("--help").stdout


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


@pytest.mark.parametrize("strategy", ["envvar", "cdi-cri"])
async def test_without_a_driver_it_waits_if_told_to_and_leaves_cleanly(kubelet, daemon, strategy):
    daemon.profile = ""
    daemon.start("--fail-on-init-error=false", "--device-list-strategy", strategy)
    await daemon.said("looking again in")
    assert GPU not in kubelet.registrations
    status, seconds = await daemon.stop()
    assert (status, seconds < 1) == (0, True)


async def test_an_imex_channel_that_must_be_there_and_is_not_ends_it(daemon):
    daemon.start("--imex-channel-ids", "0", "--imex-required")
    assert await daemon.exit() == 2
    await daemon.said("IMEX channel 0 is required")


async def test_fault_names_a_gpu_that_is_not_there(kubelet, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    done = run("fault", "--state-dir", str(daemon.state), "--gpu", "9", "--xid", "79")
    assert done.returncode != 0
    [line] = done.stderr.splitlines()
    assert "9" in line
    assert "0 to 7" in line
    assert len(ids(kubelet)) == 8


def test_fault_without_a_daemon_says_so(directory):
    done = run("fault", "--state-dir", str(directory), "--gpu", "0", "--lost")
    assert done.returncode == 3
    assert "is one running" in done.stderr


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


async def test_sigusr2_tells_tasks_and_threads_and_changes_nothing(kubelet, daemon):
    daemon.start("--log-level", "error")
    await kubelet.wait_for(healthy(kubelet, 8))
    before = len(kubelet.events)
    daemon.signal(signal.SIGUSR2)
    await daemon.said("  thread nvml-events (")
    log = daemon.log.read_text()
    assert "SIGUSR2: stacks of all tasks and threads" in log
    assert "in _list_and_watch" in log
    assert len(kubelet.events) == before
    status, _ = await daemon.stop()
    assert status == 0


async def test_sigusr2_ends_nothing_from_the_start_to_the_last_line(kubelet, daemon):
    daemon.start(cold=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.asked_where_it_stands)
        await kubelet.wait_for(healthy(kubelet, 8))
        status, _ = await daemon.stop()
    assert status == 0, daemon.log.read_text()[-2000:]
    assert "SIGUSR2: stacks of all tasks and threads" in daemon.log.read_text()
